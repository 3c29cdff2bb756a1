"""Runs a plan with PyTorch's memory, its current stream, and its operators between launches."""

import functools
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
from pallas_kernels.torch.program import Glue, Plan, ProgramStep, Unit

log = logging.getLogger("pallas_kernels")
_ALIGNMENT = 16  # bytes; TMA needs it, as do the vector loads
_bound = threading.local()  # devices: those whose CUDA context this thread has
_said: set[str] = set()  # the ops of whose copies the user knows


def tensor(x, device) -> torch.Tensor:
    x = np.asarray(x)
    plain = x.astype(np.float32) if x.dtype.kind in "fV" else x.copy()
    return torch.from_numpy(plain).to(device, getattr(torch, x.dtype.name))


def _dot_general(x, y, *, out, sums, batch=((), ())):
    (lc, rc), (lb, rb) = sums, batch
    left = [i for i in range(x.dim()) if i not in (*lb, *lc)]
    right = [i for i in range(y.dim()) if i not in (*rb, *rc)]
    k, members = math.prod(x.shape[i] for i in lc), [x.shape[i] for i in lb]
    a = x.permute(*lb, *left, *lc).reshape(*members, -1, k)
    b = y.permute(*rb, *rc, *right).reshape(*members, k, -1)
    if x.is_cuda and x.dtype == y.dtype != out == torch.float32 and not batch[0]:
        product = torch.mm(a, b, out_dtype=out)
    else:
        product = torch.matmul(a.to(out), b.to(out))
    free = [*(x.shape[i] for i in left), *(y.shape[i] for i in right)]
    return product.reshape(*members, *free)


def _sort(*arrays, dimension, num_keys, **_):
    """By the last key, ..., by the first one: PyTorch sorts by one, and sorts no wide uint."""
    wide = [x if x.is_floating_point() else x.long() for x in arrays]
    for key in reversed(range(num_keys)):
        order = torch.sort(wide[key], dim=dimension, stable=True)[1]
        wide = [x.gather(dimension, order) for x in wide]
    return [x.to(like.dtype) for x, like in zip(wide, arrays, strict=True)]


def _scatter(x, indices, updates, **_):
    """x[index] = update for numbers; what is outside is dropped."""
    if x.dim() > 1:
        raise NotImplementedError("a scatter of slices has no form in PyTorch")
    index = indices.long().reshape(-1)
    index = torch.where((index >= 0) & (index < len(x)), index, len(x))  # one more place
    return torch.cat([x, x[:1]]).index_copy_(0, index, updates.reshape(-1))[:-1]


_OPERATORS = {  # for primitives that are no glue: one result, or a list of them
    "dot_general": _dot_general, "sort": _sort, "scatter": _scatter,
    # XLA adds bf16 in fp32 and rounds once, as PyTorch does.
    "reduce_sum": lambda x, *, axes, **_: torch.sum(x, axes, dtype=x.dtype),
    "reduce_prod": lambda x, *, axes, **_: functools.reduce(torch.prod, sorted(axes)[::-1], x),
    "reduce_max": lambda x, *, axes, **_: torch.amax(x, axes),
    "reduce_min": lambda x, *, axes, **_: torch.amin(x, axes),
    "reduce_or": lambda x, *, axes, **_: torch.any(x, axes),
    # Of types that glue lacks, such as float8_e4m3fn.
    "convert_element_type": lambda x, *, out, **_: x.to(out),
    "bitcast_convert_type": lambda x, *, out, **_: x.view(out),
    "rev": lambda x, *, dimensions, **_: x.flip(dimensions),
    "cumsum": lambda x, *, axis, reverse, **_: (
        x.flip(turn := (axis,) * reverse).cumsum(axis, dtype=x.dtype).flip(turn)
    ),
}  # fmt: skip


