"""Run by test_optim.py in a separate process with four forced CPU devices; prints JSON.

For each mesh: the losses of three steps of a Llama with Muon, and how far the change of every
parameter is from its change on one device, relative.  "resumed": whether a checkpoint between two
steps changes a bit of the state.
"""

import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from eight_devices import EXACT, MESHES, ONE, batch, trainer, weights

from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.process import set_xla_flags
from jaxllm.train.step import Trainer

MESHES["split"] = ONE | dict(data=4, shard_optimizer=True)


def muon_trainer(mesh: str) -> Trainer:
    plain = trainer("llama3", mesh, **EXACT)
    rates = {"name": "muon", "muon_learning_rate": 0.02, "schedule": "constant"}
    optimizer = plain.config.optimizer.model_copy(update=rates)
    config = plain.config.model_copy(update={"optimizer": optimizer})
    return Trainer(config, plain.mesh)


def run(mesh: str) -> tuple[list[float], dict]:
    t = muon_trainer(mesh)
    start = weights("llama3")
    state = t.init(jax.device_put(start, t.state_shardings.params))
    program, losses = t.trace_train_step().lower().compile(), []
    for seed in range(3):
        state, metrics = program(state, t.put_batch(batch(seed=seed)))
        losses.append(float(metrics["loss"]))
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, start)
    return losses, {jax.tree_util.keystr(p): d for p, d in jax.tree.leaves_with_path(moved)}


def resumed(mesh: str) -> bool:
    t = muon_trainer(mesh)
    program = t.trace_train_step().lower().compile()
    step = lambda state, seed: jax.block_until_ready(program(state, t.put_batch(batch(seed=seed))))
    state, _ = step(t.init(), 0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), 1)
        checkpoints.save(1, state.saved(), {}, None)
        kept, _ = step(state, 1)
        checkpoints.close()
        checkpoints = Checkpoints(Path(folder), 1)
        saved = checkpoints.restore(1, t.abstract_state().saved())
        again, _ = step(jax.block_until_ready(t.complete(saved)), 1)
        checkpoints.close()
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    set_xla_flags(deterministic=False)  # as train.py does
    losses, moved = run("one")
    found = {"one": {"losses": losses}}
    for mesh in ("fsdp", "fsdp, tensor", "split"):
        losses, others = run(mesh)
        norm = np.linalg.norm
        errors = {name: float(norm(others[name] - d) / norm(d)) for name, d in moved.items()}
        found[mesh] = {"losses": losses, "errors": errors}
    print(json.dumps(found | {"resumed": {m: resumed(m) for m in ("one", "fsdp")}}))
