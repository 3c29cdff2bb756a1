"""Run by test_sharding.py in a separate process with eight forced CPU devices; prints JSON.

For each model and mesh: loss and gradients on one random batch (XLA forms, float32) against those
on one device, and the collectives of the compiled program.  For a Llama also: two whole steps, the
text that it writes, and the shapes that its kernels see.  MESHES=all adds the meshes whose axes are
also in others.
"""

import json
import os
import re
import warnings
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

from jaxllm.config import (
    Config,
    DataConfig,
    GPT2Config,
    Llama3Config,
    MeshConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
    VLSTMConfig,
)
from jaxllm.data.loader import documents
from jaxllm.infer import decode
from jaxllm.layers import Linear
from jaxllm.models import create
from jaxllm.sharding import AXES, make_mesh
from jaxllm.train.estimate import equations
from jaxllm.train.process import set_xla_flags
from jaxllm.train.step import Trainer
from pallas_kernels import quantize

# No axis of a parameter, or of a part of one, is a multiple of SEQ or of a device's part of it.
BATCH, SEQ, WIDTH = 8, 40, 128
STEP_ROWS = 16  # of whole steps: each of four groups of devices has two in both accumulated parts
SHAPE = dict(vocab_size=250, n_layers=1, n_heads=4, d_model=WIDTH, max_seq_len=64)
EXACT = dict(kernels="xla", compute_dtype="float32", residual_dtype="float32")
MODELS = {
    # Without the cap the gradient of the keys' biases is zero.
    "gpt2": lambda **o: GPT2Config(**SHAPE | dict(softcap=5.0, window=11) | o),
    "llama3": lambda **o: Llama3Config(
        **SHAPE | dict(n_heads=8, n_kv_heads=4, d_ff=256, qkv_bias=True, qk_norm=True) | o
    ),
    "vlstm": lambda **o: VLSTMConfig(**SHAPE | dict(d_ff=256, chunk_size=20) | o),
}
ONE = dict(data=1, fsdp=1, context=1, tensor=1)
MESHES: dict[str, dict[str, Any]] = {
    "one": ONE,
    "data": ONE | dict(data=4),
    "fsdp": ONE | dict(fsdp=4),
    "tensor": ONE | dict(tensor=4),
    "data, fsdp": ONE | dict(data=2, fsdp=2),
    "data, tensor": ONE | dict(data=2, tensor=2),
    "fsdp, tensor": ONE | dict(fsdp=2, tensor=2),
    "data, fsdp, tensor": ONE | dict(data=2, fsdp=2, tensor=2),
    "context": ONE | dict(context=4),
    "data, context": ONE | dict(data=2, context=2),
    "fsdp, context, tensor": ONE | dict(fsdp=2, context=2, tensor=2),
}
# The data axis alone is in test_split_optimizer.py; a Llama's steps are on "data, fsdp, tensor".
WANTED = {
    ("gpt2", "documents"): ["data, fsdp, tensor"],
    ("llama3", "documents"): ["fsdp, context, tensor"],
    ("vlstm", "documents"): ["data, fsdp, tensor", "fsdp, context, tensor"],
}
if os.environ.get("MESHES") == "all":
    WANTED |= {(model, "documents"): [mesh for mesh in MESHES if mesh != "one"] for model in MODELS}
    WANTED |= {(model, "stream"): ["data, context"] for model in ("gpt2", "llama3")}


def trainer(
    model: str, mesh: str, accum: int = 1, pack: str = "documents", rows: int = BATCH, **more
) -> Trainer:
    config = Config(
        model=MODELS[model](**more),
        data=DataConfig(pack=pack),
        train=TrainConfig(steps=2, batch_size=rows, seq_len=SEQ, grad_accum=accum),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=MESHES[mesh],
    )
    count = prod(MESHES[mesh][axis] for axis in ONE)
    return Trainer(config, make_mesh(config.mesh, jax.devices()[:count]))


@cache
def weights(model: str) -> nnx.State:
    """Initial weights with noise, so that no bias, gate or norm is without effect."""
    t, rng = trainer(model, "one", **EXACT), np.random.default_rng(0)
    return jax.tree.map(
        lambda p: np.asarray(p) + 0.1 * rng.standard_normal(p.shape, p.dtype), t.init().params
    )


def batch(pack: str = "documents", seed: int = 1, rows: int = BATCH) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, 250, (rows, SEQ + 1)).astype(np.int32)
    found = {"tokens": tokens[:, :-1], "labels": np.where(tokens[:, 1:] % 7, tokens[:, 1:], -100)}
    return found | (documents(found["tokens"] % 16, 0) if pack == "documents" else {})


