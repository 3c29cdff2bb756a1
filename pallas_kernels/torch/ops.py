"""Makes our ops callable with tensors: one layer for all of them.

An op for certain shapes and options is an `OpCall`.  It has plans (plan.py) of the op alone, or of
the op with the results that its backward pass needs, and of that pass; a runner runs them (run.py).
Plans are kept on disk: JAX is imported only for a new one.  torch.compile and other tracers see the
passes as the operator `pallas_kernels::NAME(Tensor[] arrays, str call, bool backward) -> Tensor[]`.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

import pallas_kernels
from pallas_kernels.torch import run
from pallas_kernels.torch.program import Entry

log = logging.getLogger("pallas_kernels")
_calls: dict[str, "OpCall"] = {}  # by key
_known: dict[tuple, "OpCall"] = {}  # by arguments
_WITH_DATA = {torch.Tensor, torch.nn.Parameter}
_library = torch.library.Library("pallas_kernels", "FRAGMENT")


def _each(f: Callable, x) -> Any:
    """x with f applied to all values in it, also in tuples, Packed and QuantizedWeight."""
    if isinstance(x, tuple):
        made = [_each(f, y) for y in x]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    if hasattr(x, "__dataclass_fields__"):
        return type(x)(*[_each(f, getattr(x, name)) for name in x.__dataclass_fields__])
    return f(x)


def _static(x):
    """x with a hash: a size that torch.compile calls dynamic as the number that it is here."""
    if isinstance(x, torch.SymInt | torch.SymFloat):
        return int(x) if isinstance(x, torch.SymInt) else float(x)
    if type(x).__hash__ is None:
        raise TypeError(f"a {type(x).__name__} among the arguments: pass a tensor, or a tuple")
    return x


def _32_bits(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's usual int64 ids as int32; ids that int32 lacks stay out of every range."""
    return x.clamp(-(2**31), 2**31 - 1).int() if x.dtype is torch.int64 else x


def _filled(template, arrays):
    """The template with arrays in place of `...`, in order."""
    left = iter(arrays)
    return _each(lambda x: next(left) if x is ... else x, template)


