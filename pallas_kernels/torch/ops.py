"""Makes an op of ours callable with tensors: one layer for all of them.

An op for certain shapes and options is a `Call`.  It has programs (program.py) of the op alone, or
of the op with what its backward pass needs, and of that pass; the first call makes plans of them
(plan.py), which a runner runs (run.py).  torch.compile and other tracers see these two passes as
the operator `pallas_kernels::NAME(Tensor[] arrays, str call, bool backward) -> Tensor[]`.
"""

import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import jax
import torch
from jax._src import xla_bridge
from torch.autograd.function import once_differentiable

from pallas_kernels import QuantizedWeight
from pallas_kernels import quantize as jax_quantize
from pallas_kernels.torch import run
from pallas_kernels.torch.plan import Plan, plan
from pallas_kernels.torch.program import Entry, source_hash, trace

log = logging.getLogger("pallas_kernels")

# Tracing needs no device.  Left alone, JAX would start on the GPU and take most of its memory.
if not xla_bridge.backends_are_initialized():
    jax.config.update("jax_platforms", "cpu")

_TENSOR = type("Tensor", (), {"__repr__": lambda _: "*"})()  # stands for each among the arguments
_calls: dict[str, "Call"] = {}  # by key
_known: dict[tuple, "Call"] = {}  # by arguments
_WITH_DATA = {torch.Tensor, torch.nn.Parameter}
_library = torch.library.Library("pallas_kernels", "FRAGMENT")


class Call:
    """An op for arrays of certain shapes and dtypes, with certain options.

    leaves, structure: of its arguments, without the tensors.
    wrt: the arrays with gradients; none of them for the op alone.
    """

    def __init__(self, name: str, op: Callable, leaves, structure, wrt, arrays):
        def of(*arrays):
            left = iter(arrays)
            args, kwargs = structure.unflatten(next(left) if x is _TENSOR else x for x in leaves)
            return op(*args, **kwargs, implementation="mosaic")

        self.name, self.wrt = name, wrt
        kinds = [str(x.dtype).removeprefix("torch.") for x in arrays]
        if wide := {"int64", "uint64", "float64"}.intersection(kinds):
            raise TypeError(f"{name}: {wide.pop()} among the tensors' dtypes: cast to 32 bits")
        shapes = [tuple(map(int, x.shape)) for x in arrays]
        structs = list(map(jax.ShapeDtypeStruct, shapes, kinds))
        what = leaves, structure, wrt, structs, os.environ.get("JAXLLM_KERNELS"), source_hash()
        self.key = f"{name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}"
        _calls[self.key] = self
        self.entry = self._load() or trace(of, structs, wrt)
        self.leaf = self.entry.tree == jax.tree.structure(0)
        self.runners: dict[tuple, run.Runner] = {}

    @property
    def _path(self) -> Path:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.environ.get("PALLAS_KERNELS_CACHE") or os.path.join(cache, "pallas_kernels")
        return Path(folder) / f"{self.key}.pickle"

    def _load(self) -> Entry | None:
        try:
            return pickle.loads(self._path.read_bytes())
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError):
            return None

    def _plan(self) -> None:
        """Makes plans of the programs, unless it is done, and keeps them on disk."""
        if isinstance(self.entry.passes[0], Plan):
            return
        self.entry = self.entry._replace(passes=tuple(map(plan, self.entry.passes)))
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            own = self._path.with_suffix(f".{os.getpid()}")
            own.write_bytes(pickle.dumps(self.entry))
            own.replace(self._path)
        except (OSError, pickle.PicklingError, TypeError) as error:
            log.warning("%s is not cached on disk: %s", self.name, error)

    def runner(self, arrays, backward: bool, traced: bool) -> run.Runner:
        """Runs one of the passes; `traced` for an operator's, which defines all of its results."""
        what = backward, traced, arrays[0].device
        found = self.runners.get(what)
        if found is None:
            _check(self.name, {x.device for x in arrays})
            self._plan()
            own = self.entry.tree.num_leaves if traced and not backward else None
            found = self.runners[what] = run.Runner(self.name, self.entry.passes[backward], own)
        return found


