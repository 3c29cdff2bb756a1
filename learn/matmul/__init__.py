"""The ladder of a matmul on Hopper (README.md)."""

import jax.numpy as jnp

from learn.ladder import CYCLES, MATMUL, SMS, Ladder, like, normal
from learn.layer_norm import loads

STEP_WGMMA = 128 * 128 * 64 * 2 / (MATMUL / SMS)  # microseconds of a step of 128 x 128 x 64


def inputs(sizes):
    rows, columns, depth = (sizes[axis] for axis in ("rows", "columns", "depth"))
    shapes = (rows, depth), (columns, depth), (rows, columns)
    return tuple(normal(i, shape, jnp.bfloat16) for i, shape in enumerate(shapes))


def reference(a, b, d):
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return (jnp.matmul(a, b.T, preferred_element_type=wide) + d.astype(wide)).astype(d.dtype)


def _flops(sizes):
    return 2 * sizes["rows"] * sizes["columns"] * sizes["depth"]


def _bytes(sizes):
    rows, columns, depth = sizes["rows"], sizes["columns"], sizes["depth"]
    return 2 * (rows * depth + columns * depth + 2 * rows * columns)


def _outer_products(sizes):
    return _flops(sizes) / 2 / 4096 / (7 * SMS) * 0.3  # each step waits for the L2 cache


def _shared_tiles(sizes):
    return _flops(sizes) / 2 / 4096 * 40 / SMS / CYCLES  # each step reads shared memory


def _one_after_the_other(microseconds):
    """Two blocks on an SM, each with steps of so many microseconds."""
    return lambda sizes: _flops(sizes) / (2 * 128 * 128 * 64) / (2 * SMS) * microseconds


def _tiles(height, gap):
    """Tiles of height x 128, with so many microseconds between them without products."""

    def counted(sizes):
        tiles = sizes["rows"] * sizes["columns"] / (height * 128)
        return _flops(sizes) / MATMUL + tiles / SMS * gap

    return counted


def lines_from_memory(book, a, b, d):
    """The loads of a and b take whole lines, or TMA does it."""
    of_ab = [e for e in loads(book) if e.array in (like(a), like(b))]
    wanted, done = sum(e.bytes for e in of_ab) / 64, sum(e.requests for e in of_ab)
    if done > wanted:
        return f"the warps make {done} requests for a and b where {wanted:.0f} would do"


def tensor_core(book, a, b, d):
    """The products come from wgmma."""
    done = sum(e.count for e in book.events if e.kind == "wgmma")
    wanted = a.shape[0] * b.shape[0] * a.shape[1]
    if done < wanted:
        return f"wgmma does {done} of {wanted} multiply-adds"


def by_tma(book, a, b, d):
    """a and b come by TMA."""
    loaded = [e for e in loads(book) if e.array in (like(a), like(b))]
    return tensor_core(book, a, b, d) or (f"threads load {loaded[0].buffer}" if loaded else None)


def copies_ahead(book, a, b, d):
    """When a warpgroup waits for a stage, copies of later ones are under way."""
    started, waited, alone = 0, 0, 0
    own = [e for e in book.events if e.block == book.events[0].block and e.wg == book.events[0].wg]
    for e in own:
        started += e.kind == "copy in"
        if e.kind == "wait":
            waited += 1
            alone += started <= 2 * waited
    complaint = by_tma(book, a, b, d)
    if not complaint and alone > 1:  # nothing follows the last step
        complaint = f"in {alone} of {waited} steps the block waits for the only copies under way"
    return complaint


LADDER = Ladder(
    name="matmul",
    reference=reference,
    inputs=inputs,
    sizes=({"rows": 8192, "columns": 8192, "depth": 2048},),
    small={"rows": 128, "columns": 128, "depth": 192},
    again={"rows": 256, "columns": 256, "depth": 320},
    bytes=_bytes,
    flops=_flops,
    counted=(
        _outer_products,
        _shared_tiles,
        _one_after_the_other(1.5),
        _one_after_the_other(1 + STEP_WGMMA),
        _tiles(128, 0.5),
        _tiles(256, 3),
        _tiles(256, 2),
        lambda sizes: _flops(sizes) / MATMUL * 1.02,
    ),
    bandwidth=100,  # most tiles come from the L2 cache
    properties={2: lines_from_memory, 3: tensor_core, 4: by_tma, 5: copies_ahead},
)
