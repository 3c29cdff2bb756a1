"""The kernel of gelu and swiglu: an elementwise function of arrays of one shape.

The arrays are flattened, and copied if their size is no multiple of `_BLOCK`.  A block of 128
threads loads `_BLOCK` consecutive elements of each, computes in float32, and stores the results.
Threads share nothing, so only the bytes in flight matter: the fewer instructions an element takes,
the closer the kernel comes to a plain copy.
"""

import functools

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

# 1024 to 8192 elements are within 1% on an H100; loops and TMA are slower (docs/performance.md).
_BLOCK = 4096  # 128 threads x 4 vectors of 8


def why_not(**arrays) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    return (
        mosaic.mixed_dtypes(**arrays)
        or mosaic.unsupported_dtype(**arrays)
        or mosaic.empty(**arrays)
    )


def why_slower(x, *others) -> str | None:
    """Why XLA's form is faster, or None: generation takes as long as it has kernels."""
    if x.size % _BLOCK:
        return f"the kernel would pad {x.size} elements to a multiple of {_BLOCK}"
    few = x.ndim > 0 and x.size <= 64 * x.shape[-1]
    return "XLA fuses 64 rows or fewer with other ops" if few else None


@functools.partial(jax.jit, static_argnames=("tile", "name", "outputs"))  # lowered once per shape
def elementwise(tile, *arrays, name, outputs=1):
    """Applies tile(*blocks) -> tuple of `outputs` blocks, in float32, to whole arrays.

    The arrays have one shape and dtype, and so have the results, a tuple.
    """
    x = arrays[0]
    flat = [mosaic.pad_axis(a.reshape(a.size), 0, _BLOCK).reshape(-1, _BLOCK) for a in arrays]
    (results,) = mosaic.kernel(
        functools.partial(_body, tile),
        name=name,
        out_type=[[jax.ShapeDtypeStruct(flat[0].shape, x.dtype)] * outputs],
        **mosaic.grid(block=len(flat[0])),
        # approx_math computes exp in two instructions, not seven; 16-bit results hide its error.
        compiler_params=plgpu.CompilerParams(approx_math=x.dtype.itemsize == 2),
    )(flat)
    return tuple(y.reshape(y.size)[: x.size].reshape(x.shape) for y in results)


def _body(tile, sources, targets):
    """A block loads its elements of every source, computes, and stores to every target."""
    layout = plgpu.Layout.WG_STRIDED((_BLOCK,), 16 // sources[0].dtype.itemsize)  # 16-byte loads
    block = lax.axis_index("block")
    results = tile(*(mosaic.load(ref.at[block], layout) for ref in sources))
    for ref, result in zip(targets, results, strict=True):
        mosaic.store(ref.at[block], result)
