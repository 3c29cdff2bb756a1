import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import ON_GPU, check_op, names_in, normal

from pallas_kernels import Packed, attention, dispatch, linear_cross_entropy, mosaic, rope

KERNELS = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")
ROPE = ("rope_forward", "rope_backward")
BF16, FP16 = jnp.bfloat16, jnp.float16


def attention_qkv(qkv, n_heads, *, theta=None, positions=None, implementation=None, **options):
    """Attention of one array (B, T, H + 2 K, D), perhaps after RoPE, as a model calls it."""
    b, t, heads, d = qkv.shape
    kv = (heads - n_heads) // 2
    packed = Packed(qkv.reshape(b, t, -1), ((n_heads, d), (kv, d), (kv, d)))
    if theta is not None:
        positions = jnp.arange(t) if positions is None else positions
        packed = rope(packed, None, positions, theta=theta, implementation=implementation)
    return attention(packed, implementation=implementation, **options)


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch):
    monkeypatch.setattr(mosaic, "sm_count", lambda: 16 if ON_GPU else 1)


@pytest.mark.parametrize(
    ("shape", "heads", "theta", "options"),
    [  # (B, T, D), (H, K)
        ((2, 80, 64), (3, 1), 500.0, {"window": 50}),
        slow((1, 72, 128), (2, 2), None, {"softcap": 5.0}),
    ]
    + [
        ((1, 72, 64), (2, 2), None, {}),
        ((1, 64, 128), (2, 1), 1e4, {"softcap": 5.0}),
        ((2, 1000, 128), (12, 3), 1e4, {}),
        ((4, 1024, 64), (12, 12), None, {}),
    ]
    * ON_GPU,
)
def test_it_matches_float64(shape, heads, theta, options):
    (b, t, d), (h, kv) = shape, heads
    op = lambda qkv, positions, implementation="xla": attention_qkv(
        qkv, h, positions=positions, theta=theta, implementation=implementation, **options
    )
    qkv, positions = normal(0, (b, t, h + 2 * kv, d), BF16), jnp.arange(t) + 3
    check_op(op, op, qkv, positions, kernels=KERNELS + (ROPE if theta else ()))


@pytest.mark.parametrize("d", [64, slow(80), slow(160)])
def test_only_narrow_heads_are_read_in_place_for_any_number_of_tokens(d):
    qkv = jnp.zeros((1, 21, 4, d), BF16)
    f = functools.partial(attention_qkv, n_heads=2, implementation="mosaic")
    text = jax.jit(f).trace(qkv).lower(lowering_platforms=("cuda",)).as_text()
    assert "attention_forward" in names_in(text)
    assert ("stablehlo.slice" in text) == ("stablehlo.pad" in text) == (d == 160)


@pytest.mark.parametrize("lacks", [None, slow("no GPU")])
def test_what_is_decided_is_what_runs(monkeypatch, lacks):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: lacks)
    dispatch.reset()
    f = jax.jit(lambda qkv: attention_qkv(qkv, 1, theta=1e4))
    qkv = jnp.zeros((2, 16, 3, 64), BF16)
    names = names_in(f.trace(qkv).lower(lowering_platforms=("cuda",)).as_text())
    runs = ["xla", "xla"] if lacks else ["general", "hopper"]
    assert [d[:2] for d in dispatch.decisions()] == [("rope", runs[0]), ("attention", runs[1])]
    for kernel in "rope_forward", "attention_forward":
        assert (kernel in names) == (not lacks)
    dispatch.reset()


def test_it_is_rope_and_attention_of_its_parts():
    qkv, ids = normal(0, (2, 24, 8, 16)), jnp.arange(24) // 9 + jnp.zeros((2, 1), int)
    q, k, v = jnp.split(qkv, (4, 6), axis=2)
    q, k = rope(q, k, jnp.arange(24), theta=100.0)
    expected = attention(q, k, v, segment_ids=ids, window=7)
    actual = attention_qkv(qkv, 4, positions=jnp.arange(24), theta=100.0, segment_ids=ids, window=7)
    assert jnp.array_equal(actual, expected)


