"""Run by test_context.py in a separate process with eight forced CPU devices; prints JSON.

For each model and mesh: the loss and the gradient of every parameter against those on one device
(XLA forms, float32), and the collectives of that program; the estimated memory of two meshes.
"""

import json

import jax
import numpy as np
from eight_devices import collectives
from flax import nnx

from jaxllm.config import (
    Config,
    DataConfig,
    GPT2Config,
    Llama3Config,
    OptimizerConfig,
    TrainConfig,
    VLSTMConfig,
)
from jaxllm.data.loader import documents
from jaxllm.sharding import make_mesh
from jaxllm.train import estimate
from jaxllm.train.step import Trainer

BATCH, SEQ, LAYERS, WIDTH = 4, 72, 1, 128  # no parameter has an axis of 72, 36 or 18
SHAPE = dict(vocab_size=250, n_layers=LAYERS, n_heads=4, d_model=WIDTH, max_seq_len=160)
MODELS = {
    "gpt2": lambda **o: GPT2Config(
        **SHAPE, softcap=5.0, **o
    ),  # without a cap k's bias has no effect
    "llama3": lambda **o: Llama3Config(
        **SHAPE | {"n_heads": 8}, n_kv_heads=4, d_ff=256, softcap=5.0, **o
    ),
    "vlstm": lambda **o: VLSTMConfig(**SHAPE, d_ff=256, chunk_size=16, **o),
}
MESHES = {
    "one": dict(data=1),
    "two parts": dict(data=2, context=2),
    "four parts": dict(data=1, context=4),
    "all axes": dict(data=1, fsdp=2, context=2, tensor=2),
}
CASES = {
    "stream": ["one", "two parts"],
    "documents": ["one", "four parts", "all axes"],
}


def trainer(model: str, mesh: str, pack: str, **more) -> Trainer:
    config = Config(
        model=MODELS[model](
            kernels="xla", compute_dtype="float32", residual_dtype="float32", **more
        ),
        data=DataConfig(pack=pack),
        train=TrainConfig(steps=1, batch_size=BATCH, seq_len=SEQ),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=MESHES[mesh],
    )
    devices = jax.devices()[: int(np.prod(list(MESHES[mesh].values())))]
    return Trainer(config, make_mesh(config.mesh, devices))


def random_params(t: Trainer) -> nnx.State:
    """Initial weights with noise, so that no bias, gate or norm is without effect."""
    rng = np.random.default_rng(0)
    params = nnx.state(t._make_model(), nnx.Param)
    return jax.tree.map(
        lambda p: np.asarray(p) + 0.1 * rng.standard_normal(p.shape, p.dtype), params
    )


def gradients(t: Trainer, params: nnx.State) -> tuple[dict[str, np.ndarray], list[tuple]]:
    """({"loss": loss, parameter: its gradient}, the `collectives` of the program)."""
    tokens = np.random.default_rng(1).integers(0, 250, (BATCH, SEQ + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": np.where(tokens[:, 1:] % 7, tokens[:, 1:], -100)}
    if t.config.data.pack == "documents":
        batch |= documents(batch["tokens"] % 16, 0)
    grad = jax.jit(
        jax.value_and_grad(lambda params, batch: t._loss_sum(params, batch)[0]),
        out_shardings=(None, t.state_shardings.params),
    )
    with jax.set_mesh(t.mesh):
        arguments = jax.device_put(params, t.state_shardings.params), t.put_batch(batch)
        program = grad.lower(*arguments).compile()
    loss, grads = program(*arguments)
    named = {jax.tree_util.keystr(p): np.asarray(g) for p, g in jax.tree.leaves_with_path(grads)}
    return {"loss": np.asarray(loss)} | named, collectives(program.as_text(), dict(t.mesh.shape))


def compare(model: str) -> dict:
    """{pack: {mesh: {"errors": {name: relative to the largest}, "collectives": ...}}}."""
    params, out = random_params(trainer(model, "one", "stream")), {}
    for pack, meshes in CASES.items():
        if (model, pack) == ("vlstm", "stream"):
            continue  # without attention and positions it has nothing of its own
        more = {"window": 11} if pack == "documents" and model != "vlstm" else {}
        results = {m: gradients(trainer(model, m, pack, **more), params) for m in meshes}
        one, _ = results.pop("one")
        out[pack] = {
            mesh: {
                "errors": {
                    n: float(abs(g - one[n]).max() / abs(one[n]).max()) for n, g in got.items()
                },
                "collectives": moved,
            }
            for mesh, (got, moved) in results.items()
        }
        out[pack]["one"] = {n: float(abs(g).max()) for n, g in one.items()}
    return out


def memory(seq_len: int, **mesh: int) -> dict[str, int]:
    """The estimated bytes by part of a Llama with its kernels, one sequence per step."""
    config = Config(
        model=MODELS["llama3"](kernels="mosaic", remat="block"),
        train=TrainConfig(steps=1, batch_size=1, seq_len=seq_len),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=mesh,
    )
    t = Trainer(config, make_mesh(config.mesh, jax.devices()[: config.mesh.context]))
    return estimate.state_memory(t) | estimate.activation_memory(t)


if __name__ == "__main__":
    out = {model: compare(model) for model in MODELS}
    out["sizes"] = dict(batch=BATCH, seq=SEQ, width=WIDTH, heads=SHAPE["n_heads"], meshes=MESHES)
    out["memory"] = {"half": memory(SEQ), "two": memory(2 * SEQ, context=2)}
    print(json.dumps(out))
