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
from torch.autograd.function import once_differentiable

from pallas_kernels import QuantizedWeight
from pallas_kernels import quantize as jax_quantize
from pallas_kernels.torch import glue, launch, run
from pallas_kernels.torch import program as programs
from pallas_kernels.torch.plan import Plan, plan
from pallas_kernels.torch.program import Program

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
    """A spec for arrays of certain shapes: programs, of which the first call makes plans."""

    forward: Program | Plan
    tree: Any = None
    floats: tuple[bool, ...] = ()  # of the op's outputs, whether they have gradients
    saved: tuple[tuple[str, int], ...] = ()  # for the backward pass: inputs and outputs
    backward: Program | Plan | None = None
    gradients: tuple[int, ...] = ()  # places among the results of the backward pass


_OPS: dict[str, Callable] = {}
_specs: dict[str, Spec] = {}
_keys: dict[Spec, str] = {}
_entries: dict[tuple[str, tuple], Entry] = {}
_runners: dict[tuple, run.Runner] = {}
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
    return Entry(
        forward, tree, tuple(floats), saved, *programs.distinct(programs.build(back, keep))
    )


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


def _lowered(program: Program) -> Plan:
    """The plan of a program, with its kernels lowered and its glue compiled; needs no GPU."""
    steps = [
        s._replace(params=programs.kernel(s.params)) if s.primitive == "kernel" else s
        for s in program.steps
    ]
    made = plan(program._replace(steps=tuple(steps)))
    units = [
        u._replace(what=u.what._replace(binary=launch.binary(u.what)))
        if isinstance(u.what, glue.Glue)
        else u
        for u in made.units
    ]
    return made._replace(units=tuple(units))


def _planned(key: str, signature: tuple) -> Entry:
    """The entry with plans, which are made and kept on disk if they are not yet."""
    found = entry(key, signature)
    if isinstance(found.forward, Plan):
        return found
    made = found._replace(
        forward=_lowered(found.forward), backward=found.backward and _lowered(found.backward)
    )
    _entries[key, signature] = made
    path = _path(_specs[key], signature)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(made))
        own.replace(path)
    except (OSError, pickle.PicklingError, TypeError) as error:
        log.warning("%s is not cached on disk: %s", _specs[key].op, error)
    return made


def _results(made: Program | Plan) -> list[programs.Array]:
    return [(made.slots if isinstance(made, Plan) else made.arrays)[i] for i in made.outputs]


# ---- operators -----------------------------------------------------------------------------------


def _execute(arrays: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    signature = (key, *[(x.shape, x.dtype, x.device) for x in arrays])
    runner = _runners.get(signature)
    if runner is None:
        _check(key, arrays)
        spec = _specs[key]
        if spec.mode == "backward":
            made: Any = _planned(*_forward_of(spec)).backward
            runner = run.Runner(spec.op, made)
        else:
            found = _planned(key, _signature(arrays))
            own = found.tree.num_leaves if spec.mode == "forward" else None
            runner = run.Runner(spec.op, found.forward, own)
        _runners[signature] = runner
    return runner(arrays)


def _forward_of(spec: Spec) -> tuple[str, tuple]:
    """Key and signature of the operator whose backward pass this is."""
    return _key(spec._replace(mode="forward", signature=())), spec.signature


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
    if spec.mode == "backward":
        made: Any = entry(*_forward_of(spec)).backward
    else:
        made = entry(key, _signature(arrays)).forward
    return [arrays[0].new_empty(x.shape, dtype=run.dtype(x.dtype)) for x in _results(made)]


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
    out = getattr(torch.ops.pallas_kernels, spec.op)([*saved, *full], back)
    grads: list[torch.Tensor | None] = [None] * ctx.n
    for i, place in zip(spec.wrt, found.gradients, strict=True):
        grads[i] = out[place]
    return grads, None


# ---- calls -----------------------------------------------------------------------------------------


class _Ready:
    """A call with arguments of certain shapes, dtypes and options: all but the tensors."""

    def __init__(self, key: str, signature: tuple):
        self.key, self.signature, self.spec = key, signature, _specs[key]
        self.tree = entry(key, signature).tree
        self.leaf = jax.tree.structure(0) == self.tree
        self.forward: run.Runner | None = None

    def prepare(self, arrays) -> run.Runner:
        _check(self.key, arrays)
        found = _planned(self.key, self.signature)
        self.saved, self.floats, self.gradients = found.saved, found.floats, found.gradients
        self.shapes = [(x.shape, run.dtype(x.dtype)) for x in _results(found.forward)]
        if found.backward is not None:
            self.backward = run.Runner(self.spec.op, found.backward)
        self.forward = run.Runner(self.spec.op, found.forward)
        return self.forward


class _Eager(torch.autograd.Function):
    """A call outside of torch.compile, where the dispatch of operators would take longer than all."""

    @staticmethod
    def forward(ctx, ready: _Ready, *arrays):
        out = (ready.forward or ready.prepare(arrays))(arrays)
        ctx.ready = ready
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[(arrays if where == "in" else out)[i] for where, i in ready.saved])
        if not all(ready.floats):
            rest = zip(out, ready.floats, strict=False)
            ctx.mark_non_differentiable(*[x for x, yes in rest if not yes])
        return tuple(out[: len(ready.floats)])

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ready, saved = ctx.ready, ctx.saved_tensors
        given = zip(gradients, ready.floats, ready.shapes, strict=False)
        like = saved[0] if saved else next(x for x in gradients if x is not None)
        full = [
            like.new_zeros(of[0], dtype=of[1]) if g is None else g for g, yes, of in given if yes
        ]
        made = ready.backward([*saved, *full])
        out = [None] * (len(ready.signature) + 1)
        for i, place in zip(ready.spec.wrt, ready.gradients, strict=True):
            out[i + 1] = made[place]
        return tuple(out)


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _traced(arrays) -> bool:
    """Whether these are no tensors with data, or someone watches the operators."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or not _PLAIN.issuperset(map(type, arrays))
    )


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
    known: dict[tuple, _Ready] = {}

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
        what = (shape, named, wrt, *[(x.shape, x.dtype, x.device) for x in arrays])
        ready = known.get(what)
        if ready is None:
            key = _key(Spec(name, "forward" if wrt else "run", wrt, shape, named))
            ready = known[what] = _Ready(key, _signature(arrays))
        if _traced(arrays):
            out = operator(arrays, ready.key)
        elif wrt:
            out = _Eager.apply(ready, *arrays)
        else:
            out = (ready.forward or ready.prepare(arrays))(arrays)
        return (
            out[0] if ready.leaf else jax.tree.unflatten(ready.tree, out[: ready.tree.num_leaves])
        )

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
