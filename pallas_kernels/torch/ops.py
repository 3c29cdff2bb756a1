"""Makes an op of ours a `torch.library` operator: one layer for all of them.

`pallas_kernels::NAME(Tensor[] arrays, str spec) -> Tensor[]` runs a program (program.py).  The spec
names the op, its options and what is asked for: the op alone ("run"), with what its backward pass
needs ("forward"), or that pass ("backward").  A call of PyTorch's autograd is then two operators,
both of which torch.compile and CUDA graphs see as ordinary ones.
"""

import dataclasses
import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax._src import xla_bridge

from pallas_kernels import QuantizedWeight
from pallas_kernels import quantize as jax_quantize
from pallas_kernels.torch import program as programs
from pallas_kernels.torch import run

log = logging.getLogger("pallas_kernels")

# Tracing needs no device.  Left alone, JAX would start on the GPU and take most of its memory.
if not xla_bridge.backends_are_initialized():
    jax.config.update("jax_platforms", "cpu")


class _Tensor:
    def __repr__(self) -> str:
        return "*"


_TENSOR = _Tensor()


class _Made(NamedTuple):
    """A dataclass with arrays, such as Packed: its type and its fields."""

    kind: type
    fields: tuple


class Spec(NamedTuple):
    """What an operator computes, but for the arrays."""

    op: str
    mode: str  # run, forward, backward
    wrt: tuple[int, ...]  # of the op's arrays
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]
    signature: tuple = ()  # of "backward": the arrays of the op


class Entry(NamedTuple):
    """The programs of a spec for arrays of certain shapes."""

    program: programs.Program
    tree: Any = None
    floats: tuple[bool, ...] = ()  # of the op's outputs, whether they have gradients
    saved: tuple[tuple[str, int], ...] = ()
    backward: programs.Program | None = None


_OPS: dict[str, Callable] = {}
_specs: dict[str, Spec] = {}
_keys: dict[Spec, str] = {}
_entries: dict[tuple[str, tuple], Entry] = {}
_runners: dict[tuple[str, tuple], run.Runner] = {}
_library = torch.library.Library("pallas_kernels", "FRAGMENT")


def _key(spec: Spec) -> str:
    found = _keys.get(spec)
    if found is None:
        digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
        found = _keys[spec] = f"{spec.op}:{spec.mode}:{digest}"
        _specs[found] = spec
    return found


def _flatten(x, arrays: list):
    if isinstance(x, torch.Tensor):
        arrays.append(x)
        return _TENSOR
    if isinstance(x, tuple | list):
        parts = tuple(_flatten(y, arrays) for y in x)
        return type(x)(*parts) if hasattr(x, "_fields") else parts
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [f.name for f in dataclasses.fields(x)]
        return _Made(type(x), tuple([_flatten(getattr(x, n), arrays) for n in names]))
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return x


def _fill(x, arrays):
    if x is _TENSOR:
        return next(arrays)
    if isinstance(x, _Made):
        return x.kind(*[_fill(y, arrays) for y in x.fields])
    if isinstance(x, tuple):
        parts = [_fill(y, arrays) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def _call(spec: Spec, *arrays):
    left = iter(arrays)
    args = [_fill(x, left) for x in spec.args]
    kwargs = {k: _fill(x, left) for k, x in spec.kwargs}
    return _OPS[spec.op](*args, **kwargs, implementation="mosaic")


def _signature(arrays) -> tuple:
    return tuple([(tuple(map(int, x.shape)), x.dtype) for x in arrays])


def _structs(signature) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, str(dtype).removeprefix("torch.")) for shape, dtype in signature
    ]


# ---- programs of a spec, kept on disk ------------------------------------------------------------


def entry(key: str, signature: tuple) -> Entry:
    """The programs of an operator for arrays with these shapes and dtypes; traced once."""
    found = _entries.get((key, signature))
    if found is None:
        spec = _specs[key]
        path = _path(spec, signature)
        found = _load(path) or _trace(spec, signature)
        _entries[key, signature] = found
    return found


