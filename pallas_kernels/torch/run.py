"""Runs programs with PyTorch: the primitives as PyTorch operators, kernels by their launchers."""

import ctypes
import functools
import importlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pallas_kernels.torch.program import Array, Kernel, Program, Step

log = logging.getLogger("pallas_kernels")
_ALIGNMENT = 16  # bytes; TMA needs it, as do the vector loads


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


# ---- kernels -------------------------------------------------------------------------------------


@functools.cache
def _library():
    """MosaicGpuCompile of JAX's CUDA plugin, and whether launches take what it does since 0.12."""
    from jax._src.lib import version

    try:
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
    except ImportError:
        raise RuntimeError("no jax_plugins.xla_cuda13: pip install 'jaxllm[torch]'") from None
    compile_ = ctypes.CDLL(str(plugin._get_library_path())).MosaicGpuCompile
    compile_.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile_.restype = ctypes.POINTER(ctypes.c_void_p)
    return compile_, version >= (0, 12, 0)


_bound = threading.local()


def bind(device: int) -> None:
    """Makes the device's CUDA context current in this thread, once a thread.

    Mosaic calls the driver, which takes the current context.  A new thread, such as autograd's, has
    none until the CUDA runtime needs one: torch.cuda.device(0) does not, nor does memory from
    PyTorch's cache.
    """
    if device not in _bound.__dict__.setdefault("devices", set()):
        torch.cuda.mem_get_info(device)
        _bound.devices.add(device)


_compiled: dict[tuple[bytes, int], Callable] = {}
_lock = threading.Lock()


def launcher(kernel: Kernel, device: int) -> Callable:
    """launch(pointers, stream) of a kernel compiled for this device; compiles it once a process."""
    found = _compiled.get((kernel.module, device))
    if found is not None:
        return found
    with _lock:
        found = _compiled.get((kernel.module, device))
        if found is None:
            found = _compiled[kernel.module, device] = _compile(kernel, device)
    return found


def _compile(kernel: Kernel, device: int) -> Callable:
    import jax.experimental.mosaic.gpu  # noqa: F401  (tells Mosaic where CUDA lies)

    compile_, second = _library()
    made = compile_(kernel.module, len(kernel.module))
    if not made:
        raise RuntimeError(
            f"{kernel.name} does not compile for cuda:{device}: {_why(device)}; the environment's"
            " TF_CPP_MIN_LOG_LEVEL=0 shows more"
        )
    types = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
    if second:  # since jaxlib 0.12 also the kernel and the device
        types = [ctypes.c_void_p, *types, ctypes.c_int]
    call = ctypes.CFUNCTYPE(None, *types)(made[1])
    function = made[0]
    if second:
        whole = made[2]
        return lambda pointers, stream: call(whole, function, stream, pointers, device)
    return lambda pointers, stream: call(function, stream, pointers)


def _why(device: int) -> str:
    """What Mosaic, which returns no reason, needs and lacks."""
    driver, current = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
    error = driver.cuCtxGetDevice(ctypes.byref(current))
    if error:
        return f"this thread has no CUDA context (error {error})"
    if current.value != device:
        return f"this thread's CUDA context is that of device {current.value}"
    root = os.environ.get("MOSAIC_GPU_CUDA_ROOT", "")
    if not shutil.which("ptxas") and not os.path.exists(os.path.join(root, "bin", "ptxas")):
        return "ptxas is not on PATH: pip install 'jaxllm[torch]'"
    return "a pass of Mosaic, ptxas or the load of the module failed"


def _kernel_step(step: Step, owned: frozenset[int], inputs: int) -> Callable:
    """The step as a function of tensors; may write into those in `owned`.

    inputs: of the program; whoever calls an op hears of copies of these.
    """
    kernel: Kernel = step.params
    aliased = set(kernel.aliases.values())
    # operand, argument, whether it must be copied; operand, array, value
    given = [
        (i, x, i in aliased and x not in owned)
        for i, x in enumerate(kernel.operands)
        if isinstance(x, int)
    ]
    made: list[tuple[int, Any, Any]] = [
        (i, x, None) if isinstance(x, Array) else (i, x[0], x[1])
        for i, x in enumerate(kernel.operands)
        if not isinstance(x, int)
    ]
    fresh = [
        (r.shape, dtype(r.dtype)) if i not in kernel.aliases else kernel.aliases[i]
        for i, r in enumerate(kernel.results)
    ]
    count = len(kernel.operands)
    pointers_of = ctypes.c_void_p * (count + len(fresh))
    launches: dict[int, Callable] = {}

    def run(*tensors):
        device = tensors[0].device
        index = device.index
        launch = launches.get(index)
        if launch is None:
            launch = launches[index] = launcher(kernel, index)
        operands: list[Any] = [None] * count
        for i, argument, copied in given:
            x = tensors[argument]
            if copied or not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
                x = _copy(kernel.name, x, step.ins[argument] < inputs and not copied)
            operands[i] = x
        for i, array, value in made:
            x = torch.empty(array.shape, dtype=dtype(array.dtype), device=device)
            operands[i] = x if value is None else x.fill_(value)
        results = [
            operands[r] if isinstance(r, int) else torch.empty(r[0], dtype=r[1], device=device)
            for r in fresh
        ]
        pointers = pointers_of(*[x.data_ptr() for x in operands], *[x.data_ptr() for x in results])
        launch(pointers, torch._C._cuda_getCurrentRawStream(index))
        return [results[i] for i in kernel.returned]

    return run