def _check(name: str, devices: set[torch.device]) -> None:
    if len(devices) > 1:
        raise ValueError(f"{name}: all tensors on one device, not {sorted(map(str, devices))}")
    (device,) = devices
    if device.type != "cuda":
        raise ValueError(f"{name}: tensors on {device}, but its kernels need cuda: move them there")
    cuda = torch.version.cuda or "0"
    if int(cuda.split(".")[0]) < 13:
        raise RuntimeError(f"{name}: PyTorch for CUDA {cuda}, but JAX's kernels need 13")
    found = torch.cuda.get_device_capability(device)
    if found != (9, 0):
        raise NotImplementedError(f"{name}: compute capability {found}, not (9, 0) (H100, H200)")


def _fake(arrays, key: str, backward: bool) -> list[torch.Tensor]:
    made = _calls[key].entry.passes[backward]
    results = (made.arrays[i] for i in made.outputs)
    return [arrays[0].new_empty(x.shape, dtype=run.dtype(x.dtype)) for x in results]


def _run(call: Call, arrays, backward: bool = False):
    """Skips PyTorch's dispatcher, which takes longer than all the rest, where nobody traces."""
    if (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or not _WITH_DATA.issuperset(map(type, arrays))
    ):
        operator = getattr(torch.ops.pallas_kernels, call.name).default
        return operator(list(arrays), call.key, backward)
    return call.runner(arrays, backward, False)(arrays)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, *arrays):
        out, entry = _run(call, arrays), call.entry
        ctx.call = call
        ctx.save_for_backward(*[(arrays if where == "in" else out)[i] for where, i in entry.saved])
        return tuple(out[: entry.tree.num_leaves])

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        call = ctx.call
        made = _run(call, [*ctx.saved_tensors, *gradients], True)
        out = {i + 1: made[n] for i, n in zip(call.wrt, call.entry.gradients, strict=True)}
        return tuple(map(out.get, range(len(ctx.needs_input_grad))))


def register(name: str, op: Callable, autocast: bool = False) -> Callable:
    """The function that calls `op` with tensors.

    autocast: whether floating point tensors take autocast's dtype.
    """
    _library.define(f"{name}(Tensor[] arrays, str call, bool backward) -> Tensor[]")
    execute = lambda arrays, key, backward: _calls[key].runner(arrays, backward, True)(arrays)
    _library.impl(name, execute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pallas_kernels::{name}", _fake, lib=_library)

    @functools.wraps(op)
    def call(*args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not arrays:
            raise TypeError(f"{name}: no tensor among its arguments")
        rest = tuple([_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves])
        if autocast and torch.is_autocast_enabled(arrays[0].device.type):
            kind = torch.get_autocast_dtype(arrays[0].device.type)
            arrays = [x.to(kind) if x.is_floating_point() else x for x in arrays]
        wrt: tuple[int, ...] = ()
        if torch.is_grad_enabled():
            wrt = tuple([i for i, x in enumerate(arrays) if x.requires_grad])
        what = (name, rest, structure, wrt, *[(x.shape, x.dtype, x.device) for x in arrays])
        found = _known.get(what)
        if found is None:
            named = torch.dtype, str
            plain = [str(x).removeprefix("torch.") if isinstance(x, named) else x for x in rest]
            found = _known[what] = Call(name, op, plain, structure, wrt, arrays)
        out = _Function.apply(found, *arrays) if wrt else _run(found, arrays)
        tree = found.entry.tree
        return out[0] if found.leaf else tree.unflatten(out[: tree.num_leaves])

    return torch.compiler.allow_in_graph(call)


def quantize(weight: torch.Tensor, **options) -> QuantizedWeight:
    """`pallas_kernels.quantize` of a matrix (K, N), (in, out), as tensors on its device.

    A Linear's own weight is (out, in): give its transpose.
    """
    made = jax_quantize(weight.detach().float().cpu().numpy(), **options)
    return jax.tree.map(lambda x: run.tensor(x, weight.device), made)