def _bind(device: int) -> None:
    """Makes the device's CUDA context current in this thread.

    Mosaic takes the driver's current context.  A new thread, such as autograd's, has none until the
    CUDA runtime needs one: neither torch.cuda.device(0) nor memory from PyTorch's cache does.
    """
    torch.cuda.mem_get_info(device)
    _bound.devices = {device, *getattr(_bound, "devices", ())}


class Runner:
    """A plan ready to run on one device: runner(tensors) -> list of tensors."""

    def __init__(self, name: str, plan: Plan, device: torch.device, own: int | None = None):
        """own: the op's outputs come first; what follows is for its backward pass.

        A kernel may leave parts of these arrays undefined.  As results of an operator they begin
        with zeros, so that equal calls have equal results (own=None: all is left as it is).
        """
        self.name, self.plan, self.device = name, plan, device
        zeros = () if own is None else plan.outputs[own:]
        make = lambda slot: torch.zeros if slot in zeros else torch.empty
        of = ((slot, plan.arrays[slot]) for slot in plan.made)
        self.made = [(make(slot), slot, x.shape, getattr(torch, x.dtype)) for slot, x in of]
        self.units: list[tuple] | None = None

    def _prepare(self) -> list[tuple]:
        """Makes the constants, and what __call__ needs of each unit."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self.name}: call it once before the capture of a CUDA graph")
        # In a new thread: these outlive this call, and may come neither from a CUDA graph's pool of
        # memory nor be inference tensors, both of which belong to a thread.
        with ThreadPoolExecutor(1) as thread:
            self.constants = list(thread.map(lambda x: tensor(x, self.device), self.plan.constants))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # other streams read them, too
        self.units = list(map(self._unit, self.plan.units))
        return self.units

    def _unit(self, unit: Unit) -> tuple:
        what, slots = unit.what, unit.slots
        if isinstance(what, ProgramStep):
            if what.primitive not in _OPERATORS:
                raise NotImplementedError(f"{what.primitive} has no form in PyTorch")
            out = getattr(torch, self.plan.arrays[slots[0]].dtype)
            return functools.partial(_OPERATORS[what.primitive], out=out, **what.params), None, unit
        start: Any = launch.glue_launcher if isinstance(what, Glue) else launch.launcher
        addresses = itemgetter(*slots, slots[0])  # and room for one more
        return start(what, self.device.index), addresses, unit

    def __call__(self, tensors) -> list[torch.Tensor]:
        plan, device, stream = self.plan, self.device, 0
        index = device.index
        if index is not None:
            if index != torch._C._cuda_getDevice():
                with torch.cuda.device(index):
                    return self(tensors)
            if index not in getattr(_bound, "devices", ()):
                _bind(index)
            stream = torch._C._cuda_getCurrentRawStream(index)
        units = self.units or self._prepare()
        held: list[Any] = [*tensors, *self.constants]
        at: list[Any] = []
        for i, x in enumerate(held):
            place = x.data_ptr()
            if place % _ALIGNMENT or not x.is_contiguous():
                x = held[i] = _copy(self.name, x)
                place = x.data_ptr()
            at.append(place)
        for each in (held, at):
            each += [None] * (len(plan.arrays) - len(each))
        if plan.size:
            shared = torch.empty(plan.size, dtype=torch.uint8, device=device)
            base = shared.data_ptr()
            for slot, offset in plan.shared.items():
                at[slot] = base + offset
        for make, slot, shape, kind in self.made:
            x = held[slot] = make(shape, dtype=kind, device=device)
            at[slot] = x.data_ptr()
        for start, chosen, unit in units:
            if chosen is None:
                self._operate(start, unit, held, at)
            else:
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
            held[slot] = x = x.reshape(self.plan.arrays[slot].shape).contiguous()
            at[slot] = x.data_ptr()


def _copy(name: str, x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of an input; the first one of this op is said."""
    if name not in _said:
        _said.add(name)
        what = f"an input {tuple(x.shape)} with strides {x.stride()}"
        log.warning("%s copies %s: make it contiguous", name, what)
    return x.clone(memory_format=torch.contiguous_format)