_said: set[str] = set()


def _copy(name: str, x: torch.Tensor, say: bool) -> torch.Tensor:
    """A contiguous copy of a kernel's operand; the first one of this kernel is said."""
    if say and name not in _said:
        _said.add(name)
        shape, strides = tuple(x.shape), x.stride()
        log.warning(
            "%s copies an input %s with strides %s: make it contiguous", name, shape, strides
        )
    return x.clone(memory_format=torch.contiguous_format)


# ---- primitives ----------------------------------------------------------------------------------


def _broadcast_in_dim(*, shape, broadcast_dimensions, **_):
    def run(x, *_):
        sizes = [1] * len(shape)
        for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
            sizes[axis] = size
        return x.reshape(sizes).expand(shape)

    return run


def _pad(*, padding_config, **_):
    config = [tuple(map(int, c)) for c in padding_config]

    def run(x, value):
        # Pads first and crops then: a shift by more than the length leaves only padding.
        shape = [
            max(low, 0) + n + max(n - 1, 0) * inner + max(high, 0)
            for n, (low, high, inner) in zip(x.shape, config, strict=True)
        ]
        out = value.to(x.dtype).expand(shape).clone(memory_format=torch.contiguous_format)
        at, kept = [], []
        for n, size, (low, high, inner) in zip(x.shape, shape, config, strict=True):
            first = max(low, 0)
            at.append(slice(first, first + n + max(n - 1, 0) * inner, inner + 1))
            kept.append(slice(max(-low, 0), size - max(-high, 0)))
        out[tuple(at)] = x
        return out[tuple(kept)]

    return run


def _slice(*, start_indices, limit_indices, strides, **_):
    at = tuple(map(slice, start_indices, limit_indices, strides or [1] * len(start_indices)))
    return lambda x: x[at]


def _dot_general(*, dimension_numbers, out, **_):
    (lc, rc), (lb, rb) = dimension_numbers

    def run(x, y):
        lf = [i for i in range(x.dim()) if i not in (*lc, *lb)]
        rf = [i for i in range(y.dim()) if i not in (*rc, *rb)]
        batch = [x.shape[i] for i in lb]
        left = [x.shape[i] for i in lf]
        right = [y.shape[i] for i in rf]
        k = int(np.prod([x.shape[i] for i in lc]))
        a = x.permute(*lb, *lf, *lc).reshape(-1, int(np.prod(left)), k)
        b = y.permute(*rb, *rc, *rf).reshape(-1, k, int(np.prod(right)))
        if x.dtype != out or y.dtype != out:
            if x.is_cuda and x.dtype == y.dtype and out == torch.float32:
                product = (
                    torch.bmm(a, b, out_dtype=out) if batch else torch.mm(a[0], b[0], out_dtype=out)
                )
            else:
                product = torch.matmul(a.to(out), b.to(out))
        else:
            product = torch.bmm(a, b) if batch else torch.mm(a[0], b[0])
        return product.reshape(*batch, *left, *right)

    return run


def _sort(*, dimension, num_keys, is_stable=True, **_):
    def run(*x):
        order = None
        for key in reversed(x[:num_keys]):
            values = key.long() if not key.is_floating_point() else key
            values = values if order is None else values.gather(dimension, order)
            found = torch.sort(values, dim=dimension, stable=True).indices
            order = found if order is None else order.gather(dimension, found)
        return [_gather(y, dimension, order) for y in x]

    return run


def _gather(x, dimension, index):
    """PyTorch gathers no unsigned integers of 16 bits or more."""
    signed = getattr(torch, str(x.dtype).removeprefix("torch.u"), x.dtype)
    return x.view(signed).gather(dimension, index).view(x.dtype)


