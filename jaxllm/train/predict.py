"""Predicts memory, communication and time of a step on GPUs that this machine need not have.

Everything follows from the shapes of the model, the mesh, and the figures below; nothing is
compiled or measured.  docs/several-gpus.md has the formulas.
"""

import functools
import re
from math import prod
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr

from jaxllm import sharding
from jaxllm.config import Config, ModelConfig, VLSTMConfig
from jaxllm.errors import InputError
from jaxllm.models import abstract, flops_per_token
from jaxllm.train import estimate
from jaxllm.train.estimate import GIB
from jaxllm.train.metrics import PEAK_FLOPS
from jaxllm.train.step import Trainer

HOST = 8  # GPUs
REACHED = 0.8  # part of the links' bandwidth that collectives reach
LAUNCH, KERNELS = 4e-6, 40  # seconds of the shortest kernel; kernels per block and step
UTILIZATION = 0.54  # of the peak, recomputation included: llama3_1b on one H100, docs/benchmarks.md


class Gpu(NamedTuple):
    """The figures of a GPU's data sheet."""

    capability: float  # CUDA compute capability
    memory: float  # bytes
    link: float  # bytes/s in each direction to the GPUs of the same host
    network: float  # bytes/s in each direction to other hosts, through an adapter for each GPU
    by: str = "NVLink"  # what `link` is


GPUS = {
    "H100": Gpu(9.0, 80e9, 450e9, 50e9),
    "H200": Gpu(9.0, 141e9, 450e9, 50e9),
    "B200": Gpu(10.0, 180e9, 900e9, 50e9),
    "A100": Gpu(8.0, 80e9, 300e9, 25e9),
    "L40S": Gpu(8.9, 48e9, 32e9, 25e9, "PCIe"),
    "RTX4090": Gpu(8.9, 24e9, 32e9, 25e9, "PCIe"),
}


class Traffic(NamedTuple):
    """What a GPU sends in one step over one axis of the mesh."""

    axis: str
    size: float  # bytes
    bandwidth: float  # bytes/s
    way: str  # "the network" if the axis spans several hosts

    @property
    def seconds(self) -> float:
        return self.size / self.bandwidth

    def __str__(self) -> str:
        return (
            f"{self.axis}: {self.size / 1e9:,.2f} GB per GPU and step over {self.way} at"
            f" {self.bandwidth / 1e9:.0f} GB/s, {self.seconds * 1e3:,.1f} ms"
        )


def predict(config: Config, text: str) -> str:
    """A text that predicts a step of `config` on GPUs like 64xH200; raises InputError."""
    found = re.fullmatch(r"([1-9]\d{0,5})x(\w+)", text, re.ASCII)
    if found is None or found[2] not in GPUS:
        kinds = ", ".join(GPUS)
        raise InputError(f"--dry_run {text} is not COUNTxKIND with a KIND of {kinds}, like 64xH200")
    count, kind = int(found[1]), found[2]
    if config.model.adapters is not None:
        raise InputError(f"--dry_run {text} is for training all weights; with model.lora name none")
    sm, fp8, kernels = GPUS[kind].capability, config.train.fp8, config.model.kernels
    if fp8 != "none" and sm < 8.9:  # launch.check_kernels checks the same for local GPUs
        raise InputError(f"train.fp8={fp8} cannot run on {kind}: it needs sm_89; use none")
    if kernels == "xla" or (kernels == "mosaic" and sm != 9.0):
        raise InputError(f"model.kernels={kernels} cannot be predicted for {kind}; use auto")
    mesh = sharding.abstract_mesh(config.mesh, count)
    sharding.check(config, mesh)
    # pyrefly: ignore[bad-argument-type]
    trainer = Trainer(config, mesh)  # its shapes and shardings need no devices
    state = estimate.state_memory(trainer)
    held = sum(state.values())
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in state.items() if size)
    sent = traffic(trainer, kind) or ["none"]
    head = "remat", "activations", "total GiB", "", "recomputed", "s per step", "tokens/s per GPU"
    choices = get_args(type(config.model).model_fields["remat"].annotation)
    try:
        rows = [head, *(_row(trainer, remat, kind, held) for remat in choices)]
    except NotImplementedError as e:
        raise InputError(f"--dry_run {text} predicts runs on our kernels only: {e}") from e
    # Columns have two spaces between them; the first and the fourth are left-aligned.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    put = lambda i, text: text.ljust(widths[i]) if i in (0, 3) else text.rjust(widths[i])
    table = [" " * 9 + "  ".join(put(i, x) for i, x in enumerate(row)).rstrip() for row in rows]
    return "\n".join(
        [
            f"predict  {count} x {kind}, {HOST} in a host, mesh {dict(mesh.shape)}; not measured:"
            f" {UTILIZATION:.0%} of the peak FLOP/s, {REACHED:.0%} of the data sheet's"
            f" bandwidths{'; times are for bfloat16' * (fp8 != 'none')}",
            f"state    per GPU, GiB: {parts}; {held / GIB:.2f} of {GPUS[kind].memory / GIB:.1f}",
            *(f"{'' if i else 'traffic':<8} {line}" for i, line in enumerate(sent)),
            *table,
        ]
    )


