import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_interpreted
from jax.test_util import check_grads
from kernel_checks import assert_lowers, check_op, kernels_run_here, normal

from pallas_kernels import RopeScaling, attention, decode_attention, rope
from pallas_kernels.flash_attention import decode_kernels
from pallas_kernels.flash_attention.decode_kernels import splits_of

KERNELS = ("decode_attention",)
decode_attention_reference = functools.partial(decode_attention, implementation="xla")
BF16, FP8, E5M2 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2


def arrays(b, t, h, kv, s, d, lengths, dtype=BF16, cache=None):
    k, v = (normal(i, (b, s, kv, d), dtype).astype(cache or dtype) for i in (1, 2))
    return normal(0, (b, t, h, d), dtype), k, v, jnp.array(lengths, jnp.int32)


@pytest.mark.parametrize(
    ("shape", "lengths", "dtypes", "one_block", "options"),
    [
        # Rows of several lengths, over several blocks; the last tile is not full.
        ((2, 1, 8, 2, 136, 64), [136, 70], (BF16,), False, {}),
        # More tiles than buffers, and positions in several tiles; a window that begins in a tile.
        ((1, 5, 4, 2, 328, 128), [322], (jnp.float16,), True, dict(window=270, softcap=20.0)),
        # The same buffers for a float8 cache; a row without keys.
        ((2, 1, 2, 1, 192, 128), [180, 0], (BF16, FP8), True, dict(k_scale=0.5, v_scale=3.0)),
    ],
    ids=["lengths", "window", "float8"],
)
def test_decode_attention_matches_float64(monkeypatch, shape, lengths, dtypes, one_block, options):
    if one_block:
        monkeypatch.setattr(decode_kernels, "_LEAST_SPLITS", 1)
        monkeypatch.setattr(decode_kernels, "_MOST_SPLITS", 1)
    else:
        monkeypatch.setattr(decode_kernels, "_WHOLE", 0)
    scales = {n: x for n, x in options.items() if n.endswith("_scale")}
    for i, (name, x) in enumerate(scales.items()):
        options = options | {name: x * jnp.exp(normal(3 + i, (shape[0], shape[3])))}
    check_op(
        decode_attention,
        decode_attention_reference,
        *arrays(*shape, lengths, *dtypes),
        kernels=KERNELS,
        differentiable=[],
        **options,
    )


@pytest.mark.parametrize(
    ("shape", "lengths", "cache", "one_block", "options"),
    [
        # Splits; the newest position begins a tile, or is the only one.
        ((3, 1, 4, 2, 136, 64), [136, 65, 1], BF16, False, {}),
        ((2, 1, 2, 1, 192, 64), [130, -(2**31)], BF16, True, dict(window=66, softcap=20.0)),
        ((1, 1, 2, 1, 72, 64), [66], FP8, True, dict(k_scale=0.5, v_scale=3.0)),
        ((2, 1, 4, 2, 136, 64), [130, 0], BF16, False, dict(theta=1e4)),
        slow((1, 1, 8, 2, 136, 128), [131], BF16, True, dict(theta=5e5, window=100)),
        slow((1, 1, 6, 2, 72, 16), [66], BF16, True, dict(theta=5e5, scaling=RopeScaling())),
        slow((1, 1, 2, 1, 72, 64), [66], FP8, True, dict(k_scale=0.5, v_scale=3.0, theta=1e4)),
    ],
    ids=["splits", "window", "float8", "rope", "wide rope", "narrow rope", "float8 rope"],
)
def test_the_newest_position_is_attended_to_and_written(
    monkeypatch, shape, lengths, cache, one_block, options
):
    monkeypatch.setattr(decode_kernels, "_WHOLE", 4 if one_block else 0)
    b, _, _, kv, _, d = shape
    new = tuple(normal(i, (b, 1, kv, d), BF16) for i in (5, 6))
    appends = lambda op: lambda *a, **o: op(*a[:4], new=a[4], **o)
    for name in ("k_scale", "v_scale"):
        if name in options:
            options = options | {name: jnp.full((b, kv), options[name])}
    check_op(
        appends(decode_attention),
        appends(decode_attention_reference),
        *arrays(*shape, lengths, BF16, cache),
        new,
        kernels=KERNELS,
        differentiable=[],
        **options,
    )