def _scatter(*, update_window_dims, inserted_window_dims, scatter_dims_to_operand_dims, **_):
    """x[index] = update for scalars, where others are dropped, or for one slice along one axis."""
    axes = tuple(scatter_dims_to_operand_dims)

    def slice_of(x, indices, updates):
        out = x.clone()
        if not axes:
            out[tuple(map(slice, updates.shape))] = updates
            return out
        within = indices.long() + torch.arange(updates.shape[axes[0]], device=x.device)
        return out.index_copy(axes[0], within, updates)

    def scalars(x, indices, updates):
        index = indices[..., 0].reshape(-1).long()
        inside = (index >= 0) & (index < x.shape[0])
        wide = torch.cat([x, x.new_zeros(1)])  # one more place for what is dropped
        wide[torch.where(inside, index, x.shape[0])] = updates.reshape(-1)
        return wide[:-1]

    def run(x, indices, updates):
        if not update_window_dims and axes == (0,) and x.dim() == 1:
            return scalars(x, indices, updates)
        if not inserted_window_dims and len(axes) <= 1 and indices.dim() == 1:
            return slice_of(x, indices, updates)
        raise NotImplementedError("this scatter has no form in PyTorch")

    return run


def _iota(*, dtype, shape, dimension, **_):
    kind = globals()["dtype"](dtype)

    def run(*, device):
        sizes = [n if axis == dimension else 1 for axis, n in enumerate(shape)]
        return torch.arange(shape[dimension], device=device).to(kind).reshape(sizes).expand(shape)

    return run


def _split(*, sizes, axis, **_):
    return lambda x: list(torch.split(x, list(sizes), axis))


def _convert(*, new_dtype, **_):
    kind = dtype(new_dtype)

    def run(x):
        if kind == torch.bool:
            return x != 0
        return x.to(kind)

    return run


def _round(*, exponent_bits, mantissa_bits, **_):
    kind = {(8, 7): torch.bfloat16, (5, 10): torch.float16}[exponent_bits, mantissa_bits]
    return lambda x: x.to(kind).to(x.dtype)


def _reduce(function):
    def rule(*, axes, **_):
        return lambda x: function(x, tuple(axes))

    return rule


def _sum(x, axes):
    # XLA adds bf16 in fp32 and rounds once, as PyTorch does.
    return torch.sum(x, axes, dtype=x.dtype) if axes else x


def _select(which, *cases):
    if which.dtype == torch.bool:
        return torch.where(which, cases[1], cases[0])
    return torch.stack(torch.broadcast_tensors(*cases)).gather(0, which.long()[None])[0]


def _div(x, y):
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _shift_right(x, by):
    """Shifts zeros in; PyTorch shifts the sign."""
    bits = 8 * x.dtype.itemsize
    if bits == 64:  # by _widened, and not negative
        return torch.bitwise_right_shift(x, by)
    return torch.bitwise_right_shift(x.long() & (1 << bits) - 1, by.long()).to(x.dtype)


def _widened(operation, out):
    """Of unsigned integers, for which PyTorch has hardly any operators, in int64."""
    unsigned = (torch.uint16, torch.uint32)
    wide = lambda x: x.long() if x.dtype in unsigned else x
    return lambda *x: operation(*map(wide, x)).to(out)


def _cumulative(function):
    def rule(*, axis, reverse, **_):
        def run(x):
            x = x.flip(axis) if reverse else x
            out = function(x, axis)
            return out.flip(axis) if reverse else out

        return run

    return rule


_PLAIN = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": _div, "neg": torch.neg,
    "add_any": torch.add,
    "max": torch.maximum, "min": torch.minimum, "abs": torch.abs, "sign": torch.sign,
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log1p": torch.log1p,
    "expm1": torch.expm1, "tanh": torch.tanh, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "logistic": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "square": torch.square,
    "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil, "is_finite": torch.isfinite,
    "pow": torch.pow, "rem": torch.fmod, "log2": torch.log2,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "shift_left": torch.bitwise_left_shift,
    "shift_right_arithmetic": torch.bitwise_right_shift, "shift_right_logical": _shift_right,
    "select_n": _select,
    "clamp": lambda low, x, high: torch.minimum(torch.maximum(x, low), high),
}  # fmt: skip

