"""Run by test_sharding.py in a separate process with four forced CPU devices; prints JSON.

For each model and mesh: the losses of two steps on fixed random batches (XLA forms, float32), how
parameters and moments lie on the devices, and what the step looks like lowered for CUDA with its
kernels; the text that a Llama writes on one device and on four.
"""

import json
import re

import jax
import numpy as np

from jaxllm.config import (
    Config,
    DataConfig,
    GPT2Config,
    Llama3Config,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
    VLSTMConfig,
)
from jaxllm.data.loader import documents
from jaxllm.infer import decode
from jaxllm.sharding import make_mesh
from jaxllm.train.step import Trainer

BATCH, SEQ, STEPS = 8, 32, 2
SHAPE = dict(vocab_size=250, n_layers=1, n_heads=4, d_model=256, max_seq_len=SEQ)
MODELS = {
    "gpt2": lambda **o: GPT2Config(**SHAPE, **o),
    "llama3": lambda **o: Llama3Config(**SHAPE, n_kv_heads=2, d_ff=256, **o),
    "vlstm": lambda **o: VLSTMConfig(**{**SHAPE, "n_heads": 2}, d_ff=256, chunk_size=16, **o),
}
MESHES = {
    "one": dict(data=1, fsdp=1, tensor=1),
    "data": dict(data=4, fsdp=1, tensor=1),
    "fsdp": dict(data=1, fsdp=4, tensor=1),
    "tensor": dict(data=1, fsdp=2, tensor=2),
    "all": dict(data=2, fsdp=1, tensor=2),
}
PACKED = ("one", "tensor")
WANTED = {"gpt2": ["one", "fsdp", "tensor"], "llama3": list(MESHES), "vlstm": ["one", "tensor"]}


def trainer(
    model: str, mesh: str, kernels: str, accum: int = 1, pack: str = "stream", **more
) -> Trainer:
    shape = MESHES[mesh]
    config = Config(
        model=MODELS[model](kernels=kernels, **more),
        data=DataConfig(pack=pack),
        train=TrainConfig(steps=STEPS, batch_size=BATCH, seq_len=SEQ, grad_accum=accum),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=shape,
    )
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    return Trainer(config, make_mesh(config.mesh, devices))


def run(model: str, mesh: str, accum: int = 1, pack: str = "stream") -> dict:
    t = trainer(model, mesh, "xla", accum, pack, compute_dtype="float32", residual_dtype="float32")
    state = t.init()
    program = t.trace_train_step().lower().compile()
    rng = np.random.default_rng(0)
    losses, norms = [], []
    for _ in range(STEPS):
        tokens = rng.integers(0, 250, (BATCH, SEQ + 1)).astype(np.int32)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        if pack == "documents":
            batch |= documents(batch["tokens"] % 8, 0)
        before = state
        state, metrics = program(state, t.put_batch(batch))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    adam = next(s for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s))
    params, mu, nu = (jax.tree.leaves(x) for x in (state.params, adam.mu, adam.nu))
    return {
        "losses": losses,
        "norms": norms,
        "donated": all(x.is_deleted() for x in jax.tree.leaves(before)),
        "moments_like_params": all(
            p.sharding == m.sharding == n.sharding for p, m, n in zip(params, mu, nu, strict=True)
        ),
        "part_held": sum(p.addressable_shards[0].data.size for p in params)
        / sum(p.size for p in params),
    }


def greedy(model: str, mesh: str) -> list[list[int]]:
    """Twelve tokens after each of four prompts with several lengths."""
    t = trainer(model, mesh, "xla", compute_dtype="float32", residual_dtype="float32")
    prompts = [[5, 6, 7, 8, 9], [100], [3, 4], [7] * 12]
    config = SampleConfig(tokens=12, temperature=0.0)
    with jax.set_mesh(t.mesh):
        # Large weights make tokens depend on the whole text.
        params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, t.init().params)
        return np.stack(list(decode.stream_tokens(t.graph, params, prompts, config))).tolist()


def is_adam(x) -> bool:
    return hasattr(x, "mu") and hasattr(x, "nu")


def kernel_shapes(model: str, mesh: str) -> list[str]:
    """Shapes of the operands of the step's kernels, lowered for CUDA: "8x32x4x64", ..."""
    t = trainer(model, mesh, "mosaic")
    text = t.trace_train_step().lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "mosaic_gpu" in line and "custom_call" in line]
    return sorted({s for c in calls for s in re.findall(r"tensor<([0-9x]+)x[a-z]", c[-2000:])})


if __name__ == "__main__":
    out = {m: {mesh: run(m, mesh) for mesh in meshes} for m, meshes in WANTED.items()}
    out["llama3"]["accumulated"] = run("llama3", "all", accum=2)
    out["packed"] = {m: {mesh: run(m, mesh, pack="documents") for mesh in PACKED} for m in MODELS}
    out["greedy"] = {mesh: greedy("llama3", mesh) for mesh in ("one", "all")}
    out["kernels"] = {mesh: kernel_shapes("llama3", mesh) for mesh in ("data", "tensor")}
    print(json.dumps(out))