def _trace(spec: Spec, signature: tuple) -> Entry:
    op = functools.partial(_call, spec)
    keep = lambda eqn: eqn  # lowered when the program first runs
    if spec.mode == "run":
        jaxpr, tree = programs.trace_run(op, _structs(signature))
        return Entry(programs.build(jaxpr, keep), tree)
    jaxpr, tree, n, floats, back = programs.trace_train(op, _structs(signature), spec.wrt)
    forward, saved = programs.split_forward(programs.build(jaxpr, keep), n)
    return Entry(forward, tree, tuple(floats), saved, programs.build(back, keep))


def _path(spec: Spec, signature: tuple) -> Path:
    folder = os.environ.get("PALLAS_KERNELS_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pallas_kernels"
    )
    what = repr((spec, signature, programs.source_hash(), os.environ.get("JAXLLM_KERNELS")))
    return Path(folder) / f"{spec.op}-{hashlib.sha256(what.encode()).hexdigest()[:32]}.pickle"


def _load(path: Path) -> Entry | None:
    try:
        return pickle.loads(path.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError):
        return None


def _lowered(program: programs.Program) -> programs.Program:
    steps = [
        step._replace(params=programs.kernel(step.params))
        if step.primitive == "kernel" and not isinstance(step.params, programs.Kernel)
        else step
        for step in program.steps
    ]
    return program._replace(steps=tuple(steps))


def _runner(key: str, signature: tuple) -> run.Runner:
    """The runner of a spec; lowers its kernels if they are not on disk."""
    spec = _specs[key]
    if spec.mode == "backward":
        of = _key(spec._replace(mode="forward", signature=()))
        known = spec.signature
    else:
        of, known = key, signature
    found = entry(of, known)
    wanted = found.backward if spec.mode == "backward" else found.program
    assert wanted is not None
    if any(
        s.primitive == "kernel" and not isinstance(s.params, programs.Kernel) for s in wanted.steps
    ):
        found = found._replace(
            program=_lowered(found.program), backward=found.backward and _lowered(found.backward)
        )
        _entries[of, known] = found
        path = _path(_specs[of], known)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            own = path.with_suffix(f".{os.getpid()}")
            own.write_bytes(pickle.dumps(found))
            own.replace(path)
        except (OSError, pickle.PicklingError, TypeError) as error:
            log.warning("%s is not cached on disk: %s", spec.op, error)
        wanted = found.backward if spec.mode == "backward" else found.program
    assert wanted is not None
    return run.Runner(wanted)


# ---- operators -----------------------------------------------------------------------------------


