"""Run by test_split_optimizer.py in a separate process with four forced CPU devices; prints JSON.

For each model and mesh: the losses of two steps on fixed random batches (XLA forms, float32), how
much of parameters and moments a device holds, and what the compiled program gathers; the losses of
bf16 runs that continue on another mesh.
"""

import json
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

from jaxllm.config import Config, GPT2Config, Llama3Config, OptimizerConfig, TrainConfig
from jaxllm.sharding import make_mesh
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.step import Trainer

BATCH, SEQ, STEPS = 8, 32, 2
SHAPE = dict(vocab_size=250, n_layers=1, n_heads=4, d_model=256, max_seq_len=SEQ, kernels="xla")
MODELS = {
    "gpt2": lambda **o: GPT2Config(**SHAPE, **o),
    "llama3": lambda **o: Llama3Config(**SHAPE, n_kv_heads=2, d_ff=256, **o),
}
MESHES = {
    "one": dict(data=1),
    "data": dict(data=4),
    "zero": dict(data=4, shard_optimizer=True),
    "zero_tensor": dict(data=2, tensor=2, shard_optimizer=True),
}
# (model, mesh, parts of the batch)
CASES = [
    ("gpt2", "one", 1),
    ("gpt2", "zero_tensor", 1),
    ("llama3", "one", 1),
    ("llama3", "data", 1),
    ("llama3", "zero", 1),
    ("llama3", "zero", 2),
]


def trainer(model: str, mesh: str, accum: int = 1, **more) -> Trainer:
    shape = MESHES[mesh]
    config = Config(
        model=MODELS[model](**more),
        train=TrainConfig(steps=STEPS, batch_size=BATCH, seq_len=SEQ, grad_accum=accum),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=shape,
    )
    devices = jax.devices()[: shape["data"] * shape.get("tensor", 1)]
    return Trainer(config, make_mesh(config.mesh, devices))


def run(model: str, mesh: str, accum: int) -> dict:
    t = trainer(model, mesh, accum, compute_dtype="float32", residual_dtype="float32")
    state = t.init()
    program = t.trace_train_step().lower().compile()
    losses, norms = [], []
    for batch in batches():
        before = state
        state, metrics = program(state, t.put_batch(batch))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    params = jax.tree.leaves(state.params)
    moments = jax.tree.leaves([optax.tree.get(state.opt_state, name) for name in ("mu", "nu")])
    return {
        "losses": losses,
        "norms": norms,
        "donated": all(x.is_deleted() for x in jax.tree.leaves(before)),
        "params_held": part_held(params),
        "moments_held": part_held(moments),
        "gathered": gathered(program.as_text()),
        "shapes": [p.shape for p in params],
    }


def part_held(arrays: list[jax.Array]) -> float:
    """The part of some arrays that one device holds."""
    return sum(a.addressable_shards[0].data.size for a in arrays) / sum(a.size for a in arrays)


def batches() -> list[dict]:
    tokens = np.random.default_rng(0).integers(0, 250, (STEPS, BATCH, SEQ + 1)).astype(np.int32)
    return [{"tokens": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]


def gathered(program: str) -> list[list[int]]:
    """Shapes of the results of all all-gathers in a compiled program."""
    found = []
    for line in program.splitlines():
        if result := re.search(r" = (.*?) all-gather(-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", result[1])
            found += [[int(n) for n in shape.split(",") if n] for shape in shapes]
    return found


def continued() -> dict:
    """Second losses by the mesh of the first step and of the second; "kept": without a checkpoint.

    The runs are in bf16 and recompute most of a block.
    """
    first, second = batches()
    trainers = {mesh: trainer("llama3", mesh, remat="mlp") for mesh in ("one", "zero")}
    programs = {mesh: t.trace_train_step().lower().compile() for mesh, t in trainers.items()}
    loss = lambda mesh, state: float(
        programs[mesh](state, trainers[mesh].put_batch(second))[1]["loss"]
    )
    found = {}
    for start, t in trainers.items():
        state, _ = jax.block_until_ready(programs[start](t.init(), t.put_batch(first)))
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder), 1)
            checkpoints.save(1, state.saved(), {}, None)
            found[start] = {"kept": loss(start, state)}
            checkpoints.close()
            for end, other in trainers.items():
                checkpoints = Checkpoints(Path(folder), 1)
                saved = checkpoints.restore(1, other.abstract_state().saved())
                # Programs that run at the same time on a CPU may wait for each other forever.
                found[start][end] = loss(end, jax.block_until_ready(other.with_copies(saved)))
                checkpoints.close()
    return found


if __name__ == "__main__":
    found = {f"{model} {mesh} {accum}": run(model, mesh, accum) for model, mesh, accum in CASES}
    print(json.dumps(found | {"continued": continued()}))
