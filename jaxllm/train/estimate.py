"""Estimates memory, operations and time of a step without compiling it.

Parameters, moments, gradients and copies are exact.  Activations are what the traced backward pass
keeps of the forward pass; XLA may keep less, or more: it chooses what to recompute and when.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxprs_in_params
from jax.sharding import Mesh

from jaxllm.config import Config
from jaxllm.errors import InputError
from jaxllm.models import flops_per_token
from jaxllm.train.metrics import peak_flops
from jaxllm.train.step import Trainer, step_model
from jaxllm.weights.packed import Packing

GIB = 2**30
MARGIN = 1.2  # XLA took 0.86 to 1.09 times the estimate on GPUs, docs/training.md
USUAL_MFU = 0.4  # of a well-tuned dense model on one GPU; docs/benchmarks.md has ours


class MemoryLimit(NamedTuple):
    """Available memory."""

    size: int  # bytes
    owner: str  # the device or machine
    devices: int  # number of our devices that share it


def device_name(mesh: Mesh) -> str:
    """The devices of a mesh, such as "8 x NVIDIA H100"."""
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"


def memory_limit(mesh: Mesh) -> MemoryLimit | None:
    """The memory of this process's smallest device, or of the host for CPUs; None if unknown."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        return MemoryLimit(_host_memory(), "this machine", len(devices))
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit]
    return MemoryLimit(min(known), "a device", 1) if known else None


def _host_memory() -> int:
    """Bytes that this process may use: the container's limit, or the machine's memory."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return size


def state_memory(trainer: Trainer) -> dict[str, int]:
    """Bytes of parameters, moments, gradients and copies for the forward pass on one device."""
    state, gathered = trainer.abstract_state(), 0
    parameters, copies = _bytes_of_one_device(state.params), _bytes_of_one_device(state.copies)
    # Gradients are sharded like the state's parameters.
    gradients = _bytes_of_one_device(trainer.working(state), trainer.state_shardings.params)
    if trainer.config.train.grad_accum > 1:  # the float32 sum over the parts of the batch
        gradients = parameters + gradients * (not trainer.sums_in_place)
    if trainer.config.mesh.shard_optimizer and trainer.mesh.shape["data"] > 1:  # not copied
        gathered = working_memory(trainer) - copies
    return {
        "frozen": _bytes_of_one_device(state.base),
        "parameters": parameters,
        "moments": _bytes_of_one_device(state.opt_state),
        "gradients": gradients,
        "bf16 copies": copies,
        "gathered": gathered,
    }


def working_memory(trainer: Trainer) -> int:
    """Bytes on one device of the parameters as the forward pass takes them."""
    working = trainer.working(trainer.abstract_state())
    return _bytes_of_one_device(working, trainer.working_shardings)


def _bytes_of_one_device(tree: Any, shardings: Any = None) -> int:
    """Bytes of one device's parts of the arrays, sharded by `shardings`, or as they are."""
    leaves = jax.tree.leaves(tree)
    held = jax.tree.leaves(shardings) or [leaf.sharding for leaf in leaves]
    parts = zip(leaves, held, strict=True)
    return sum(prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, s in parts)


def check_fits(config: Config, mesh: Mesh, packing: Packing | None = None) -> None:
    """Raises InputError if parameters, moments and gradients alone exceed the memory.

    packing: how the frozen weights are packed, if they already are.

    Extrapolates from models of one and of two layers: thousands would take minutes to trace.
    """
    limit, more = memory_limit(mesh), config.model.n_layers - 1
    if limit is None:
        return
    needs = []  # parameters, and bytes per device with their moments and gradients
    for n_layers in (1, 2):
        trainer = Trainer(config.with_model(n_layers=n_layers), mesh, packing)
        parts = state_memory(trainer)
        kinds = ("frozen", "parameters", "moments", "gradients")
        needs.append(np.array([trainer.n_params, sum(parts[kind] for kind in kinds)]))
    one, two = needs
    params, need = (one + more * (two - one)).tolist()
    need *= limit.devices
    if need > limit.size:
        raise InputError(
            f"the model's {params:,} parameters need {need / GIB:,.1f} GiB with their moments and"
            f" gradients, {limit.owner} has {limit.size / GIB:,.1f} GiB; make the model smaller, or"
            " split it over more devices (mesh.fsdp)"
        )


