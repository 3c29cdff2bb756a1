"""What a query sees: the tiles that a block visits, the mask inside a tile, the online softmax.

A block owns rows (of queries; in the dK/dV kernel of keys) and tiles of columns stream past it.  It
visits one range of tiles and never loads the others.  Inside this range lies another one, of tiles
fully visible to every row, which need no mask.  Queries 192 to 255, window 128, 64-key tiles:

    tile 0      tile 1         tile 2         tile 3             tile 4
    not loaded  window's edge  seen whole     diagonal: masked   not loaded
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS

LOWEST = -3e38  # the running maximum before any key: finite, because -inf - (-inf) is NaN
LEAST_SCALE = 1e-30  # the kernels multiply masked logits by the scale, and divide lse by it


def check(q, k, v, causal, window):
    """Raises ValueError for shapes or options that contradict each other."""
    mosaic.check_axes("B T H D", q=q)
    mosaic.check_axes("B S K D", k=k, v=v)
    (b, t, h, d), (bk, s, kv, dk) = q.shape, k.shape
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}: they must be equal")
    if (b, d) != (bk, dk):
        raise ValueError(f"q has shape {q.shape} and k {k.shape}: B and D must be equal")
    if not kv or h % kv:
        raise ValueError(f"H={h} query heads are not a multiple of K={kv} kv heads")
    if causal and t > s:
        fix = "pass fewer queries, or causal=False to attention"  # decode_attention has no causal
        raise ValueError(f"T={t} is more than S={s} keys: {fix}")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window={window} needs {'at least 1 key' if causal else 'causal=True'}")


def scale_of(scale: float | None, q) -> float:
    """The factor of the logits."""
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale


class Visits(NamedTuple):
    """Which tiles of columns the rows of a kernel visit."""

    lengths: tuple[int, int]  # T and S
    causal: bool
    window: int | None
    size: int  # columns of a tile
    by_keys: bool = False  # rows are keys and columns queries, not the other way round

    @property
    def offset(self) -> int:
        """Query i stands at position i + offset of the keys."""
        t, s = self.lengths
        return s - t

    @property
    def rows(self) -> int:
        """Rows of a pair (batch, head): T, or S by keys."""
        return self.lengths[1 if self.by_keys else 0]

    @property
    def tiles(self) -> int:
        """Number of tiles of columns."""
        return mosaic.cdiv(self.lengths[0 if self.by_keys else 1], self.size)

    @property
    def ragged(self) -> bool:
        """Whether keys are the columns and the last tile of keys is not full."""
        return not self.by_keys and self.lengths[1] % self.size != 0

    @property
    def diagonal_crosses_tiles(self) -> bool:
        """Whether the diagonal of a warpgroup's rows may cross a second tile."""
        return self.causal and bool(self.offset % ROWS or self.size % ROWS)

    def columns(self, row):
        """(first column that a row sees, column after its last); None where nothing limits it."""
        causal, window, offset = self.causal, self.window, self.offset
        if self.by_keys:
            return row - offset if causal else None, window and row + window - offset
        return window and row + offset - window + 1, row + offset + 1 if causal else None

    def seen(self, first, end, low, high):
        """(first, end) of the tiles, out of low ... high - 1, that these rows see: one at least."""
        start, stop = self.columns(first)[0], self.columns(end - 1)[1]
        if start is not None:
            low = jnp.clip(start // self.size, low, high - 1)
        if stop is not None:
            high = jnp.clip((stop + self.size - 1) // self.size, low + 1, high)
        return low, high

    def whole(self, first, end, low, high):
        """(first, end) of the tiles fully visible to all of these rows; first >= end: none."""
        start, stop = self.columns(end - 1)[0], self.columns(first)[1]
        if start is not None:
            low = jnp.maximum(low, (start + self.size - 1) // self.size)
        if stop is not None:
            high = jnp.minimum(high, stop // self.size)
        return low, high


def some_rows_see_nothing(window: int | None, segmented: bool, rows: int = ROWS) -> bool:
    """Whether one of `rows` aligned rows may see no key: by segments, or past T by the window."""
    return segmented or (window is not None and window < rows)


def segment_spans(rows, columns, visits: Visits, block: int, part: int, lead: int = 0):
    """For each part of a block's rows (first, end, whole_first, whole_end): (B, parts, 4) int32.

    Tiles first ... end - 1 may hold columns that the part's rows see, judged by the ranges of their
    ids: exact where documents are packed one after the other, never too narrow, and at least one
    tile.  Tiles whole_first ... whole_end - 1 hold only one segment, to which all of the rows
    belong, and need no mask.
    rows, columns: ids, (B, n) int32.  lead: rows of the first block that do not exist.
    """

    def ranges(ids, before, after, size):
        ids = jnp.pad(ids, ((0, 0), (before, after)), "edge").reshape(len(ids), -1, size)
        return jnp.min(ids, axis=2)[:, :, None], jnp.max(ids, axis=2)[:, :, None]

    n, m = reversed(visits.lengths) if visits.by_keys else visits.lengths
    low, high = ranges(rows[:, :n], lead, -(n + lead) % block, part)
    least, most = (x.mT for x in ranges(columns[:, :m], 0, -m % visits.size, visits.size))
    meet = (low <= most) & (high >= least)
    same = (low == most) & (high == least) & (low == high)
    places = jnp.arange(1, visits.tiles + 1)
    first_of = lambda x: jnp.min(jnp.where(x, places - 1, visits.tiles), axis=2)
    end_of = lambda x: jnp.max(jnp.where(x, places, 0), axis=2)
    (start, stop), (first, end) = ((first_of(x), end_of(x)) for x in (meet, same))
    # A part that meets no tile takes one that another part of its block sees.
    last = jnp.max(stop.reshape(len(stop), -1, block // part), axis=2) - 1
    start = jnp.minimum(start, jnp.repeat(jnp.maximum(last, 0), block // part, axis=1))
    row = jnp.arange(low.shape[1]) * part - lead
    own = visits.seen(row, row + part, start, jnp.maximum(stop, start + 1))
    # If tiles of other segments lie between them (ids are not sorted), no tile counts as whole.
    whole = visits.whole(row, row + part, first, jnp.where(same.sum(2) == end - first, end, 0))
    return jnp.stack([*own, *whole], axis=2).astype(jnp.int32)


def logits(s, scale, softcap):
    """Scores -> (logits in base 2, d logits / d (scale s) or None for 1)."""
    if softcap is None:
        return s * (scale * LOG2E), None
    # tanh of the hardware is good to 2^-11, which is 0.02 in logits of 50.
    tanh = 1 - 2 / (1 + jnp.exp2(s * (2 * LOG2E * scale / softcap)))
    return tanh * (softcap * LOG2E), 1 - tanh * tanh


def d_scores(p, dp, slope):
    """dS = P dp slope.  dp: dP - delta; slope: from `logits`, None for 1."""
    return p * dp if slope is None else p * dp * slope


def no_keys(rows: int):
    """The largest logit and the sum of each row before any key."""
    row = lambda value: plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROW)
    return row(LOWEST), row(0)


def online_softmax(x, m, l):
    """(weights, m', l', alpha) of logits x in base 2.

    m, l, m', l': the largest logit and the sum of each row before x and with it.  alpha: the factor
    that rescales earlier sums.
    """
    x = lax.optimization_barrier(x)  # rounded as its maximum is (forward.factor_of says why)
    m_new = jnp.maximum(m, jnp.max(x, axis=1))
    alpha, p = jnp.exp2(m - m_new), jnp.exp2(x - mosaic.along(m_new, x.shape, 0))
    return p, m_new, l * alpha + jnp.sum(p, axis=1), alpha


def finish(o, m, l, *, blind: bool):
    """(O divided by l, lse).  blind: rows may see no key (O = 0, lse = -inf)."""
    inverse = 1 / l
    if blind:
        inverse = jnp.where(l == 0, 0, inverse)  # NaN stays
    return o * mosaic.along(inverse, o.shape, 0), m * (1 / LOG2E) + jnp.log(l)


def visible(x, visits: Visits, row, column, ids=None, first=True):
    """Scores x with -inf where a query may not see a key.

    row, column: the numbers of x's first row and first column.  ids: (the rows' ids, the columns'
    ids), or None without segments.  first: whether this is the first tile of a warpgroup's rows.
    """
    # Broadcast from one number per row or column: one per element would take a register each.
    along = lambda numbers, axis: mosaic.along(numbers, x.shape, axis)

    def places(start, axis):
        layout = COL if axis else ROW
        iota = plgpu.broadcasted_iota(jnp.int32, (x.shape[axis],), 0, layout=layout)
        return along(start + iota, axis)

    if ids is not None:
        x = jnp.where(along(ids[0], 0) == along(ids[1], 1), x, -jnp.inf)
    at_edge = first or visits.diagonal_crosses_tiles or visits.window
    q, k = ((column, 1), (row, 0)) if visits.by_keys else ((row, 0), (column, 1))
    q = q[0] + visits.offset, q[1]
    if visits.ragged and at_edge:
        x = jnp.where(places(*k) < visits.lengths[1], x, -jnp.inf)
    if not (visits.causal and at_edge):  # a window needs causal
        return x
    q, k = places(*q), places(*k)
    x = jnp.where(q >= k, x, -jnp.inf)
    return x if visits.window is None else jnp.where(q - k < visits.window, x, -jnp.inf)
