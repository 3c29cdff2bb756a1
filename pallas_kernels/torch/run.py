"""Runs a plan with PyTorch: its memory, its current stream, its operators for what is no launch."""

import logging
import math
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from pallas_kernels.torch import launch
from pallas_kernels.torch.glue import Glue
from pallas_kernels.torch.plan import Plan, Unit
from pallas_kernels.torch.program import Array, Step

log = logging.getLogger("pallas_kernels")
_ALIGNMENT = 16  # bytes; TMA needs it, as do the vector loads


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


# ---- primitives that are no glue -----------------------------------------------------------------


def _dot_general(x, y, out, *, dimension_numbers):
    (lc, rc), (lb, rb) = dimension_numbers
    if lb:
        raise NotImplementedError("products of batches have no form in PyTorch")
    left = [i for i in range(x.dim()) if i not in lc]
    right = [i for i in range(y.dim()) if i not in rc]
    k = math.prod(x.shape[i] for i in lc)
    a, b = x.permute(*left, *lc).reshape(-1, k), y.permute(*rc, *right).reshape(k, -1)
    if x.is_cuda and x.dtype == y.dtype != out == torch.float32:
        product = torch.mm(a, b, out_dtype=out)
    else:
        product = torch.mm(a.to(out), b.to(out))
    return product.reshape(*(x.shape[i] for i in left), *(y.shape[i] for i in right))


def _sort(*x, dimension, num_keys, **_):
    order = None
    for key in reversed(x[:num_keys]):
        values = key if key.is_floating_point() else key.long()
        values = values if order is None else values.gather(dimension, order)
        found = torch.sort(values, dim=dimension, stable=True).indices
        order = found if order is None else order.gather(dimension, found)
    # PyTorch gathers no unsigned integers of 16 bits or more.
    signed = [getattr(torch, str(y.dtype).removeprefix("torch.u"), y.dtype) for y in x]
    pairs = zip(x, signed, strict=True)
    return [y.view(kind).gather(dimension, order).view(y.dtype) for y, kind in pairs]


def _scatter(x, indices, updates, *, update_window_dims, scatter_dims_to_operand_dims, **_):
    """x[index] = update for scalars, where others are dropped, or for one slice along one axis."""
    axes = tuple(scatter_dims_to_operand_dims)
    if not update_window_dims and axes == (0,) and x.dim() == 1:
        index = indices[..., 0].reshape(-1).long()
        inside = (index >= 0) & (index < x.shape[0])
        wide = torch.cat([x, x.new_zeros(1)])  # one more place for what is dropped
        wide[torch.where(inside, index, x.shape[0])] = updates.reshape(-1)
        return wide[:-1]
    if updates.dim() != x.dim() or len(axes) > 1 or indices.dim() != 1:
        raise NotImplementedError("this scatter has no form in PyTorch")
    out = x.clone()
    if not axes:
        out[tuple(map(slice, updates.shape))] = updates
        return out
    within = indices.long() + torch.arange(updates.shape[axes[0]], device=x.device)
    return out.index_copy(axes[0], within, updates)


_OPERATORS = {
    "sort": _sort, "scatter": _scatter,
    # XLA adds bf16 in fp32 and rounds once, as PyTorch does.
    "reduce_sum": lambda x, *, axes, **_: torch.sum(x, axes, dtype=x.dtype),
    "reduce_max": lambda x, *, axes, **_: torch.amax(x, axes),
    "reduce_min": lambda x, *, axes, **_: torch.amin(x, axes),
    "reduce_and": lambda x, *, axes, **_: torch.all(x, axes),
    "reduce_or": lambda x, *, axes, **_: torch.any(x, axes),
    "argmax": lambda x, *, axes, **_: torch.argmax(x.float(), axes[0]).int(),
    "cumsum": lambda x, *, axis, **_: torch.cumsum(x, axis, dtype=x.dtype),
}  # fmt: skip


def operator(step: Step, out: Array) -> Callable:
    """A step as a function of tensors: one result, or a list of them."""
    kind = dtype(out.dtype)
    if step.primitive == "dot_general":
        return lambda x, y: _dot_general(x, y, kind, **step.params)
    if step.primitive == "convert_element_type":  # of types that glue lacks, such as float8_e4m3fn
        return lambda x: x.to(kind)
    if step.primitive not in _OPERATORS:
        raise NotImplementedError(f"{step.primitive} has no form in PyTorch")
    return lambda *x: _OPERATORS[step.primitive](*x, **step.params)


# ---- a plan --------------------------------------------------------------------------------------


class _Threads(threading.local):
    def __init__(self):
        self.devices: set[int] = set()


_bound = _Threads()