@pytest.mark.usefixtures("general_kernels")
@pytest.mark.parametrize(
    ("shape", "lengths", "dtype", "options"),
    [
        ((2, 1, 8, 2, 136, 64), [136, 70], BF16, {}),
        ((1, 5, 4, 2, 200, 128), [197], jnp.float16, dict(window=100, softcap=20.0)),
        slow((2, 1, 2, 1, 192, 256), [180, 0], BF16, dict(window=66)),
        slow((3, 2, 6, 3, 128, 16), [128, 65, 2], BF16, dict(scale=0.3)),
    ],
)
def test_the_general_form_matches_float64(monkeypatch, shape, lengths, dtype, options):
    monkeypatch.setattr(decode_kernels, "_WHOLE", 0 if shape[1] == 1 else 4)
    check_op(
        decode_attention,
        decode_attention_reference,
        *arrays(*shape, lengths, dtype),
        kernels=("general_decode_attention",),
        differentiable=[],
        **options,
    )


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_rope_is_that_of_the_position_of_the_last_key(implementation):
    q, k, v, lengths = arrays(2, 1, 4, 2, 48, 16, [30, 48], jnp.float32)
    key, value = (normal(i, (2, 1, 2, 16)) for i in (5, 6))
    op = functools.partial(decode_attention, implementation=implementation)
    actual = op(q, k, v, lengths, new=(key, value), theta=1e4)
    q, key = rope(q, key, lengths[:, None] - 1, theta=1e4)
    for a, b in zip(actual, op(q, k, v, lengths, new=(key, value)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("general_kernels")
def test_the_general_form_reads_what_was_just_written():
    inputs, new = (
        arrays(2, 1, 4, 2, 64, 32, [64, 3]),
        [normal(i, (2, 1, 2, 32), BF16) for i in (5, 6)],
    )
    check_op(
        lambda *a, **o: decode_attention(*a[:4], new=tuple(a[4:]), **o),
        lambda *a, **o: decode_attention_reference(*a[:4], new=tuple(a[4:]), **o),
        *inputs,
        *new,
        kernels=("general_decode_attention",),
        differentiable=[],
    )


@pytest.mark.parametrize(
    ("t", "options"),
    [slow(1, {}), (3, dict(window=9, softcap=5.0, scale=0.3))],
    ids=["one", "three"],
)
@jax.default_matmul_precision("float32")  # XLA's default on a GPU is TF32
def test_each_row_is_the_end_of_its_own_attention(t, options):
    q, k, v, lengths = arrays(2, t, 4, 2, 48, 16, [3, 48], jnp.float32)
    actual = decode_attention(q, k, v, lengths, **options)
    for i, length in enumerate(lengths.tolist()):
        row = (q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length])
        expected = attention(*row, **options, implementation="xla")
        np.testing.assert_allclose(actual[i : i + 1], expected, rtol=2e-5, atol=2e-6)


@jax.default_matmul_precision("float32")
def test_scales_of_a_float8_cache():
    q, k, v, lengths = arrays(2, 1, 4, 2, 48, 16, [30, 48], jnp.float32, FP8)
    scales = [jnp.exp(normal(i, (2, 2))) for i in (3, 4)]
    actual = decode_attention(q, k, v, lengths, k_scale=scales[0], v_scale=scales[1])
    wide = (
        x.astype(jnp.float32) * s[:, None, :, None] for x, s in zip((k, v), scales, strict=True)
    )
    expected = decode_attention(q, *wide, lengths)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP8, BF16])  # a cache of bfloat16 got it undivided
def test_a_new_position_is_divided_by_its_scale_and_clipped(dtype):
    q, k, v, lengths = arrays(2, 1, 4, 2, 48, 64, [30, 48], BF16, dtype)
    k_scale, v_scale = (0.01 * jnp.exp(normal(i, (2, 2))) for i in (3, 4))
    new = tuple(normal(i, (2, 1, 2, 64), BF16) for i in (5, 6))
    new = (new[0].at[0, 0, 0, 0].set(-1000.0), new[1].at[1, 0, 0, 0].set(jnp.inf))
    run = functools.partial(decode_attention, k_scale=k_scale, v_scale=v_scale)
    y, *cache = run(q, k, v, lengths, new=new)
    for kept, before, x, scale in zip(cache, (k, v), new, (k_scale, v_scale), strict=True):
        stored = x[:, 0].astype(jnp.float32) / scale[..., None]
        if dtype == FP8:
            stored = jnp.where(jnp.isinf(stored), jnp.nan, jnp.clip(stored, -448, 448))
        stored = stored.astype(dtype)
        expected = before.at[jnp.arange(2), lengths - 1].set(stored)
        np.testing.assert_array_equal(*(a.astype(jnp.float32) for a in (kept, expected)))
    both = (a.astype(jnp.float32) for a in (y, run(q, *cache, lengths)))
    # The kernel does not round the new position's weight.
    np.testing.assert_allclose(*both, rtol=0, atol=0 if dtype == FP8 else 1e-3)


