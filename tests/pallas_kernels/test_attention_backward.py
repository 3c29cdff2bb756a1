"""The backward kernels alone, fed by the reference's forward: windows, segments, softcap, D.

As in kernel_checks: errors against float64, beside those of the reference's gradient.
"""

import attention_interpreter  # before jax starts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import ON_GPU, assert_error_ratio, assert_lowers, kernels_run_here, normal

from pallas_kernels import mosaic
from pallas_kernels.attention import attention_reference
from pallas_kernels.attention.backward_masks_sm90 import segment_tiles
from pallas_kernels.attention.backward_sm90 import backward
from pallas_kernels.attention.forward_sm90 import sm_count, stat_rows

BF16, FP16 = jnp.bfloat16, jnp.float16
KERNELS = ("attention_backward_dq", "attention_backward_dkv")


def packed(cuts, length):
    """Ids of documents that end at `cuts`, one row for each batch entry."""
    at = np.arange(length)
    return jnp.asarray(np.stack([np.searchsorted(c, at, side="right") for c in cuts]), jnp.int32)


# Three warpgroups and a loader need 16 threads in the interpreter: D = 64 only where it has them.
NARROW = 64 if ON_GPU or attention_interpreter.ENOUGH_THREADS else 96
SMALL = [  # (B, T, S, H, K, D), dtype, options
    ((1, 72, 72, 2, 1, 96), FP16, {"softcap": 3.0}),
    ((1, 70, 137, 1, 1, 256), BF16, {}),
    ((1, 130, 300, 2, 1, NARROW), BF16, {"window": 90}),
    ((1, 190, 190, 1, 1, 128), BF16, {"segments": [[20, 150]], "window": 33}),
    ((2, 140, 140, 1, 1, NARROW), BF16, {"segments": [[40, 130], [139]]}),
]
LARGE = [
    ((2, 1000, 1000, 6, 2, 256), BF16, {}),
    ((2, 1000, 1000, 6, 2, 96), BF16, {"causal": False}),
    ((2, 1500, 1500, 6, 2, 64), BF16, {"window": 257}),
    ((2, 777, 1500, 6, 2, 128), BF16, {"window": 300}),
    ((2, 1500, 1500, 6, 2, 64), BF16, {"segments": [[100, 900], [1, 2, 3, 777]]}),
    ((2, 1500, 1500, 6, 2, 128), FP16, {"segments": [[100, 900], [1, 2, 3, 777]], "window": 128}),
    ((2, 1500, 1500, 6, 2, 128), BF16, {"softcap": 20.0}),
    ((1, 700, 700, 2, 1, 256), BF16, {"segments": [[333]], "softcap": 20.0}),
]


def run(arrays, lengths, options, dlse, segments, q_ids=None):
    """(dq, dk, dv) of the kernels, as attention calls them: padded to groups of 8 rows."""
    q, k, v, out, lse, dout = arrays
    t, s = lengths
    rows = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, stat_rows(t) - t)))
    q, k, v, out, dout = (mosaic.pad_axis(x, 1, 8) for x in (q, k, v, out, dout))
    static = dict(causal=True, scale=q.shape[-1] ** -0.5, sms=sm_count() if ON_GPU else 2)
    lse, dlse = rows(lse), rows(dlse)
    dq, dk, dv = backward(
        q, k, v, out, lse, dout, dlse, lengths=lengths, segments=segments, **(static | options)
    )
    return dq[:, :t], dk[:, :s], dv[:, :s]


def check(shape, dtype, options, ids=None):
    b, t, s, h, kv, d = shape
    q, dout = normal(0, (b, t, h, d), dtype), normal(3, (b, t, h, d), dtype)
    k, v = normal(1, (b, s, kv, d), dtype), normal(2, (b, s, kv, d), dtype)
    dlse = normal(4, (b, h, t))
    reference = lambda *a: attention_reference(*a, return_lse=True, segment_ids=ids, **options)
    out, lse = jax.jit(reference)(q, k, v)
    dlse = jnp.where(jnp.isfinite(lse), dlse, 0)

    @jax.jit
    def gradients(q, k, v, *cotangents):
        return jax.vjp(reference, q, k, v)[1](cotangents)

    expected = gradients(q, k, v, dout, dlse)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, dout, dlse)]
        truth = jax.tree.map(np.asarray, gradients(*wide))
    arrays = (q, k, v, out, lse, dout)
    f = lambda arrays, dlse, ids: run(arrays, (t, s), options, dlse, ids)
    assert_lowers(f, (arrays, dlse, ids), KERNELS)
    with kernels_run_here():
        actual = jax.block_until_ready(jax.jit(f)(arrays, dlse, ids))
        if ON_GPU:
            again = jax.jit(f)(arrays, dlse, ids)
            assert all(bool((x == y).all()) for x, y in zip(actual, again, strict=True))
    for name, *three in zip(("dq", "dk", "dv"), actual, expected, truth, strict=True):
        assert_error_ratio(*three, name)
    return actual


@pytest.mark.parametrize(("shape", "dtype", "options"), SMALL + LARGE * ON_GPU)
def test_gradients_match_float64(shape, dtype, options):
    options = dict(options)
    cuts = options.pop("segments", None)
    ids = None if cuts is None else (packed(cuts, shape[1]), packed(cuts, shape[2]))
    check(shape, dtype, options, ids)


def test_queries_that_see_no_key_have_no_gradient():
    """Ids in no order, keys of which no query has the id, and queries of which no key has it."""
    rng = np.random.default_rng(0)
    q_ids, k_ids = rng.integers(0, 3, (1, 100)), rng.integers(1, 4, (1, 100))
    ids = tuple(jnp.asarray(x, jnp.int32) for x in (q_ids, k_ids))
    dq, dk, dv = check((1, 100, 100, 1, 1, 128), BF16, {"causal": False}, ids)
    assert not np.asarray(dq, np.float32)[q_ids == 0].any()
    assert not np.asarray(dk, np.float32)[k_ids == 3].any()
    assert not np.asarray(dv, np.float32)[k_ids == 3].any()


def test_tiles_of_other_segments_are_left_out():
    rows, columns = packed([[128, 256]], 300), packed([[128, 256]], 384)
    first, end = segment_tiles(rows, columns, (300, 64, 384, 128))
    np.testing.assert_array_equal(first, [[0, 0, 1, 1, 2]])
    np.testing.assert_array_equal(end, [[1, 1, 2, 2, 3]])
    first, end = segment_tiles(rows + 5, columns, (300, 64, 384, 128))  # no id in common
    np.testing.assert_array_equal(first, end)