def gradients(model: str, mesh: str, pack: str) -> tuple[dict, list, float]:
    """({"loss" or parameter: value or gradient}, collectives, part of the parameters held)."""
    t = trainer(model, mesh, pack=pack, **EXACT)
    grad = jax.jit(
        jax.value_and_grad(lambda params, batch: t._loss_sum(params, batch)[0]),
        out_shardings=(None, t.state_shardings.params),
    )
    with jax.set_mesh(t.mesh):
        arguments = (
            jax.device_put(weights(model), t.state_shardings.params),
            t.put_batch(batch(pack)),
        )
        program = grad.lower(*arguments).compile()
    loss, grads = program(*arguments)
    named = {jax.tree_util.keystr(p): np.asarray(g) for p, g in jax.tree.leaves_with_path(grads)}
    moved = collectives(program.as_text(), dict(t.mesh.shape))
    return {"loss": np.asarray(loss)} | named, moved, part_held(arguments[0])


def part_held(tree: Any) -> float:
    """The part of some arrays that one device holds."""
    arrays = jax.tree.leaves(tree)
    return sum(a.addressable_shards[0].data.size for a in arrays) / sum(a.size for a in arrays)


def collectives(program: str, sizes: dict[str, int]) -> list[tuple[str, list[str], list]]:
    """(kind, mesh axes that it crosses, shapes of its results) of every collective."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = []
    for line in program.splitlines():
        if not (call := re.search(rf" = (.*?) ({kinds}|collective-broadcast)(?:-start)?\(", line)):
            continue
        if axes := crossed(line, sizes):
            shapes = re.findall(r"\w\[([\d,]*)\]", call[1])
            found.append((call[2], axes, [[int(n) for n in s.split(",") if n] for s in shapes]))
    return found


def crossed(line: str, sizes: dict[str, int]) -> list[str]:
    """The mesh axes along which a collective moves data; XLA writes its groups in three ways."""
    if named := re.search(r"groups=mesh\[(.*?)\] \{(.*?)\}", line):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along = [list(axes).index(name) for name in re.findall(r"'(\w+)'", named[2])]
        devices = np.arange(np.prod(list(axes.values()))).reshape(list(axes.values()))
        devices = np.moveaxis(devices, along, range(len(along)))
        devices = devices.reshape(np.prod(devices.shape[: len(along)]), -1).T
    elif tiled := re.search(r"groups=\[(.*?)\]<=\[(.*?)\](?:T\((.*?)\))?", line):
        groups, shape, order = (json.loads(f"[{numbers or ''}]") for numbers in tiled.groups())
        devices = np.arange(np.prod(shape)).reshape(shape)
        devices = devices.transpose(order or range(len(shape))).reshape(groups)
    else:
        listed = re.search(r"(?:groups|pairs)=(\{\{.*?\}\})", line)
        assert listed, line
        devices = np.array(json.loads(listed[1].replace("{", "[").replace("}", "]")))
    places = np.array(np.unravel_index(devices, tuple(sizes.values())))  # (axis, group, device)
    moves = (places != places[:, :, :1]).any((1, 2))
    return [axis for axis, moved in zip(sizes, moves, strict=True) if moved]


def compare(model: str, pack: str) -> dict:
    """{mesh: errors relative to each gradient's largest value, collectives, part held}."""
    one, moved, _ = gradients(model, "one", pack)
    out: dict[str, Any] = {"one": {name: float(abs(g).max()) for name, g in one.items()}}
    assert not moved
    out["shapes"] = [g.shape for name, g in one.items() if name != "loss"]
    for mesh in WANTED[model, pack]:
        got, moved, held = gradients(model, mesh, pack)
        out[mesh] = {
            "errors": {n: float(abs(g - one[n]).max() / abs(one[n]).max()) for n, g in got.items()},
            "collectives": moved,
            "part_held": held,
        }
    return out


def steps(model: str, mesh: str, accum: int) -> dict:
    """Two steps of a model, how its state lies on the devices, and what the program gathers."""
    t = trainer(model, mesh, accum, rows=STEP_ROWS, **EXACT)
    state = t.init()
    program = t.trace_train_step().lower().compile()
    losses, norms, before = [], [], state
    for seed in range(2):
        before = state
        state, metrics = program(state, t.put_batch(batch(seed=seed, rows=STEP_ROWS)))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
    params, mu, nu = (jax.tree.leaves(x) for x in (state.params, *moments))
    moved = collectives(program.as_text(), dict(t.mesh.shape))
    return {
        "losses": losses,
        "norms": norms,
        "donated": all(x.is_deleted() for x in jax.tree.leaves(before)),
        "moments_like_params": all(
            p.sharding == m.sharding == n.sharding for p, m, n in zip(params, mu, nu, strict=True)
        ),
        "params_held": part_held(params),
        "moments_held": part_held(moments),
        "summed": [s for _, axes, shapes in moved if axes == ["tensor"] for s in shapes],
        "gathered": [s for kind, _, shapes in moved if kind == "all-gather" for s in shapes],
        "shapes": [p.shape for p in params],
    }


def warnings_of_init(model: str) -> list[str]:
    """What JAX warns of while it draws a state, like a buffer that the state does not take over."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer(model, "data, fsdp, tensor").init()
    return [str(warning.message) for warning in seen]


def greedy(mesh: str) -> list[list[int]]:
    """Twelve tokens after each of four prompts with several lengths."""
    t = trainer("llama3", mesh, **EXACT)
    prompts = [[5, 6, 7, 8, 9], [100], [3, 4], [7] * 12]
    config = SampleConfig(tokens=12, temperature=0.0)
    with jax.set_mesh(t.mesh):
        params = jax.device_put(weights("llama3"), t.state_shardings.params)
        return np.stack(list(decode.stream_tokens(t.graph, params, prompts, config))).tolist()


def kernel_shapes(mesh: str) -> list[str]:
    """Shapes of the operands of the step's kernels: "8x40x4x64", ..."""
    shape = dict(d_model=256, n_heads=4, n_kv_heads=2)
    t = trainer("llama3", mesh, pack="stream", kernels="mosaic", **shape)
    traced = equations(t.trace_train_step().jaxpr.jaxpr)
    calls = [e for e in traced if e.primitive.name == "mpmd_map"]  # what pallas_call binds
    return sorted({"x".join(map(str, v.aval.shape)) for e in calls for v in e.invars})


def packed_layer(count: int) -> dict:
    """A packed layer whose rows `count` devices divide: its output, and its collectives."""
    layer = Linear(64, 32, bias=True, rngs=nnx.Rngs(0))
    layer.weight.set_value(quantize(layer.weight[...], group=32))
    graph, params = nnx.split(layer)
    mesh = make_mesh(MeshConfig(), jax.devices()[:count])
    x = np.random.default_rng(0).standard_normal((8, 3, 64), np.float32)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        apply = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
        text = apply.lower(params, x).compile().as_text()
        return {"y": apply(params, x).tolist(), "collectives": re.findall("all-[a-z]+", text)}


def outside(model: str) -> list[float]:
    """The loss of a model that was made without a mesh: there, and without jit on each mesh."""
    inputs, made = batch(), create(MODELS[model](**EXACT))
    found = [float(made.loss(**inputs))]
    for axes in ("data, fsdp", "context", "tensor"):
        with jax.set_mesh(make_mesh(MeshConfig(**MESHES[axes]), jax.devices()[:4])):
            found.append(float(made.loss(**inputs)))
    return found


def in_own_shard_map(axes: tuple[str, ...]) -> float:
    """Largest error of a gradient of whole models in the caller's own shard_map, relative."""
    graph, params = nnx.split(create(MODELS["llama3"](**EXACT)))
    grad = jax.grad(lambda params, batch: nnx.merge(graph, params).loss(**batch))
    shape = (2, 2) if len(axes) == 2 else (4, *[1] * len(axes[1:]))
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
    total = lambda params, batch: jax.lax.psum(grad(params, batch), axes)
    wrapped = jax.shard_map(
        total, mesh=mesh, in_specs=(jax.P(), jax.P(axes)), out_specs=jax.P(), check_vma=False
    )
    pairs = zip(
        *map(jax.tree.leaves, (jax.jit(wrapped)(params, batch()), grad(params, batch()))),
        strict=True,
    )
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


if __name__ == "__main__":
    set_xla_flags(deterministic=False)  # as train.py does
    out = {f"{model}, {pack}": compare(model, pack) for model, pack in WANTED}
    cases = (("one", 1), ("data, fsdp, tensor", 2))
    out["steps"] = {mesh: steps("llama3", mesh, accum) for mesh, accum in cases}
    out["warnings"] = {model: warnings_of_init(model) for model in MODELS}
    out["greedy"] = {mesh: greedy(mesh) for mesh in ("one", "data, tensor")}
    out["packed"] = {count: packed_layer(count) for count in (1, 4)}
    out["outside"] = outside("llama3")
    out["own"] = [in_own_shard_map(axes) for axes in (("dp",), ("fsdp", "tensor"), AXES)]
    out["kernels"] = kernel_shapes("data, fsdp, tensor")
    print(json.dumps(out))
