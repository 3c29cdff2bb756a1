"""Ids of every integer dtype, from jnp and from numpy, mean the same in every form of an op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import normal

import pallas_kernels as ops
from pallas_kernels import ids

BF16 = jnp.bfloat16
DTYPES = ["int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
BOUNDS = [(int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)) for dtype in DTYPES]
EDGES = sorted({n + i for pair in BOUNDS for n in pair for i in (-1, 0, 1)} | {2**32, 2**40})


def arrays_of(numbers):
    """The numbers in each dtype that holds them all, from numpy and from jnp."""
    for dtype, (least, most) in zip(DTYPES, BOUNDS, strict=True):
        if least <= min(numbers) and max(numbers) <= most:
            x = np.array(numbers, object).astype(jnp.dtype(dtype))
            yield x
            with jax.enable_x64(True):
                yield jnp.asarray(x)


def each_edge(convert):
    """(number, convert(an array with it)) for every number at the edge of a dtype, and each dtype.

    With x64 both eagerly and under jit; numpy's arrays without it, too.
    """
    for n in EDGES:
        for x in arrays_of([n]):
            if not isinstance(x, jax.Array):
                yield n, convert(x)
            with jax.enable_x64(True):
                yield n, convert(x)


def test_saturated_ids():
    for n, x in each_edge(lambda x: ids.saturated("tokens", x)):
        assert x.dtype == jnp.int32
        assert int(x[0]) == min(max(n, -(2**31)), 2**31 - 1)


@pytest.mark.parametrize("ignore", [-100, 0, 255, 2**31 - 1, 2**31, 2**32 - 100, 2**63])
def test_labels_are_ignored_known_or_unknown(ignore):
    for n, (x, index) in each_edge(lambda x: ids.labels(x, ignore)):
        assert x.dtype == jnp.int32
        assert -(2**31) <= index < 2**31
        assert (int(x[0]) == index) == (n == ignore)
        known = 0 <= n < 2**31 - 1
        assert n == ignore or (int(x[0]) == n if known else not 0 <= int(x[0]) < 2**31 - 1)


def test_positions_keep_their_angles():
    for n, x in each_edge(ids.positions):
        assert x.dtype in (jnp.int32, jnp.float32)
        assert np.asarray(x, np.float32)[0] == np.float32(n)


SEGMENTS = [[0, 0, 1, 1], [200, 200, 7, 255], [7, 7, -3, 7], [1, 1, 1 + 2**32, 1]]
SEGMENTS += [[0, 2**63, 2**64 - 1, 2**32 - 1], [-1, -(2**63), 2**32 - 1, 2**63 - 1]]


@pytest.mark.parametrize("numbers", SEGMENTS, ids=str)
def test_segments_compare_as_before(numbers):
    expected = np.less.outer(np.array(numbers, object), np.array(numbers, object))
    for x in arrays_of(numbers):
        with jax.enable_x64(isinstance(x, jax.Array)):
            found = [ids.segments(x[None])[0][0]]
            found += [jax.jit(ids.segments)(x[None])[0][0]] if isinstance(x, jax.Array) else []
        for got in found:
            assert got.dtype == jnp.int32
            np.testing.assert_array_equal(np.less.outer(got, got), expected)


@pytest.mark.parametrize(
    "dtypes", [("uint32", "int32"), ("uint64", "int8"), ("int64", "uint64")], ids=str
)
def test_segments_of_queries_and_keys_in_different_dtypes(dtypes):
    queries = np.array([[2**31, 3, 127]]).astype(dtypes[0])
    keys = np.array([[-1, 3, 127, -128]]).astype(dtypes[1])
    with jax.enable_x64(True):
        of_jnp = jnp.asarray(queries), jnp.asarray(keys)
        for pair in ((queries, keys), of_jnp, (of_jnp[0], keys), (queries, of_jnp[1])):
            mine, theirs = (np.asarray(x)[0] for x in ids.segments(*pair))
            same = [[int(a) == int(b) for b in keys[0]] for a in queries[0]]
            np.testing.assert_array_equal(mine[:, None] == theirs, same)


def test_floats_and_lists_are_refused():
    for convert in (ids.positions, ids.segments, lambda x: ids.labels(x, 0)):
        with pytest.raises(ValueError, match="is float32: cast it to an integer dtype"):
            convert(jnp.zeros((1, 3)))
        with pytest.raises(ValueError, match=r"must be an array, not list: pass np.array\("):
            convert([[0, 1, 2]])  # a layer's tokens: ended as list has no dtype


# ---- the ops -----------------------------------------------------------------------------------


def _packed(x, parts: int):
    return ops.Packed(jnp.concatenate([x[:, :, 0]] * parts, 2), ((1, 64),) * parts)


def _segmented(x, implementation):
    q, gates = normal(0, (1, 8, 1, 64), BF16), normal(1, (1, 8, 1))
    options = dict(segment_ids=x[None], implementation=implementation)
    return (
        ops.attention(q, q, q, **options),
        ops.attention(_packed(q, 3), **options),
        ops.vlstm(q, q, q, gates, gates, **options),
        ops.vlstm(_packed(q, 3), None, None, gates, gates, **options),
        ops.vlstm(
            _packed(q, 4), None, None, gates, gates, norm_weight=normal(2, (1, 64)), **options
        ),
    )


def _losses(x, implementation, **options):
    options["implementation"] = implementation
    logits, rows, weight = normal(0, (4, 384)), normal(1, (4, 8)), normal(2, (384, 8))
    return (
        ops.cross_entropy(logits, x, **options),
        ops.linear_cross_entropy(rows, weight, x, **options),
    )


def _decode(x, implementation):
    q, k, v = normal(0, (4, 1, 2, 64), BF16), *(normal(i, (4, 72, 1, 64), BF16) for i in (1, 2))
    new = tuple(normal(i, (4, 1, 1, 64), BF16) for i in (3, 4))
    of = lambda **o: ops.decode_attention(q, k, v, x, implementation=implementation, **o)
    return of(), of(new=new, theta=1e4)


RUNS = {  # of four ids
    "encoder": lambda x, implementation: ops.encoder(
        x[None], normal(0, (300, 8)), normal(1, (4, 8)), implementation=implementation
    ),
    "losses": _losses,
    "decode_attention": _decode,
    "rope": lambda x, implementation: ops.rope(
        *[normal(0, (1, 4, 2, 64))] * 2, x, implementation=implementation
    ),
    "segments": _segmented,
}
SAME = [  # numbers, and int32 numbers with the same result
    *[(name, np.uint8([156, 7, 71, 3]), [156, 7, 71, 3]) for name in RUNS],
    ("segments", np.int64([1, 1, 1 + 2**32, 1] * 2), [1, 1, 2, 1] * 2),
    ("encoder", np.uint32([1, 2**31, 2**32 - 1, 3]), [1, 299, 299, 3]),
    ("encoder", np.int64([1, 2**32 + 5, -(2**32), 3]), [1, 299, 0, 3]),
    ("losses", np.uint32([1, 2**32 - 100, 0, 3]), [1, 384, 0, 3]),
    ("losses", np.int64([1, -100, 0, 3]), [1, -100, 0, 3]),
    ("decode_attention", np.uint8([1, 72, 200, 64]), [1, 72, 200, 64]),
]
SAME[4] = ("segments", np.uint8([156, 156, 7, 7] * 2), [156, 156, 7, 7] * 2)


@pytest.mark.parametrize(
    ("name", "numbers", "small"), SAME, ids=[f"{s[0]}-{s[1].dtype}-{i}" for i, s in enumerate(SAME)]
)
def test_ops(name, numbers, small):
    expected = jax.tree.leaves(RUNS[name](jnp.array(small, jnp.int32), "xla"))
    for x in (numbers, jnp.asarray(numbers)) if numbers.itemsize <= 4 else (numbers,):
        for a, e in zip(jax.tree.leaves(RUNS[name](x, "xla")), expected, strict=True):
            np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("name", RUNS)
def test_kernels_get_what_xla_gets(name):
    """No traced kernel reads ids of another dtype than int32, or for RoPE float32."""
    length = 8 if name == "segments" else 4
    for dtype in ("uint8", "uint32"):
        traced = jax.make_jaxpr(lambda x: RUNS[name](x, "mosaic"))(jnp.zeros(length, dtype))
        assert "Ref<gmem>{f32[" in (text := str(traced)) or "Ref<gmem>{bf16[" in text
        assert f"Ref<gmem>{{{dtype.replace('int', '')}[" not in text
