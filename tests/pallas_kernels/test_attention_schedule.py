"""Which tiles a block of attention visits, and which block works on what."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import BF16, packed
from cases import slow
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import (
    backward_dkv,
    backward_dq,
    forward,
    masks,
    schedule,
)
from pallas_kernels.flash_attention.masks import Visits

# ---- visited tiles ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 40, 64, 100])
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(("t", "s", "size"), [(300, 300, 64), (130, 391, 128), (257, 300, 32)])
def test_visited_tiles_are_those_with_something_to_see(t, s, size, by_keys, window):
    q, k = np.arange(t)[:, None] + (s - t), np.arange(s)
    seen = (q >= k) & (window is None or q - k < window)
    seen = seen.T if by_keys else seen
    visits = Visits((t, s), True, window, size, by_keys)
    tiles = np.pad(seen, ((0, 0), (0, -seen.shape[1] % size))).reshape(len(seen), -1, size)
    real = np.pad(np.ones_like(seen[0]), (0, -seen.shape[1] % size)).reshape(-1, size)
    assert visits.tiles == tiles.shape[1]
    for first in range(0, len(seen), 64):
        block = tiles[first : first + 64]
        low, high = visits.seen(first, first + 64, 0, visits.tiles)
        some = np.nonzero(block.any((0, 2)))[0]
        if not some.size:  # no query sees these keys: one tile is visited, fully masked
            assert high == low + 1
            continue
        # Rows past the end count like the others, so one tile too many may be visited at the end.
        assert low <= some[0] <= some[-1] < high
        if first + 64 <= len(seen):
            assert (low, high) == (some[0], some[-1] + 1)
        low, high = visits.whole(first, first + 64, int(low), int(high))
        whole = [i for i in range(visits.tiles) if (block[:, i] | ~real[i]).all() and real[i].all()]
        if first + 64 <= len(seen):
            assert [i for i in range(low, high) if real[i].all()] == whole


def test_tiles_of_other_segments_are_left_out():
    rows, columns = packed([128, 256], length=300), packed([128, 256], length=384)
    visits = Visits((300, 384), False, None, 128)
    segment_spans = jax.jit(masks.segment_spans, static_argnums=(2, 3, 4))
    spans = segment_spans(rows, columns, visits, 64, 64)
    own = [[0, 1, 0, 1], [0, 1, 0, 1], [1, 2, 1, 2], [1, 2, 1, 2], [2, 3, 2, 3]]
    np.testing.assert_array_equal(spans, [own])
    spans = segment_spans(rows, packed([120, 290], length=384), visits, 64, 64)  # edges in tiles
    np.testing.assert_array_equal(spans[0, :, :2], [[0, 1], [0, 1], [0, 3], [0, 3], [2, 3]])
    np.testing.assert_array_equal(spans[0, :, 2] < spans[0, :, 3], [0, 0, 1, 1, 0])
    spans = segment_spans(rows + 5, columns, visits, 64, 64)  # without a common id: one tile
    np.testing.assert_array_equal(spans[0, :, 1] - spans[0, :, 0], 1)
    shuffled = jnp.asarray([[0] * 128 + [1] * 128 + [0] * 128])  # another segment in between
    spans = segment_spans(rows[:, :64], shuffled, Visits((64, 384), False, None, 128), 64, 64)
    np.testing.assert_array_equal(spans[0, 0, :2], [0, 3])
    assert spans[0, 0, 2] >= spans[0, 0, 3]


@pytest.mark.parametrize(
    ("window", "by_keys"), [(None, True), (100, False), slow(None, False), slow(100, True)]
)
def test_each_part_of_a_block_sees_its_own_tiles(window, by_keys):
    """Parts with another document than the rest of their block computed all of its tiles."""
    visits = Visits((500, 500), True, window, 128, by_keys)
    ids, lead = packed([130, 200, 420], length=500), 0 if by_keys else 64
    spans = np.asarray(masks.segment_spans(ids, ids, visits, 192, 64, lead)[0])
    assert len(spans) == 9
    q, k = np.arange(500)[:, None], np.arange(500)
    seen = (q >= k) & (window is None or q - k < window) & (ids[0][:, None] == ids[0])
    for i, (first, end, low, high) in enumerate(spans):
        rows = slice(max(i * 64 - lead, 0), max(i * 64 - lead + 64, 0))
        visible = (seen.T if by_keys else seen)[rows]
        if not visible.any():  # no such rows: one tile
            assert end == first + 1
            continue
        tiles = np.nonzero(visible.any(0))[0] // 128
        assert (first, end) == (tiles[0], tiles[-1] + 1)
        assert visible[:, low * 128 : high * 128].all() or low >= high


@pytest.mark.parametrize("nowhere", [0, 1, 2])
def test_rows_that_see_nothing_make_a_block_no_longer(nowhere):
    ids = np.repeat([3, 4, 5], 64)
    ids[nowhere * 64 : nowhere * 64 + 64] = 9
    keys = np.repeat([0, 3, 4, 5, 1], [640, 64, 64, 64, 192])
    q, k = (jax.ShapeDtypeStruct((1, n, 1, 64), BF16) for n in (192, 1024))
    tiles, call = schedule.Tiles(3, 64, 4, False, 16), schedule.Call(False, 1.0, None, None, True)
    s = schedule.schedule_of(q, k, tiles, call)
    spans = masks.segment_spans(ids[None], keys[None], s.visits, s.block, s.part, s.lead)
    others = {0: (11, 13), 1: (10, 13), 2: (10, 12)}
    assert s.range_of_block(0, 0, spans) == others[nowhere]


# ---- schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize(("pairs", "section"), [(128, 16), (24, 12), (13, 13), (58, 2)])
def test_sections_are_equal_and_each_block_is_worked_on_once(pairs, section):
    q = jax.ShapeDtypeStruct((1, 2048, pairs, 96), BF16)  # 0.75 MiB of K and V for each head
    call = schedule.Call(True, 1.0, None, None)
    tiles = schedule.Tiles(2, 128, 3, False, 16)
    s = schedule.schedule_of(q, q, tiles, call)
    row, (_, head) = jax.vmap(s.where)(jnp.arange(s.items))
    assert len(set(zip(row.tolist(), head.tolist(), strict=True))) == s.items == 16 * pairs
    np.testing.assert_array_equal(row[: 2 * section], np.repeat([15 * 128, 14 * 128], section))
    np.testing.assert_array_equal(head[: 11 * pairs : 11 * section], np.arange(0, pairs, section))
    # The shortest third comes last, of all pairs.
    np.testing.assert_array_equal(row[11 * pairs :], np.repeat(np.arange(4, -1, -1) * 128, pairs))


# ---- shared memory ---------------------------------------------------------------------------


def bytes_of(memory) -> int:
    match memory:
        case dict():
            return sum(map(bytes_of, memory.values()))
        case plgpu.Barrier():
            return 8 * math.prod(np.atleast_1d(memory.num_barriers))
        case plgpu.RefUnion():
            sizes = set(map(bytes_of, memory.refs))
            assert len(sizes) == 1  # the same bytes as tiles and as rows
            return sizes.pop()
        case list():
            return sum(map(bytes_of, memory))
        case None:
            return 0
    # Pallas aligns every array to 1 KiB.
    return mosaic.cdiv(math.prod(memory.shape) * jnp.dtype(memory.dtype).itemsize, 1024) * 1024


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("t", [4096, 4090])
@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dimension_fits_into_shared_memory(monkeypatch, d, t, segmented):
    monkeypatch.setattr(mosaic, "sm_count", lambda: 132)  # long calls, with several items a block
    rows = functools.partial(backward_dq.scratch, has_dlse=True)
    for kv_heads, softcap in ((8, None), (8, 30.0), (32, None)):
        q, k = (jax.ShapeDtypeStruct((4, t, heads, d), BF16) for heads in (32, kv_heads))
        call = schedule.Call(True, 1.0, None, softcap, segmented)
        width = sum(schedule.blocks_of(q, k))
        of_keys = backward_dkv.tiles(width, 32 // kv_heads, softcap)
        for tiles, scratch, by_keys in (
            (forward.tiles(width, t, call), forward.scratch, False),
            (backward_dq.tiles(width, segmented), rows, False),
            (of_keys, backward_dkv.scratch, True),
        ):
            s = schedule.schedule_of(q, k, tiles, call, by_keys)
            memory = scratch(s)
            ids = [x for name, x in memory.items() if name.endswith("ids") and x is not None]
            assert all(x.shape[1] % 32 == 0 for x in ids)  # TMA copies to multiples of 128 bytes
            taken = bytes_of(memory) + bytes_of(s.numbers())
            assert taken <= 227 * 1024  # a block's share
