"""The kernel under gelu and swiglu: one function of every element, over arrays of one shape.

The arrays are taken flat.  A block of 128 threads loads `_BLOCK` consecutive elements of each,
computes in float32, and stores.  Nothing is shared between threads, so the only question is how
many bytes are under way at once; the fewer instructions an element takes, the more memory decides.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

# TB/s on an H100 (its copy: 3.03) at 8192x14336, bfloat16, by the elements of a block:
#          gelu  its gradient  swiglu  its gradient
#   1024   3.02      3.09       3.06      3.03
#   2048   3.02      3.05       3.05      3.03
#   4096   3.02      3.07       3.07      3.04
#   8192   3.00      3.06       3.07      3.01
# A block that goes on to three more (2.93 to 2.99) and TMA pipelines (2.57 to 2.89) are slower: new
# blocks keep more loads under way than a loop does.
_BLOCK = 4096  # 128 threads x 4 vectors of 8


def why_not(**arrays) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    for name, x in arrays.items():
        if x.size >= 2**31:
            return f"{name} has {x.size} elements, the kernel counts to 2147483647"
    (first, x), *rest = arrays.items()
    for name, y in rest:
        if y.dtype != x.dtype:
            return f"{first} is {x.dtype} but {name} is {y.dtype}"
    return mosaic.unsupported_dtype(**arrays) or mosaic.empty(**arrays)


def sigmoid(z):
    """1 / (1 + exp(-z)) inside a kernel; no digits are lost in either tail."""
    return 1 / (1 + jnp.exp(-z))  # Mosaic's division of float32 is rcp.approx


def quick_sigmoid(z):
    """The same through rsqrt, 4 instructions fewer (division's guards), twice the rounding."""
    return jnp.square(lax.rsqrt(1 + jnp.exp(-z)))


@functools.partial(jax.jit, static_argnames=("tile", "name", "outputs"))  # lowered once per shape
def elementwise(tile, *arrays, name, outputs=1):
    """tile(*blocks) -> tuple of `outputs` blocks, in float32, over arrays of one shape and dtype.

    Returns a tuple of arrays of that shape and dtype.
    """
    x = arrays[0]
    layout = plgpu.Layout.WG_STRIDED((_BLOCK,), 16 // x.dtype.itemsize)  # 16 bytes a load
    whole, rest = divmod(x.size, _BLOCK)
    # Kernels do not check bounds, so what is left after the last whole block comes as padded
    # arrays of its own and is put in place afterwards: only the remainder is copied.
    flat = [a.reshape(-1) for a in arrays]
    ends = [mosaic.pad_axis(a[whole * _BLOCK :], 0, _BLOCK) for a in flat] if rest else []

    def block(sources, targets, where):
        results = tile(*(mosaic.load(r.at[where], layout) for r in sources))
        for ref, result in zip(targets, results, strict=True):
            mosaic.store(ref.at[where], result)

    def body(*refs):
        sources, targets = refs[: len(flat + ends)], refs[len(flat + ends) :]
        i = lax.axis_index("block")
        if not rest:
            block(sources, targets, pl.ds(i * _BLOCK, _BLOCK))
            return
        if whole:
            pl.when(i < whole)(
                lambda: block(sources[: len(flat)], targets[:outputs], pl.ds(i * _BLOCK, _BLOCK))
            )
        pl.when(i == whole)(
            lambda: block(sources[len(flat) :], targets[outputs:], pl.ds(0, _BLOCK))
        )

    body.__name__ = name
    results = mosaic.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((x.size,), x.dtype)] * outputs
        + [jax.ShapeDtypeStruct((_BLOCK,), x.dtype)] * (outputs if rest else 0),
        grid=(whole + bool(rest),),
        grid_names=("block",),
        # exp in two instructions in place of seven, flushing to zero, where 16 bits hide the error.
        compiler_params=plgpu.CompilerParams(approx_math=x.dtype.itemsize == 2),
    )(*flat, *ends)
    if rest:
        results = mosaic.put_ends(results, whole * _BLOCK, rest)
    return tuple(y.reshape(x.shape) for y in results)