def test_a_packed_array_that_does_not_fit_is_an_error():
    x = jnp.zeros((1, 8, 9 * 64))
    for parts, message in (
        (((4, 64), (2, 64), (2, 64)), "packed has 576 columns, not 4 x 64"),
        (((7, 64), (2, 64)), "packed has 2 parts, not q, k, v"),
        (((9, 64), (0, 64), (0, 64)), "heads and width must be at least 1"),
        (((9,),) * 3, r"packed has parts \(\(9,\), .*, not pairs of integers \(heads, width\)$"),
        (((3.0, 64),) * 3, r"packed has parts \(\(3.0, 64\), .*, not pairs of integers"),
        (3, "packed has parts 3, not pairs of integers"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(Packed(x, parts))
    for array, message in (  # JAX's own errors have several lines
        (np.zeros((1, 8, 192), object), r"^q\.array is object: cast it to bfloat16,"),
        (np.zeros((1, 8, 192), ">f4"), r"^q\.array is >f4: cast it to bfloat16,"),
        (jax.ShapeDtypeStruct((1, 8, 192), "float32"), r"^q\.array must be an array, not Shape"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(Packed(array, ((1, 64),) * 3))
    packed = Packed(x, ((5, 64), (2, 64), (2, 64)))
    with pytest.raises(ValueError, match="H=5 query heads are not a multiple of K=2"):
        attention(packed)
    with pytest.raises(ValueError, match="q is packed with k and v: pass k=None and v=None"):
        attention(packed, x)
    with pytest.raises(ValueError, match="q is not packed: pass k and v, too"):
        attention(x.reshape(1, 8, 9, 64))
    with pytest.raises(ValueError, match="q is packed with k: pass k=None"):
        rope(packed, x, jnp.arange(8))
    with pytest.raises(ValueError, match="q is not packed: pass k, too"):
        rope(x.reshape(1, 8, 9, 64), None, jnp.arange(8))


def test_checkpoint_runs_the_kernels_that_write_in_place_again():
    """JAX once dropped these writes and returned the gradients of q and k before RoPE."""
    x, weight, labels = (
        jnp.ones((1, 64, 3, 64), BF16),  # RoPE rotates whole tiles of 32 positions in place
        jnp.ones((128, 64)),
        jnp.zeros(8, int),
    )
    rotated = lambda x: (
        attention_qkv(x, 1, theta=1e4, implementation="mosaic").astype(jnp.float32).sum()
    )
    head = lambda x: linear_cross_entropy(
        x.reshape(-1, 64)[:8], weight, labels, implementation="mosaic"
    )
    for op, kernel in (
        (rotated, "rope_forward"),
        (head, "linear_cross_entropy_statistics_and_gradient"),
    ):
        again = jax.jit(jax.grad(jax.checkpoint(op))).trace(x).lower(lowering_platforms=("cuda",))
        assert kernel in names_in(again.as_text())


@pytest.mark.parametrize(("t", "d"), [(33, 40), slow(71, 104), slow(72, 144), (71, 200), (70, 256)])
def test_any_length_and_any_multiple_of_8_columns_are_read_in_place(t, d):
    f = lambda x: attention(Packed(x, ((2, d), (1, d), (1, d))), implementation="mosaic")
    with_gradient = lambda x: jax.vjp(f, x)[1](jnp.ones((7, t, 2, d), BF16))
    program = str(jax.make_jaxpr(with_gradient)(jnp.zeros((7, t, 4 * d), BF16)))
    assert set(KERNELS) <= names_in(program)
    assert set(re.findall(r"bf16\[7,(\d+),[24],(\d+)\]", program)) == {(str(t), str(d))}
