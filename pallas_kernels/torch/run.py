"""Runs a plan with PyTorch: its memory, its current stream, its operators for what is no launch."""

import logging
import threading
from array import array
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from pallas_kernels.torch import launch
from pallas_kernels.torch.plan import Plan
from pallas_kernels.torch.program import Array, Step

log = logging.getLogger("pallas_kernels")
_ALIGNMENT = 16  # bytes; TMA needs it, as do the vector loads


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


# ---- primitives that are no glue -----------------------------------------------------------------


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


_REDUCE = {
    # XLA adds bf16 in fp32 and rounds once, as PyTorch does.
    "reduce_sum": lambda x, axes: torch.sum(x, axes, dtype=x.dtype),
    "reduce_max": torch.amax, "reduce_min": torch.amin, "reduce_and": torch.all,
    "reduce_or": torch.any,
}  # fmt: skip
_CUMULATIVE = {
    "cumsum": lambda x, axis: torch.cumsum(x, axis, dtype=x.dtype),
    "cummax": lambda x, axis: torch.cummax(x, axis).values,
}


def operator(step: Step, out: Array) -> Callable:
    """A step as a function of tensors: one result, or a list of them."""
    name, params = step.primitive, step.params
    if name == "dot_general":
        return _dot_general(**params, out=dtype(out.dtype))
    if name in _REDUCE:
        return lambda x: _REDUCE[name](x, tuple(params["axes"]))
    if name in _CUMULATIVE:
        axis, function = params["axis"], _CUMULATIVE[name]
        if params["reverse"]:
            return lambda x: function(x.flip(axis), axis).flip(axis)
        return lambda x: function(x, axis)
    if name in ("sort", "scatter"):
        return {"sort": _sort, "scatter": _scatter}[name](**params)
    if name == "convert_element_type":  # of types that glue lacks, such as float8_e4m3fn
        return lambda x: x.to(dtype(out.dtype))
    raise NotImplementedError(f"{name} has no form in PyTorch")


# ---- a plan --------------------------------------------------------------------------------------


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


class Runner:
    """A plan ready to run: runner(tensors) -> list of tensors, all on one device."""

    def __init__(self, name: str, plan: Plan, own: int | None = None):
        """own: the op's outputs come first; what follows is for its backward pass.

        A kernel may leave parts of these arrays undefined.  As results of an operator they begin
        with zeros, so that equal calls have equal results (own=None: all is left as it is).
        """
        self.name, self.plan = name, plan
        self.zeros = frozenset(() if own is None else plan.outputs[own:])
        self.ready: dict[torch.device, tuple] = {}

    def _prepare(self, device) -> tuple:
        """Addresses of the constants and the units for a device, and what owns the memory."""
        constants: list[torch.Tensor] = []
        # In a new thread: these outlive this call, and may come neither from a CUDA graph's pool of
        # memory nor be inference tensors, both of which belong to a thread.
        thread = threading.Thread(target=self._constants, args=(device, constants))
        thread.start()
        thread.join()
        return (
            constants,
            [x.data_ptr() for x in constants],
            list(map(self._unit(device), self.plan.units)),
        )

    def _constants(self, device, made: list) -> None:
        first = len(self.plan.inputs)
        for n, x in enumerate(self.plan.constants):
            wide = x.astype(np.float64 if x.dtype.kind in "fV" else x.dtype)
            kind = dtype(self.plan.slots[first + n].dtype)
            made.append(torch.tensor(wide, dtype=kind).to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams read them, too

    def _unit(self, device) -> Callable:
        inputs, slots = len(self.plan.inputs), self.plan.slots
        # An input may have another shape than the program's, which is a view of it.
        views = {
            i: (slot, x.shape if slot < inputs or x.shape != slots[slot].shape else None)
            for i, (slot, x) in self.plan.views.items()
        }

        def prepared(unit):
            what = unit.what
            made = tuple(
                (s, torch.zeros if s in self.zeros else torch.empty, slots[s].shape,
                 dtype(slots[s].dtype))
                for s in unit.made
            )  # fmt: skip
            if unit.arrays:
                compiled = launch.launcher if isinstance(what, Step) else launch.glue_launcher
                kernel = what.params if isinstance(what, Step) else what
                addresses = itemgetter(*unit.arrays, unit.arrays[0])  # and room for one more
                return compiled(kernel, device.index), made, addresses, len(unit.arrays), unit.dead
            run = operator(what, self.plan.views[what.outs[0]][1])
            return (
                None,
                run,
                [views[i] for i in what.ins],
                [views[i][0] for i in what.outs],
                unit.dead,
            )

        return prepared

    def __call__(self, tensors) -> list[torch.Tensor]:
        device, stream = tensors[0].device, 0
        index = device.index
        if index is not None:
            if index != torch._C._cuda_getDevice():
                with torch.cuda.device(index):
                    return self(tensors)
            bind(index)
            stream = torch._C._cuda_getCurrentRawStream(index)
        ready = self.ready.get(device)
        if ready is None:
            ready = self.ready[device] = self._prepare(device)
        constants, addresses, units = ready
        plan = self.plan
        held: list[Any] = [*tensors, *constants]
        for i, x in enumerate(tensors):
            if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
                held[i] = _copy(self.name, x)
        at = [x.data_ptr() for x in held[: len(tensors)]]
        rest = [0] * (len(plan.slots) - len(held))
        at += [*addresses, *rest]
        held += rest
        if plan.size:
            scratch = torch.empty(plan.size, dtype=torch.uint8, device=device)
            base = scratch.data_ptr()
            for slot, offset in plan.scratch:
                at[slot] = base + offset
        for start, made, chosen, count, dead in units:
            if start is None:
                self._operate(made, chosen, count, held, at)
            else:
                for slot, make, shape, kind in made:
                    x = held[slot] = make(shape, dtype=kind, device=device)
                    at[slot] = x.data_ptr()
                pointers = array("Q", chosen(at))
                begin = pointers.buffer_info()[0]
                pointers[-1] = begin
                start(begin, count, stream)
            for slot in dead:
                held[slot] = None
        return [held[i] for i in plan.outputs]

    def _operate(self, run, ins, outs, held, at) -> None:
        """One operator of PyTorch; its results get the shape of their slot."""
        results = run(*[held[i] if shape is None else held[i].view(shape) for i, shape in ins])
        results = results if isinstance(results, list) else [results]
        for slot, x in zip(outs, results, strict=True):
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