def activation_memory(trainer: Trainer, config: Config | None = None) -> dict[str, int]:
    """Bytes on one device of logits and of the activations that the backward pass needs.

    Overestimates on a mesh with a tensor axis, which divides some activations.
    config: may have other values of model.remat and kernels than the trainer.
    """
    config = config or trainer.config
    state = trainer.abstract_state()
    working, frozen = trainer.working(state), nnx.merge_state(state.base, trainer.abstract_keys)
    model, train, shape = config.model, config.train, trainer.mesh.shape
    parts = shape["data"] * shape["fsdp"] * train.grad_accum
    # A device has all heads of a part of a sequence, or some heads of the whole sequence.
    rows, length = train.batch_size // parts, train.seq_len // shape["context"]
    batch = dict.fromkeys(trainer.abstract_batch(), jax.ShapeDtypeStruct((rows, length), jnp.int32))
    kept, logits = _kept_by_forward(config, working, frozen, batch)
    if model.remat != "none":  # the backward pass recomputes one block at a time
        whole = _kept_by_forward(config.with_model(remat="none"), working, frozen, batch)[0]
        late = trainer.mesh.size > 1 and shape["context"] == 1  # `walk` delays gradients by a block
        kept += min(1 + late, model.n_layers) * max(0, whole - kept) // model.n_layers
    if train.fp8 == "all":
        logits *= 2  # their fp8 gradient, one byte in each of both orders, does not overwrite them
    return {"activations": kept, "logits": logits}


def _kept_by_forward(
    config: Config, working: nnx.State, frozen: nnx.State, batch
) -> tuple[int, int]:
    """Bytes of (activations, logits) in the traced gradient of the loss on one device."""
    graph, _ = step_model(config)

    def backward(params, frozen, batch):
        return jax.vjp(lambda params: nnx.merge(graph, params, frozen).loss(**batch), params)[1]

    traced = jax.make_jaxpr(backward)(working, frozen, batch).jaxpr
    shapes = {leaf.shape for leaf in jax.tree.leaves((working, frozen))}
    vocabulary = config.model.padded_vocab_size
    is_logits = lambda a: a.shape[-1:] == (vocabulary,) and a.ndim > 1 and a.shape not in shapes
    kept = {v for v in traced.outvars if isinstance(v, Var)} - {*traced.invars}
    # Gradients, which have the parameters' shapes, do not count.
    held = lambda aval: aval.shape not in shapes or aval.dtype.itemsize == 1
    arrays = [v.aval for v in kept if held(v.aval)]
    size = lambda array: array.size * array.dtype.itemsize
    logits = sum(size(aval) for aval in arrays if is_logits(aval))
    activations = sum(map(size, arrays)) - logits
    # A kernel keeps no logits; its largest chunk counts, also in the shape of the head's fp32 dW.
    products = (e.outvars[0].aval for e in equations(traced) if e.primitive.name == "dot_general")
    chunk = lambda a: is_logits(a) or (a.shape[-1:] == (vocabulary,) and a.dtype.itemsize < 4)
    return activations, max([logits, *(size(a) for a in products if chunk(a))])


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program and of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jaxprs_in_params(equation.params):
            yield from equations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)


def _memory_lines(trainer: Trainer) -> list[str]:
    parts = state_memory(trainer) | activation_memory(trainer)
    parts["total"], limit = sum(parts.values()), memory_limit(trainer.mesh)
    lines = ["memory   per device, estimated:"]
    lines += [f"         {name:<12}{size / GIB:10.3f} GiB" for name, size in parts.items() if size]
    if limit is None:
        return lines
    most = parts["total"] * MARGIN * limit.devices
    fits = "fits" if most <= limit.size else "may not fit: lower train.batch_size"
    shared = f" for {limit.devices} devices" if limit.devices > 1 else ""
    of = f"{limit.owner} has {limit.size / GIB:,.1f} GiB{shared}"
    return [*lines, f"         {of}: {fits}"]


def summarize(trainer: Trainer) -> str:
    """Describes memory, operations and time of a run in lines of text; traces the model once."""
    config, mesh = trainer.config, trainer.mesh
    tokens = config.train.batch_size * config.train.seq_len
    flops = tokens * flops_per_token(config.model, config.train.seq_len)
    lines = [
        *_memory_lines(trainer),
        f"compute  {flops:.3g} FLOPs per step of {tokens:,} tokens (6 x matmul parameters, 4 x"
        f" if frozen, + sequence mixing), {config.train.steps:,} steps",
    ]
    kind = mesh.devices.flat[0].device_kind
    if (peak := peak_flops(kind)) is None:
        other = "--dry_run 1xH100 predicts it for a GPU" if kind == "cpu" else "a run will show it"
        return "\n".join([*lines, f"time     unknown, as the peak FLOP/s of {kind} is: {other}"])
    step = flops / (peak * mesh.size)
    span = lambda seconds: str(timedelta(seconds=round(seconds * config.train.steps)))
    lines += [
        f"time     at the peak of {mesh.size} x {peak / 1e12:.0f} TFLOP/s: {step * 1e3:,.1f} ms"
        f" per step, {span(step)} in total, as a lower bound",
        f"         at {USUAL_MFU:.0%} of the peak: {step / USUAL_MFU * 1e3:,.1f} ms per step,"
        f" {span(step / USUAL_MFU)} in total, without evaluation and saving",
    ]
    return "\n".join(lines)