def _execute(arrays: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    signature = tuple([(x.shape, x.dtype, x.device) for x in arrays])
    runner = _runners.get((key, signature))
    if runner is None:
        _check(key, arrays)
        runner = _runners[key, signature] = _runner(key, _signature(arrays))
    device = arrays[0].device.index
    if device is None:  # a test on the CPU
        return _own(arrays, runner(arrays))
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _execute(arrays, key)
    run.bind(device)
    return _own(arrays, runner(arrays))


def _own(arrays, results) -> list[torch.Tensor]:
    """No result of an operator may be one of its arguments, or another result."""
    seen = {x.data_ptr() for x in arrays}
    for i, x in enumerate(results):
        if x.numel() and (x.data_ptr() in seen or not x.is_contiguous()):
            results[i] = x = x.clone(memory_format=torch.contiguous_format)
        seen.add(x.data_ptr())
    return results


def _check(key: str, arrays) -> None:
    name = _specs[key].op
    devices = {x.device for x in arrays}
    if len(devices) > 1:
        raise ValueError(f"{name}: all tensors on one device, not {sorted(map(str, devices))}")
    (device,) = devices
    if device.type != "cuda":
        raise ValueError(f"{name}: tensors on {device}, but its kernels need cuda: move them there")
    if not torch.version.cuda or int(torch.version.cuda.split(".")[0]) < 13:
        raise RuntimeError(
            f"{name}: PyTorch for CUDA {torch.version.cuda}, but JAX's kernels need 13"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise NotImplementedError(
            f"{name}: compute capability {major}.{minor}, but only 9.0 (H100, H200) is supported"
        )


def _fake(arrays, key: str) -> list[torch.Tensor]:
    spec = _specs[key]
    signature = _signature(arrays)
    if spec.mode == "backward":
        found = entry(_key(spec._replace(mode="forward", signature=())), spec.signature)
        program: Any = found.backward
    else:
        program = entry(key, signature).program
    like = arrays[0]
    made = [program.arrays[i] for i in program.outputs]
    return [like.new_empty(x.shape, dtype=run.dtype(x.dtype)) for x in made]


def _save(ctx, inputs, output) -> None:
    arrays, key = inputs
    ctx.key, ctx.n = key, len(arrays)
    ctx.set_materialize_grads(False)
    spec = _specs[key]
    if spec.mode != "forward":
        return
    ctx.signature = _signature(arrays)
    found = entry(key, ctx.signature)
    ctx.save_for_backward(*[(arrays if where == "in" else output)[i] for where, i in found.saved])
    ctx.shapes = [
        (tuple(x.shape), x.dtype) for x, yes in zip(output, found.floats, strict=False) if yes
    ]


def _gradient(ctx, gradients):
    spec = _specs[ctx.key]
    if spec.mode == "backward":
        raise NotImplementedError(f"{spec.op} has no second derivative")
    saved = ctx.saved_tensors
    found = entry(ctx.key, ctx.signature)
    given = [g for g, yes in zip(gradients, found.floats, strict=False) if yes]
    like = next(x for x in (*given, *saved) if x is not None)
    full = [
        like.new_zeros(shape, dtype=dtype) if g is None else g.to(dtype)
        for g, (shape, dtype) in zip(given, ctx.shapes, strict=True)
    ]
    back = _key(spec._replace(mode="backward", signature=ctx.signature))
    out = iter(getattr(torch.ops.pallas_kernels, spec.op)([*saved, *full], back))
    grads = [next(out) if i in spec.wrt else None for i in range(ctx.n)]
    return grads, None


def register(name: str, op: Callable, autocast: bool = False) -> Callable:
    """Makes `op` an operator and returns the function that calls it with tensors.

    autocast: whether floating point tensors take autocast's dtype.
    """
    _OPS[name] = op
    qualified = f"pallas_kernels::{name}"
    _library.define(f"{name}(Tensor[] arrays, str spec) -> Tensor[]")
    _library.impl(name, _execute, "CUDA")
    _library.impl(name, _execute, "CPU")
    torch.library.register_fake(qualified, _fake, lib=_library)
    torch.library.register_autograd(qualified, _gradient, setup_context=_save, lib=_library)
    operator = getattr(torch.ops.pallas_kernels, name).default
    known: dict[tuple, tuple[str, Any]] = {}  # keys and trees

    def call(*args, **kwargs):
        arrays: list[torch.Tensor] = []
        shape = tuple([_flatten(x, arrays) for x in args])
        named = tuple([(k, _flatten(x, arrays)) for k, x in kwargs.items()])
        if not arrays:
            raise TypeError(f"{name}: no tensor among its arguments")
        if autocast and torch.is_autocast_enabled(arrays[0].device.type):
            kind = torch.get_autocast_dtype(arrays[0].device.type)
            arrays = [x.to(kind) if x.is_floating_point() else x for x in arrays]
        wrt: tuple[int, ...] = ()
        if torch.is_grad_enabled():
            wrt = tuple([i for i, x in enumerate(arrays) if x.requires_grad])
        what = (shape, named, wrt, _signature(arrays))
        found = known.get(what)
        if found is None:
            key = _key(Spec(name, "forward" if wrt else "run", wrt, shape, named))
            found = known[what] = key, entry(key, what[-1]).tree
        key, tree = found
        out = operator(arrays, key)
        return jax.tree.unflatten(tree, out[: tree.num_leaves])

    call.__name__ = call.__qualname__ = name
    call.__doc__ = op.__doc__
    return torch.compiler.allow_in_graph(call)


def quantize(weight: torch.Tensor, **options) -> QuantizedWeight:
    """`pallas_kernels.quantize` of a matrix (K, N), (in, out), as tensors on its device.

    A Linear's own weight is (out, in): give its transpose.
    """
    made = jax_quantize(weight.detach().float().cpu().numpy(), **options)

    def tensor(x):
        x = np.asarray(x)
        wide = torch.from_numpy(x.astype(np.float32) if x.dtype.kind in "fV" else x.copy())
        return wide.to(weight.device, run.dtype(x.dtype.name))

    return jax.tree.map(tensor, made)