def _bind(device: int) -> None:
    """Makes the device's CUDA context current in this thread.

    Mosaic calls the driver, which takes the current context.  A new thread, such as autograd's, has
    none until the CUDA runtime needs one: torch.cuda.device(0) does not, nor does memory from
    PyTorch's cache.
    """
    torch.cuda.mem_get_info(device)
    _bound.devices.add(device)


class Runner:
    """A plan ready to run: runner(tensors) -> list of tensors, all on one device."""

    def __init__(self, name: str, plan: Plan, own: int | None = None):
        """own: the op's outputs come first; what follows is for its backward pass.

        A kernel may leave parts of these arrays undefined.  As results of an operator they begin
        with zeros, so that equal calls have equal results (own=None: all is left as it is).
        """
        self.name, self.plan = name, plan
        self.zeros = frozenset(() if own is None else plan.outputs[own:])
        self.units: list[tuple] | None = None

    def _prepare(self, device) -> list[tuple]:
        """Makes the constants, and what __call__ needs of each unit."""
        # In a new thread: these outlive this call, and may come neither from a CUDA graph's pool of
        # memory nor be inference tensors, both of which belong to a thread.
        with ThreadPoolExecutor(1) as thread:
            self.constants = thread.submit(self._constants, device).result()
        self.addresses = [x.data_ptr() for x in self.constants]
        self.units = [self._unit(unit, device) for unit in self.plan.units]
        return self.units

    def _constants(self, device) -> list[torch.Tensor]:
        made = []
        for n, x in enumerate(self.plan.constants, len(self.plan.inputs)):
            wide = x.astype(np.float64 if x.dtype.kind in "fV" else x.dtype)
            made.append(torch.tensor(wide, dtype=dtype(self.plan.slots[n].dtype)).to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams read them, too
        return made

    def _unit(self, unit: Unit, device) -> tuple:
        slots, what = self.plan.slots, unit.what
        if isinstance(what, Step):
            return operator(what, slots[unit.slots[0]]), (), None, unit
        made = [
            (
                torch.zeros if s in self.zeros else torch.empty,
                s,
                slots[s].shape,
                dtype(slots[s].dtype),
            )
            for s in unit.made
        ]
        start = launch.glue_launcher if isinstance(what, Glue) else launch.launcher
        addresses = itemgetter(*unit.slots, unit.slots[0])  # and room for one more
        return start(what, device.index), made, addresses, unit

    def __call__(self, tensors) -> list[torch.Tensor]:
        device, stream = tensors[0].device, 0
        index = device.index
        if index is not None:
            if index != torch._C._cuda_getDevice():
                with torch.cuda.device(index):
                    return self(tensors)
            if index not in _bound.devices:
                _bind(index)
            stream = torch._C._cuda_getCurrentRawStream(index)
        plan, units = self.plan, self.units or self._prepare(device)
        held: list[Any] = [*tensors, *self.constants]
        at: list[Any] = []
        for i, x in enumerate(tensors):
            place = x.data_ptr()
            if place % _ALIGNMENT or not x.is_contiguous():
                x = held[i] = _copy(self.name, x)
                place = x.data_ptr()
            at.append(place)
        rest = [None] * (len(plan.slots) - len(held))
        held += rest
        at += self.addresses
        at += rest
        if plan.size:
            shared = torch.empty(plan.size, dtype=torch.uint8, device=device)
            base = shared.data_ptr()
            for slot, offset in plan.shared.items():
                at[slot] = base + offset
        for start, made, chosen, unit in units:
            if chosen is None:
                self._operate(start, unit, held, at)
            else:
                for make, slot, shape, kind in made:
                    x = held[slot] = make(shape, dtype=kind, device=device)
                    at[slot] = x.data_ptr()
                pointers = array("Q", chosen(at))
                begin = pointers.buffer_info()[0]
                pointers[-1] = begin
                start(begin, len(unit.slots), stream)
            for slot in unit.dead:
                held[slot] = None
        return [held[i] for i in plan.outputs]

    def _operate(self, run: Callable, unit: Unit, held: list, at: list) -> None:
        """One operator of PyTorch; its results get the shape of their slot."""
        # A saved tensor may have another shape than the program's input, its view.
        arrays = [held[slot].view(shape) for slot, shape in unit.reads]
        with torch.autocast(arrays[0].device.type, enabled=False):
            results = run(*arrays)
        results = results if isinstance(results, list) else [results]
        for slot, x in zip(unit.slots, results, strict=True):
            held[slot] = x = x.reshape(self.plan.slots[slot].shape).contiguous()
            at[slot] = x.data_ptr()


_said: set[str] = set()


def _copy(name: str, x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of an input; the first one of this op is said."""
    if name not in _said:
        _said.add(name)
        shape, strides = tuple(x.shape), x.stride()
        log.warning(
            "%s copies an input %s with strides %s: make it contiguous", name, shape, strides
        )
    return x.clone(memory_format=torch.contiguous_format)