@pytest.mark.parametrize("length", [0, -(2**31)])
def test_positions_without_keys_give_zeros(length):
    """int32 may have no room for a length minus T."""
    q, k, v, _ = arrays(2, 2, 4, 2, 48, 16, [0, 0], jnp.float32)
    y = decode_attention(q, k, v, jnp.array([length, 1]))
    assert not y[0].any()
    assert not y[1, 0].any()
    assert y[1, 1].any()


@pytest.mark.parametrize("length", [1, 7])
def test_a_new_key_that_is_not_finite_shows(length):
    """The only key's weight was 1 whatever its logit was, so NaN in q or the key was lost."""
    q, k, v, lengths = arrays(4, 1, 1, 1, 8, 16, [length] * 4)
    q = q.at[0, 0, 0, 0].set(jnp.nan).at[1:, 0, 0, 3].set(1)
    new = normal(5, (4, 1, 1, 16), BF16)
    key = new.at[jnp.arange(1, 4), 0, 0, 3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf], BF16))
    run = lambda how: decode_attention(q, k, v, lengths, new=(key, new), implementation=how)[0]
    with kernels_run_here():
        actual = run("mosaic")
    expected = run("xla")
    if length == 1:  # no logit but -inf, for which the kernel has zeros
        expected = expected.at[3].set(0)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert np.isnan(actual[:3]).all()
    assert np.isfinite(actual[3]).all()


@pytest.mark.parametrize("general", [False, slow_interpreted(True)])
@pytest.mark.parametrize(("dtype", "size"), [(jnp.float16, 2e4), slow_interpreted(BF16, 1e15)])
def test_large_logits(dtype, size, general, request):
    """Beyond 2^24, where a multiply-add of logits less their maximum is off by whole numbers."""
    if general:
        request.getfixturevalue("general_kernels")
    q, k, v, lengths = arrays(2, 1, 4, 2, 200, 64, [200, 130], dtype)
    q, k, new = q * size, k * size, [normal(i, (2, 1, 2, 64), dtype) for i in (5, 6)]
    for options in ({}, {"new": (new[0] * size, new[1])}):
        run = lambda how, o=options: decode_attention(q, k, v, lengths, implementation=how, **o)
        with kernels_run_here():
            actual = run("mosaic")
        for a, b in zip(*map(jax.tree.leaves, (actual, run("xla"))), strict=True):
            np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), atol=0.02)


def test_a_length_beyond_the_cache_counts_as_its_size():
    q, k, v, lengths = arrays(1, 1, 4, 2, 48, 16, [48], jnp.float32)
    a, b = (decode_attention(q, k, v, n) for n in (lengths, lengths + 7))
    assert (a == b).all()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("length", "slot"), [(-3, 0), (0, 0), (1, 0), (49, 47), (2**31 - 1, 47)])
def test_a_new_position_outside_the_cache_is_written_at_its_nearest_end(rows, length, slot):
    """As by the kernel; several rows lost it beyond the end, and all wrapped before the start."""
    q, k, v, lengths = arrays(rows, 1, 4, 2, 48, 16, [length] * rows, jnp.float32)
    new = tuple(normal(i, (rows, 1, 2, 16)) for i in (5, 6))
    _, *cache = decode_attention(q, k, v, lengths, new=new, implementation="xla")
    for kept, before, x in zip(cache, (k, v), new, strict=True):
        np.testing.assert_array_equal(kept, before.at[:, slot].set(x[:, 0]))


@pytest.mark.parametrize(
    ("d", "cache"), [(256, BF16), (80, BF16), (96, FP8)], ids=["wide", "odd", "float8"]
)
def test_other_head_dimensions_lower(d, cache):
    inputs = jax.eval_shape(lambda: arrays(1, 8, 8, 1, 512, d, [512], cache=cache))
    op = lambda *a: decode_attention(*a, implementation="mosaic")
    assert_lowers(op, inputs, KERNELS)


@pytest.mark.parametrize(
    ("tiles", "pairs", "least", "blocks", "splits"),
    [
        (128, 8, 1, 132, 16),  # S 8192, B 1: 128 blocks of 8 tiles
        (128, 8, 1, 264, 32),  # float8: 256 blocks of 4
        (2048, 8, 1, 132, 16),  # S 131072
        (5, 1, 8, 132, 5),  # no more than tiles
        (4, 12, 4, 132, 1),  # S 256: the merge would take longer
        (16, 384, 2, 132, 2),  # S 1024, B 32, 12 heads: 6 waves of blocks of 8 tiles
    ],
)
def test_splits_fill_the_gpu(tiles, pairs, least, blocks, splits):
    assert splits_of(tiles, pairs, blocks, least) == splits


