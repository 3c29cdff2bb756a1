"""A tiny Llama with adapters for tests, and the same model written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_models import tiny

from jaxllm.config import Config, MeshConfig, OptimizerConfig, TrainConfig
from jaxllm.models import create
from jaxllm.sharding import make_mesh
from jaxllm.train.step import Trainer
from jaxllm.weights.adapters import load_base
from jaxllm.weights.places import named_params
from pallas_kernels import QuantizedWeight
from pallas_kernels.quantized.formats import dequantize

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = dict(n_heads=4, n_kv_heads=2, d_model=32, d_ff=96, d_head=16)


class Drawn:
    """Weights drawn from a seed, in place of a folder's."""

    packing = None

    def __init__(self, config):
        params = named_params(nnx.state(create(config, seed=3), nnx.Param))
        draw = np.random.default_rng(0).normal
        self.arrays = {  # large enough that attention is far from uniform
            name: np.float32(draw(1, 0.2, p.shape) if p.ndim == 1 else draw(0, 0.2, p.shape))
            for name, p in params.items()
        }

    def param(self, name):
        return self.arrays[name]


def trainer_of(lora, *, mesh=None, train=None, **model):
    """A trainer of the tiny Llama; train, model: options besides its own."""
    config = tiny("llama3", **SHAPE | dict(init_from="drawn", lora=lora) | model)
    train = dict(steps=10, batch_size=4, seq_len=16) | (train or {})
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule="constant")
    mesh = MeshConfig(**mesh or dict(data=1))
    config = Config(model=config, train=TrainConfig(**train), optimizer=optimizer, mesh=mesh)
    size = mesh.data * mesh.fsdp * mesh.tensor * mesh.context
    return Trainer(config, make_mesh(mesh, jax.devices()[:size]))


def state_of(trainer):
    """A state whose B is not zero, so that every gradient is there."""
    model = trainer.config.model
    base, _ = load_base(Drawn(model), model, trainer.abstract_base_params, trainer.mesh)
    state = trainer.init(base=base)
    leaves, structure = jax.tree.flatten(state.params)
    rng = np.random.default_rng(5)
    leaves = [jax.device_put(np.float32(rng.normal(0, 0.2, p.shape)), p.sharding) for p in leaves]
    return state._replace(params=jax.tree.unflatten(structure, leaves))


def batch_of(rows=4, length=16, vocabulary=100):
    tokens = np.random.default_rng(1).integers(0, vocabulary, (rows, length + 1))
    labels = tokens[:, 1:].copy()
    labels[:, 3] = -100
    return {"tokens": np.int32(tokens[:, :-1]), "labels": np.int32(labels)}


def plain_arrays(state):
    """{dotted path: float32 array} of all parameters, dequantized."""
    found = {}
    for part in (state.params, state.base):
        for name, variable in named_params(part).items():
            x = variable.get_value()
            packed = isinstance(x, QuantizedWeight)
            found[name] = np.asarray(dequantize(x) if packed else x, np.float32)
    return found


def loss_in_float64(params, batch, config):
    """The mean loss, written out in the paper's formulas; params: {dotted path: array}."""
    lora, D = config.lora, config.head_dim

    def linear(x, name):
        y = x @ params[f"{name}.weight"]
        if f"{name}.adapter.a" not in params:
            return y
        return y + lora.scale * (x @ params[f"{name}.adapter.a"]) @ params[f"{name}.adapter.b"]

    def norm(x, weight):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    def heads(x):
        return x.reshape(*x.shape[:2], -1, D)

    T = batch["tokens"].shape[1]
    angle = np.arange(T)[:, None] * config.rope_theta ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["embedding.wte"][batch["tokens"]]
    for i in range(config.n_layers):
        at = f"blocks.{i}."
        y = norm(x, params[f"{at}norm_1.weight"])
        q, k, v = (heads(linear(y, f"{at}attention.{n}")) for n in "qkv")
        q, k, shared = rotate(q), rotate(k), config.n_heads // config.n_kv_heads
        k, v = (jnp.repeat(z, shared, axis=2) for z in (k, v))
        score = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)
        p = jax.nn.softmax(jnp.where(np.tril(np.ones((T, T), bool)), score, -jnp.inf))
        y = jnp.einsum("bhts,bshd->bthd", p, v).reshape(*x.shape[:2], -1)
        x = x + linear(y, f"{at}attention.out")
        y = norm(x, params[f"{at}norm_2.weight"])
        gated = jax.nn.silu(linear(y, f"{at}mlp.gate")) * linear(y, f"{at}mlp.up")
        x = x + linear(gated, f"{at}mlp.down")
    logits = norm(x, params["norm.weight"]) @ params["head.weight"]
    logits = jax.nn.log_softmax(logits[..., : config.vocab_size])
    known = batch["labels"] >= 0
    picked = jnp.take_along_axis(logits, jnp.where(known, batch["labels"], 0)[..., None], -1)
    return -(picked[..., 0] * known).sum() / known.sum()
