"""Run by test_split_optimizer.py in a separate process with four forced CPU devices; prints JSON.

For each model and mesh: two steps as in eight_devices.py; the losses of bf16 runs that continue on
another mesh.
"""

import json
import tempfile
from pathlib import Path

import jax
from eight_devices import MESHES, ONE, batch, steps, trainer

from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.process import set_xla_flags

SPLIT = ONE | dict(shard_optimizer=True)
MESHES |= {"split": SPLIT | dict(data=4), "split, tensor": SPLIT | dict(data=2, tensor=2)}
# (model, mesh, parts of the batch)
CASES = [
    ("llama3", "one", 1),
    ("llama3", "data", 1),
    ("llama3", "split", 2),
    ("llama3", "split, tensor", 1),
]


def continued() -> dict:
    """Second losses by the mesh of the first step and of the second; "kept": without a checkpoint.

    The runs are in bf16 and recompute most of a block.
    """
    more = dict(kernels="xla", remat="mlp", n_layers=3)
    trainers = {mesh: trainer("llama3", mesh, **more) for mesh in ("one", "split")}
    programs = {mesh: t.trace_train_step().lower().compile() for mesh, t in trainers.items()}
    step = lambda mesh, state, seed: jax.block_until_ready(
        programs[mesh](state, trainers[mesh].put_batch(batch(seed=seed)))
    )
    loss = lambda mesh, state: float(step(mesh, state, seed=2)[1]["loss"])
    found = {}
    for start, t in trainers.items():
        state, _ = step(start, t.init(), seed=1)
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder), 1)
            checkpoints.save(1, state.saved(), {}, None)
            found[start] = {"kept": loss(start, state)}
            checkpoints.close()
            for end, other in trainers.items():
                checkpoints = Checkpoints(Path(folder), 1)
                saved = checkpoints.restore(1, other.abstract_state().saved())
                # Programs that run at the same time on a CPU may wait for each other forever.
                found[start][end] = loss(end, jax.block_until_ready(other.complete(saved)))
                checkpoints.close()
    return found


if __name__ == "__main__":
    set_xla_flags(deterministic=False)  # as train.py does
    found = {f"{model}, {mesh}, {accum}": steps(model, mesh, accum) for model, mesh, accum in CASES}
    print(json.dumps(found | {"continued": continued()}))