def test_rows_of_a_batch_are_always_split():
    assert splits_of(128, 256, 264, 8) >= 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(lengths=jnp.ones(3, jnp.int32)), "lengths has shape (3,), not (B,) = (2,)"),
        (dict(lengths=jnp.ones(2)), "lengths is float32: cast it to an integer dtype"),
        (dict(v=jnp.ones((2, 64, 2, 64))), "k is bfloat16 and v float32: they must be equal"),
        ({name: jnp.ones((2, 64, 2, 64), jnp.int8) for name in "kv"}, "k is int8: cast it"),
        ({name: jnp.ones((2, 64, 2, 64), E5M2) for name in "kv"}, "k is float8_e5m2: cast"),
        (dict(k_scale=jnp.ones(2)), "k_scale has shape (2,), not (B, K) = (2, 2)"),
        (
            dict(q=jnp.ones((2, 65, 4, 64), BF16)),
            "T=65 is more than S=64 keys: pass fewer queries, or",
        ),
        (
            dict(new=(jnp.ones((2, 1, 2, 9)),) * 2),
            "new has shape (2, 1, 2, 9), not (B, 1, K, D) = (2, 1, 2, 64)",
        ),
        (
            dict(q=jnp.ones((2, 3, 4, 64), BF16), new=(jnp.ones((2, 1, 2, 64), BF16),) * 2),
            "q has T=3 positions: a call with new= needs 1",
        ),
        (dict(theta=1e4), "theta=10000.0 needs new=, the key that RoPE turns"),
        (dict(scaling=RopeScaling()), ") needs theta, whose frequencies it scales"),
        (dict(window=0), "window=0 needs at least 1 key"),
        (dict(softcap=-1.0), "softcap=-1.0 must be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    names = ("q", "k", "v", "lengths")
    call = dict(zip(names, arrays(2, 1, 4, 2, 64, 64, [1, 2]), strict=True)) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_attention(**call)


@pytest.mark.parametrize(
    ("shape", "dtypes", "options", "why"),
    [
        ((1, 1, 4, 2, 64, 64), (jnp.float32,), {}, "q is float32, not bfloat16 or float16"),
        ((1, 1, 4, 2, 64, 64), (BF16, jnp.float16), {}, "the cache is float16, not bfloat16 or"),
        ((1, 1, 4, 2, 64, 72), (BF16,), {}, "D=72 is not a multiple of 16 up to 256"),
        ((1, 1, 4, 2, 64, 48), (BF16, FP8), {}, "D=48 is not a multiple of 32 up to 128"),
        ((1, 1, 4, 2, 64, 160), (BF16, FP8), {}, "D=160 is not a multiple of 32 up to 128"),
        ((1, 9, 16, 2, 64, 64), (BF16,), {}, "T=9 positions of 8 heads are 72 rows, more than 64"),
        ((1, 1, 4, 2, 60, 64), (BF16,), {}, "the cache's S=60 slots are not a multiple of 8"),
        ((1, 1, 4, 2, 64, 64), (BF16,), dict(scale=-1.0), "scale=-1.0 is less than 1e-30"),
        ((1, 1, 4, 2, 64, 64), (BF16,), dict(softcap=300.0), "softcap=300.0 is more than 100"),
        ((0, 1, 4, 2, 64, 64), (BF16,), {}, "without elements"),
    ],
)
def test_what_the_kernel_does_not_take(shape, dtypes, options, why):
    inputs = arrays(*shape, [1] * shape[0], *dtypes)
    with pytest.raises(NotImplementedError, match=re.escape(why)):
        decode_attention(*inputs, **options, implementation="mosaic")
    y = jax.eval_shape(functools.partial(decode_attention, **options), *inputs)
    assert y.shape == inputs[0].shape


def test_only_xla_has_a_gradient():
    q, k, v, lengths = arrays(1, 1, 4, 2, 64, 64, [9], jnp.float32)
    f = lambda *x, **how: decode_attention(*x, lengths, **how)
    with jax.default_matmul_precision("highest"):  # a GPU's TF32 has too few bits for differences
        check_grads(lambda *x: f(*x, implementation="xla"), (q, k, v), order=1, modes=["rev"])
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    with pytest.raises(NotImplementedError, match="decode_attention.* generation no gradient"):
        jax.eval_shape(jax.grad(lambda q: f(q, k, v, implementation="mosaic").sum()), q)