_RULES: dict[str, Callable[..., Callable]] = {
    "reshape": lambda *, new_sizes, **_: lambda x: x.reshape(new_sizes),
    "squeeze": lambda *, dimensions, **_: lambda x: x.squeeze(tuple(dimensions)),
    "expand_dims": lambda *, dimensions, **_: lambda x: x[
        tuple(None if i in dimensions else slice(None) for i in range(x.dim() + len(dimensions)))
    ],
    "transpose": lambda *, permutation, **_: lambda x: x.permute(permutation),
    "concatenate": lambda *, dimension, **_: lambda *x: torch.cat(x, dimension),
    "stack": lambda *, axis=0, dimension=None, **_: lambda *x: torch.stack(
        x, axis if dimension is None else dimension
    ),
    "unstack": lambda *, axis=0, **_: lambda x: list(torch.unbind(x, axis)),
    "integer_pow": lambda *, y, **_: lambda x: torch.pow(x, y),
    "rev": lambda *, dimensions, **_: lambda x: x.flip(tuple(dimensions)),
    "bitcast_convert_type": lambda *, new_dtype, **_: lambda x: x.view(dtype(new_dtype)),
    "broadcast_in_dim": _broadcast_in_dim, "pad": _pad, "slice": _slice, "sort": _sort,
    "scatter": _scatter, "split": _split, "convert_element_type": _convert,
    "reduce_precision": _round,
    "reduce_sum": _reduce(_sum), "reduce_max": _reduce(lambda x, a: torch.amax(x, a)),
    "reduce_min": _reduce(lambda x, a: torch.amin(x, a)),
    "reduce_and": _reduce(lambda x, a: torch.all(x, a)),
    "reduce_or": _reduce(lambda x, a: torch.any(x, a)),
    "cumsum": _cumulative(lambda x, a: torch.cumsum(x, a, dtype=x.dtype)),
    "cummax": _cumulative(lambda x, a: torch.cummax(x, a).values),
}  # fmt: skip


def function(step: Step, program: Program, owned: frozenset[int]) -> Callable:
    """A step as a function of tensors: one result, or a list of them."""
    name, params = step.primitive, step.params
    if name == "kernel":
        return _kernel_step(step, owned, len(program.inputs))
    if name in _PLAIN:
        kinds = {program.arrays[i].dtype for i in (*step.ins, *step.outs)}
        if kinds & {"uint16", "uint32"}:
            return _widened(_PLAIN[name], dtype(program.arrays[step.outs[0]].dtype))
        return _PLAIN[name]
    if name == "dot_general":
        return _dot_general(**params, out=dtype(program.arrays[step.outs[0]].dtype))
    if name in _RULES:
        return _RULES[name](**params)
    raise NotImplementedError(f"{name} has no form in PyTorch")


class Runner:
    """A program ready to run: runner(tensors) -> list of tensors, all on one device."""

    def __init__(self, program: Program, kernel: Callable | None = None):
        """kernel(step) replaces the launch of kernels; tests interpret them."""
        self.program = program
        self.constants: dict[torch.device, dict[int, torch.Tensor]] = {}
        last: dict[int, int] = {}
        for n, step in enumerate(program.steps):
            last.update(dict.fromkeys(step.ins, n))
        last.update(dict.fromkeys(program.outputs, len(program.steps)))
        views = self._views()
        plan: list[Any] = []
        for n, step in enumerate(program.steps):
            mine = frozenset(
                i
                for i, x in enumerate(step.ins)
                if x >= len(program.inputs)
                and x not in program.constants
                and last[x] == n
                and x not in views
                and step.ins.count(x) == 1
            )
            run = kernel(step) if kernel and step.primitive == "kernel" else None
            run = run or ("iota" if step.primitive == "iota" else function(step, program, mine))
            if run == "iota":
                run = _iota(**step.params)
            dead = tuple(i for i, when in last.items() if when == n and i not in program.constants)
            plan.append((step.primitive == "iota", run, step.ins, step.outs, dead))
        self.plan = plan

    def _views(self) -> set[int]:
        """Arrays whose memory may be another array's, too."""
        shared = set()
        for step in self.program.steps:
            if step.primitive in (
                "reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "slice",
                "split", "unstack", "convert_element_type", "bitcast_convert_type", "reduce_sum",
            ):  # fmt: skip
                shared.update(step.ins)
                shared.update(step.outs)
        return shared

    def _constants(self, device) -> dict[int, torch.Tensor]:
        found = self.constants.get(device)
        if found is None:
            # In a new thread: these outlive this call, and may come neither from a CUDA
            # graph's pool of memory nor be inference tensors, both of which belong to a thread.
            thread = threading.Thread(target=self._make_constants, args=(device,))
            thread.start()
            thread.join()
            found = self.constants[device]
        return found

    def _make_constants(self, device) -> None:
        wide = lambda x: x.astype(np.float64 if x.dtype.kind in "fV" else x.dtype)
        self.constants[device] = {
            i: torch.tensor(wide(x), dtype=dtype(self.program.arrays[i].dtype)).to(device)
            for i, x in self.program.constants.items()
        }
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams read them, too

    def __call__(self, tensors) -> list[torch.Tensor]:
        device = tensors[0].device
        values: dict[int, Any] = dict(enumerate(tensors))
        values.update(self._constants(device))
        for iota, run, ins, outs, dead in self.plan:
            if iota:
                results = run(device=device)
            else:
                results = run(*[values[i] for i in ins])
            if isinstance(results, list):
                values.update(zip(outs, results, strict=True))
            else:
                values[outs[0]] = results
            for i in dead:
                values.pop(i, None)
        return [values[i] for i in self.program.outputs]
