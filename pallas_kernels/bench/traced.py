"""Reads our kernels from a traced program: their blocks, buffers and launches."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxprs_in_params

_SMEM = 227 * 1024  # of an SM, for blocks
_THREADS = 2048  # of an SM
_PASSES = "kernel_guard", "optimization_barrier", "reshape", "get"  # return their arguments' arrays


class TracedKernel(NamedTuple):
    """A kernel of a traced program, and how often it is launched."""

    name: str
    blocks: int
    warpgroups: int
    shared: int  # bytes of a block's buffers in shared memory, before the compiler aligns them
    tiles: tuple[str, ...]  # these buffers as they lie there: wgmma's are split into (8, 64)
    arrays: int  # bytes of its arguments and results
    launches: int

    @property
    def at_once(self) -> int:
        """Blocks that fit an SM by shared memory and threads; registers may allow fewer."""
        return max(1, min(_SMEM // max(self.shared, 1), _THREADS // (128 * self.warpgroups)))

    def __str__(self) -> str:
        many = f" x {self.launches}" if self.launches > 1 else ""
        counted = lambda n, what: f"{n} {what}{'s' * (n != 1)}"
        return (
            f"{self.name}{many}: {counted(self.blocks, 'block')} of"
            f" {counted(self.warpgroups, 'warpgroup')}, {self.shared / 1024:.0f} KB of shared"
            f" memory (at most {self.at_once} on an SM), arrays of {size_text(self.arrays)}"
        )


def kernels_of(jaxpr, launches: int = 1, given: Sequence[int] = ()) -> list[TracedKernel]:
    """The Mosaic kernels of a traced program, in its order.

    given: numbers of the program's arguments; equal ones are the same array, as an array that holds
    q, k and v is three arguments of a kernel.
    """
    found, numbers = {}, dict(zip(map(id, jaxpr.invars), given, strict=False))
    number = lambda v: numbers.get(id(v), id(v))
    for eqn in jaxpr.eqns:
        taken = [number(v) for v in eqn.invars]
        if eqn.primitive.name in _PASSES:
            numbers |= zip(map(id, eqn.outvars), taken, strict=False)
        if eqn.primitive.name == "mpmd_map":
            arrays = dict(zip(taken, eqn.invars, strict=True))
            new = [_kernel(eqn, launches, [*arrays.values(), *eqn.outvars])]
        else:
            times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            new = []
            for sub in jaxprs_in_params(eqn.params):
                own = taken if len(sub.invars) == len(taken) else ()
                new += kernels_of(sub, launches * times, own)
        for kernel in new:
            same = found.get(kernel._replace(launches=0))
            total = kernel.launches + (same.launches if same else 0)
            found[kernel._replace(launches=0)] = kernel._replace(launches=total)
    return list(found.values())


def _kernel(eqn, launches: int, arrays: list) -> TracedKernel:
    mesh, inside = eqn.params["meshes"][0], eqn.params["jaxprs"][0]
    buffers = _buffers(inside)
    aligned = lambda a: _size(a) + -_size(a) % 1024 if _is_data(a) else _size(a)
    shared = sum(map(aligned, buffers))
    if _reduces(inside):
        parameters = eqn.params["compiler_params"] or plgpu.CompilerParams()
        shared += parameters.reduction_scratch_bytes
    return TracedKernel(
        eqn.params["name"],
        blocks=math.prod(mesh.grid),
        warpgroups=mesh.num_threads or 1,
        shared=shared,
        tiles=tuple(f"{a.dtype}{list(a.shape)}" for a in buffers for a in _tiles(a)),
        arrays=sum(_size(v.aval) for v in arrays),
        launches=launches,
    )


def _buffers(jaxpr, allocates: bool = True) -> list:
    """The buffers and barriers that a kernel allocates in shared memory.

    allocates: whether the program's arguments are allocated for it, not buffers from outside.
    """
    own = [v.aval for v in jaxpr.invars if allocates]
    inner = [
        aval
        for eqn in jaxpr.eqns
        for sub in jaxprs_in_params(eqn.params)
        for aval in _buffers(sub, eqn.primitive.name == "run_scoped")
    ]
    return [aval for aval in own if str(aval.memory_space) == "smem"] + inner


def _reduces(jaxpr) -> bool:
    """Whether a kernel sums over an axis, for which the compiler may need shared memory."""
    return any(
        eqn.primitive.name.startswith("reduce_") or any(map(_reduces, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _tiles(aval) -> list:
    """The arrays of a buffer: none if it is a barrier, those of the first view if it is a union."""
    if not hasattr(aval, "refs"):
        return [aval] if _is_data(aval) else []
    return [getattr(view, "ref", view) for view in jax.tree.leaves(aval.refs[0])]


def _is_data(aval) -> bool:
    """Whether it is not a barrier."""
    return hasattr(aval.dtype, "itemsize")


def _size(aval) -> int:
    """Bytes of an array or of a buffer; a barrier has 8."""
    return math.prod(aval.shape) * (aval.dtype.itemsize if _is_data(aval) else 8)


def amount(n: float, units: dict[float, str]) -> str:
    """A number in the largest of the units that it reaches."""
    size = next((size for size in units if n >= size), min(units))
    return f"{n / size:.1f} {units[size]}"


def size_text(n: float) -> str:
    return amount(n, {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "KB"})