@functools.cache
def _versions() -> tuple:
    """What a plan depends on besides its call: versions, and our source."""
    found: list[Any] = [torch.__version__, torch.version.cuda]
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"):
        found += (name, *(x.version for x in distributions(name=name)))
    total = hashlib.sha256()
    for path in sorted(Path(pallas_kernels.__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return (*found, total.hexdigest())


class OpCall:
    """An op for arrays of certain shapes and dtypes, with certain options.

    template: its arguments and keywords, with `...` for each tensor.
    wrt: the arrays with gradients; none of them for the op alone.
    """

    def __init__(self, name: str, template, wrt: tuple[int, ...], arrays):
        self.name, self.wrt = name, wrt
        kinds = [str(x.dtype).removeprefix("torch.") for x in arrays]
        if layout := {x.layout for x in arrays} - {torch.strided}:
            raise TypeError(f"{name}: a tensor of layout {layout.pop()}: pass one with strides")
        if wide := {"uint64", "float64"}.intersection(kinds):
            raise TypeError(f"{name}: {wide.pop()} among the tensors' dtypes: cast to 32 bits")
        plain = lambda x: str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x
        template = _each(plain, template)
        self.kinds = [(tuple(map(int, x.shape)), y) for x, y in zip(arrays, kinds, strict=True)]
        what = template, wrt, self.kinds, os.environ.get("JAXLLM_KERNELS"), _versions()
        self.key = f"{name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}"
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.environ.get("PALLAS_KERNELS_CACHE") or os.path.join(cache, "pallas_kernels")
        self.path = Path(folder, f"{self.key}.pickle")
        self.entry: Entry = self._load() or self._made(template, arrays)
        self.runners: dict[tuple, run.Runner] = {}
        _calls[self.key] = self

    def _load(self) -> Entry | None:
        """What is on disk, behind its hash."""
        try:
            kept = self.path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(kept[32:]).digest() == kept[:32]:
            return pickle.loads(kept[32:])
        log.warning("%s is damaged: %s is traced again", self.path, self.name)
        return None

    def _made(self, template, arrays) -> Entry:
        """Traces the op, makes plans, and keeps them on disk."""
        import jax

        from pallas_kernels.torch.plan import plan
        from pallas_kernels.torch.trace import trace

        def op(*given):
            args, named = _filled(template, given)
            return getattr(pallas_kernels, self.name)(*args, **dict(named), implementation="mosaic")

        structs = [jax.ShapeDtypeStruct(*kind) for kind in self.kinds]
        entry = trace(op, structs, self.wrt)
        if not _traced(arrays):
            _check(self.name, arrays)
        entry = entry._replace(passes=tuple(map(plan, entry.passes)))
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            own, kept = self.path.with_suffix(f".{os.getpid()}"), pickle.dumps(entry)
            own.write_bytes(hashlib.sha256(kept).digest() + kept)
            own.replace(self.path)
        except OSError as error:
            log.warning("%s is not cached on disk: %s", self.name, error)
        return entry

    def runner(self, arrays, backward: bool, traced: bool) -> run.Runner:
        """Runs one of the passes; `traced` for an operator's, which defines all of its results."""
        what = backward, traced, arrays[0].device
        if what not in self.runners:
            _check(self.name, arrays)
            own = self.entry.count if traced and not backward else None
            self.runners[what] = run.Runner(self.name, self.entry.passes[backward], what[2], own)
        return self.runners[what]


def _check(name: str, arrays) -> None:
    devices = {x.device for x in arrays}
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
    if inductor := sys.modules.get("torch._inductor.lowering"):
        # Otherwise it logs all that its first call depends on: 2^n lines after n norms with sums.
        inductor.FALLBACK_ALLOW_LIST.add(f"pallas_kernels::{_calls[key].name}")
    made = _calls[key].entry.passes[backward]
    results = (made.arrays[i] for i in made.outputs)
    return [arrays[0].new_empty(x.shape, dtype=getattr(torch, x.dtype)) for x in results]


def _traced(arrays) -> bool:
    """Whether someone traces: modes, functorch, or tensors without data."""
    modes, functorch = torch._C._len_torch_dispatch_stack(), torch._C._functorch
    other = not _WITH_DATA.issuperset(map(type, arrays))
    return other or modes > 0 or functorch.peek_interpreter_stack() is not None


def _run(call: OpCall, backward: bool, *arrays):
    """Skips PyTorch's dispatcher, which takes longer than all the rest, where nobody traces."""
    if _traced(arrays):
        return getattr(torch.ops.pallas_kernels, call.name)(list(arrays), call.key, backward)
    return call.runner(arrays, backward, False)(arrays)


class _Function(torch.autograd.Function):
    """One of the passes; the backward pass has no gradient, and says so."""

    @staticmethod
    def forward(ctx, call: OpCall, backward: bool, *arrays):
        out, entry = _run(call, backward, *arrays), call.entry
        ctx.call, ctx.second = call, backward
        if backward:
            return tuple(out)
        both = *arrays, *out
        ctx.save_for_backward(*[both[i] for i in entry.saved])
        return tuple(out[: entry.count])

    @staticmethod
    def backward(ctx, *gradients):
        call = ctx.call
        if ctx.second:
            raise NotImplementedError(f"{call.name}: its kernels have no second derivative")
        of = _Function.apply if torch.is_grad_enabled() else _run  # with create_graph=True
        made = of(call, True, *ctx.saved_tensors, *gradients)
        out = {i + 2: made[n] for i, n in zip(call.wrt, call.entry.gradients, strict=True)}
        return tuple(map(out.get, range(len(ctx.needs_input_grad))))


class Op:
    """One of our ops for tensors; with `autocast` those of floats take autocast's dtype."""

    __module__ = "pallas_kernels.torch"  # where `__reduce__` finds it

    def __init__(self, name: str, autocast: bool = False):
        self.__name__ = self.__qualname__ = name
        self.autocast = autocast
        signature = f"{name}(Tensor[] arrays, str call, bool backward) -> Tensor[]"
        _library.define(signature, tags=torch.Tag.needs_contiguous_strides)
        execute = lambda arrays, key, backward: _calls[key].runner(arrays, backward, True)(arrays)
        _library.impl(name, execute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pallas_kernels::{name}", _fake, lib=_library)
        _Dynamo.ops.append(self)
        if "torch._dynamo" in sys.modules:
            torch.compiler.allow_in_graph(self)

    @property
    def __wrapped__(self) -> Callable:
        """The op for JAX's arrays, which has the signature."""
        return getattr(pallas_kernels, self.__name__)

    def __reduce__(self) -> str:
        return self.__name__  # a copy is the op itself, which torch.compile knows

    def __call__(self, *args, **kwargs) -> Any:
        name, arrays = self.__name__, []
        keep = lambda x: arrays.append(_32_bits(x)) or ... if isinstance(x, torch.Tensor) else x
        template = _each(keep, (args, tuple(kwargs.items())))
        if not arrays:
            raise TypeError(f"{name}: no tensor among its arguments")
        if self.autocast and torch.is_autocast_enabled(arrays[0].device.type):
            kind = torch.get_autocast_dtype(arrays[0].device.type)
            arrays = [x.to(kind) if x.is_floating_point() else x for x in arrays]
        grad = torch.is_grad_enabled()
        wrt = tuple([i for i, x in enumerate(arrays) if grad and x.requires_grad])
        what = (name, template, wrt, *[(x.shape, x.dtype, x.device) for x in arrays])
        try:
            found = _known.get(what)
        except TypeError:
            found = _known.get(what := _each(_static, what))
        if found is None:
            found = _known[what] = OpCall(name, what[1], wrt, arrays)
        forward_mode = forward_ad._current_level >= 0  # which PyTorch refuses for a _Function
        out = (_Function.apply if wrt or forward_mode else _run)(found, False, *arrays)
        return out[0] if found.entry.out is ... else _filled(found.entry.out, out)


class _Dynamo:
    """Tells torch._dynamo that its graphs may call our ops, once someone imports it.

    To import it ourselves would take a second, which only torch.compile needs.
    """

    ops: list[Op] = []

    def find_spec(self, name, *_):
        if name == "torch._dynamo":
            sys.meta_path.remove(self)
            spec: Any = importlib.util.find_spec(name)
            self.execute, spec.loader.exec_module = spec.loader.exec_module, self.exec_module
            return spec

    def exec_module(self, module):
        self.execute(module)
        torch.compiler.allow_in_graph(self.ops)


sys.meta_path.insert(0, _Dynamo())


def quantize(weight: torch.Tensor, **options) -> "pallas_kernels.QuantizedWeight":
    """`pallas_kernels.quantize` of a matrix (K, N), (in, out), as tensors on its device.

    A Linear's own weight is (out, in): give its transpose.
    """
    import pallas_kernels.torch.trace  # it keeps JAX off the GPU

    made = pallas_kernels.quantize(weight.detach().float().cpu().numpy(), **options)
    return _each(lambda x: run.tensor(x, weight.device) if hasattr(x, "dtype") else x, made)