def _row(trainer: Trainer, remat: str, kind: str, state: int) -> tuple[str, ...]:
    """The table's row for one choice of model.remat: memory and time, with our kernels."""
    config = trainer.config.with_model(kernels="mosaic", remat=remat)
    model, train = config.model, config.train
    activations = sum(estimate.activation_memory(trainer, config).values())
    total = state + activations
    more = recomputed(model, train.seq_len)
    tokens = train.batch_size * train.seq_len / trainer.mesh.size
    compute = tokens * flops_per_token(model, train.seq_len) * (1 + more)
    compute /= PEAK_FLOPS[kind] * UTILIZATION
    compute = max(compute, train.grad_accum * model.n_layers * KERNELS * LAUNCH)
    waiting = sum(t.seconds for t in traffic(trainer, kind))
    fast, slow = max(compute, waiting), compute + waiting
    fits = "fits" if total * estimate.MARGIN <= GPUS[kind].memory else "may not fit"
    sizes = f"{activations / GIB:.2f}", f"{total / GIB:.2f}", fits, f"{more:.0%}"
    speed = f"{tokens / slow:,.0f} to {tokens / fast:,.0f}"
    return (remat, *sizes, f"{fast:.3g} to {slow:.3g}", speed)


def traffic(trainer: Trainer, kind: str) -> list[Traffic]:
    """What each axis of the mesh sends in a step.

    In an all-gather or reduce-scatter of n bytes over k devices each device sends n (k - 1) / k
    bytes; in an all-reduce, twice as many.
    """
    config, shape = trainer.config, trainer.mesh.shape
    data, context, tensor = shape["data"], shape["context"], shape["tensor"]
    fsdp = shape["fsdp"] * context  # context devices shard the weights, too
    parts = config.train.grad_accum
    weights = estimate.working_memory(trainer)  # of one device; gradients have the same dtypes
    share = lambda k: (k - 1) / k
    tokens = config.train.batch_size * config.train.seq_len // (data * fsdp)
    stream = tokens * config.model.d_model
    # Weights are gathered for the forward and for the backward pass, then gradients are scattered:
    # the head or tied table in bf16.  An embedding moves its tokens' columns in both passes.
    table = config.model.padded_vocab_size * config.model.d_model // tensor
    moved = weights * fsdp - table * (6 if "head" in trainer.abstract_params else 2)
    sizes = {"fsdp": share(fsdp) * (3 * parts * moved + 2 * 2 * stream)}
    if config.mesh.shard_optimizer:  # each part scatters gradients; the step gathers weights once
        sizes["data"] = (parts + 1) * share(data) * weights
    else:
        sizes["data"] = 2 * parts * share(data) * weights
    # Each block sums its two branches in both passes, and recomputation may repeat the first sum.
    sizes["tensor"] = 2 * share(tensor) * 5 * config.model.n_layers * 2 * stream
    # Queries, keys, values and outputs are exchanged in both passes; recomputation may repeat it.
    if isinstance(model := config.model, VLSTMConfig):
        width = 2 * model.n_heads * (model.qk_dim + model.v_dim)
    else:
        width = 2 * (model.n_heads + getattr(model, "n_kv_heads", model.n_heads)) * model.head_dim
    sizes["context"] = 2 * share(context) * model.n_layers * 2 * tokens * width // tensor
    groups = {  # (devices, distance between neighbours)
        "tensor": (tensor, 1),
        "context": (context, tensor),
        "fsdp": (fsdp, tensor),
        "data": (data, tensor * fsdp),
    }
    ways = {axis: _bandwidth(GPUS[kind], *group) for axis, group in groups.items()}
    return [Traffic(axis, size, *ways[axis]) for axis, size in sizes.items() if size]


def _bandwidth(gpu: Gpu, size: int, stride: int) -> tuple[float, str]:
    """(bytes/s that a GPU sends over an axis, through which link).

    The GPUs of a group that share a host share their network adapters as well.
    """
    if size * stride <= HOST:
        return REACHED * gpu.link, gpu.by
    return REACHED * min(gpu.link, gpu.network * max(1, HOST // stride)), "the network"


def recomputed(model: ModelConfig, seq_len: int) -> float:
    """The FLOPs that the backward pass recomputes, as a fraction of a step's FLOPs.

    Counts the matmuls with weights in the traced gradient, and for remat=block the mixing.
    """
    more = _block_flops(model) - _block_flops(model.model_copy(update={"remat": "none"}))
    more *= model.n_layers
    if model.remat == "block":
        more += abstract(model, "none").mixing_flops(seq_len)
    return more / flops_per_token(model, seq_len)


@functools.cache
def _block_flops(model: ModelConfig) -> float:
    """FLOPs per token of the matmuls with weights in the gradient of one more block."""
    rows = 128  # the kernels take multiples of their tiles

    def of(n_layers: int) -> float:
        # The kernels' own matmuls are not in the trace.
        deep = model.model_copy(update={"n_layers": n_layers, "kernels": "xla"})
        graph, params = nnx.split(abstract(deep, "none"), nnx.Param)
        tokens = jax.ShapeDtypeStruct((1, rows), jnp.int32)
        loss = lambda params, tokens: nnx.merge(graph, params).loss(tokens, tokens)
        return _matmul_flops(jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr) / rows

    return of(2) - of(1)


def _matmul_flops(jaxpr: Jaxpr) -> float:
    """FLOPs of all matmuls without batch axes, which are those with weights."""
    total = 0.0
    for equation in estimate.equations(jaxpr):
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            # pyrefly: ignore[missing-attribute]
            size = prod(out.shape) * prod(left.shape[axis] for axis in contracted)
            total += 0 if batch else 2.0 * size
    return total
