"""Sizes at both ends: more than 2^31 elements, and axes of length 0 and 1."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as ops
from pallas_kernels import dispatch

BF16, INT = jnp.bfloat16, jnp.int32
MANY = 2**31


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradient(op):
    def run(*arrays):
        y, pull = jax.vjp(op, *arrays)
        return y, pull(y)

    return run


def fp8_mlp(x, gate, up, down, **options):
    return ops.mlp(x, up, down, gate=gate, precision="fp8", **options)


def rope(q, **options):
    return ops.rope(q, q, jnp.arange(q.shape[1]), **options)


def cross_entropy(z, **options):
    return ops.cross_entropy(z, jnp.zeros(z.shape[:-1], INT), **options)


def encoder(table, **options):
    return ops.encoder(jnp.zeros((2, 2**30), INT), table, None, **options)


WIDE, TALL = (66_048, 32_832), (2**20, 4096)
HUGE = {  # op, shapes, whether the kernel runs
    "fp8_mlp": (fp8_mlp, [(66_048, 64), *[(64, 32_832)] * 2, (32_832, 64)], True),
    "fp8_linear": (ops.fp8_linear, [WIDE, (32_832, 64)], True),
    "gelu": (ops.gelu, [TALL], True),
    "gelu of a part of a block": (ops.gelu, [(MANY + 1,)], True),
    "swiglu": (ops.swiglu, [TALL, TALL], True),
    "swiglu of a part of a block": (ops.swiglu, [(MANY + 1,)] * 2, True),
    "layer_norm": (ops.layer_norm, [TALL, (4096,)], True),
    "layer_norm of many rows": (ops.layer_norm, [(MANY, 8)], False),
    "rms_norm of many heads": (ops.rms_norm, [(2**20, 2**11, 8)], False),
    "rope": (rope, [(2, 2**14, 512, 128)], True),
    "rope of many positions": (rope, [(2, 2**30, 1, 2)], False),
    "cross_entropy": (cross_entropy, [(2**16, 2**16)], True),
    "cross_entropy of many rows": (cross_entropy, [(MANY, 2)], False),
    "encoder of many places": (encoder, [(8, 2)], False),
    "attention": (ops.attention, [(2**12, 1024, 16, 64)] * 3, True),
}


@pytest.mark.parametrize("case", list(HUGE))
def test_no_index_of_a_kernel_leaves_int32(monkeypatch, case):
    """Kernels count in int32, so no axis of their arrays may be longer."""
    (op, shapes, runs), found, kernel = HUGE[case], [], plgpu.kernel

    def spy(body, out_type, **options):
        call = kernel(body, out_type=out_type, **options)

        def run(*arrays):
            found.extend(x.shape for x in jax.tree.leaves((arrays, out_type)))
            return call(*arrays)

        return run

    monkeypatch.setattr(plgpu, "kernel", spy)
    arrays = [x if isinstance(x, jax.ShapeDtypeStruct) else array(*x) for x in shapes]
    of = lambda implementation: with_gradient(lambda *a: op(*a, implementation=implementation))
    jax.eval_shape(of("xla"), *arrays)
    if not runs:
        with pytest.raises(NotImplementedError, match=f"is more than {MANY - 1}"):
            jax.eval_shape(of("mosaic"), *arrays)
        return
    jax.eval_shape(of("mosaic"), *arrays)
    assert found
    assert max(max(shape, default=0) for shape in found) < MANY


def packed(x, **options):
    return ops.attention(ops.Packed(x, ((2, 64), (1, 64), (1, 64))), **options)


def packed_rope(x, **options):
    packed = ops.Packed(x, ((2, 64), (1, 64), (1, 64)))
    return ops.rope(packed, None, jnp.arange(x.shape[1]), **options).array


def decode(q, kv, **options):
    return ops.decode_attention(q, kv, kv, jnp.ones(q.shape[0], INT), **options)


def vlstm_step(q, gates, c, n, **options):
    return ops.vlstm_step(q, q, q, gates, gates, (c, n, gates), **options)


def vlstm(q, v, gates, **options):
    return ops.vlstm(q, q, v, gates, gates, **options)


EDGES = {  # op, shapes, the result's shape
    "many query heads on one": (ops.attention, [(1, 1, 512, 64), *[(1, 1, 1, 64)] * 2], None),
    "attention, D 0": (ops.attention, [(1, 8, 2, 0)] * 3, (1, 8, 2, 0)),
    "packed, B 0": (packed, [(0, 8, 256)], (0, 8, 2, 64)),
    "packed, T 0": (packed, [(1, 0, 256)], (1, 0, 2, 64)),
    "packed rope, T 0": (packed_rope, [(1, 0, 256)], (1, 0, 256)),
    "many query heads in decode_attention": (decode, [(1, 1, 512, 64), (1, 8, 1, 64)], None),
    "vlstm, DQK 0": (vlstm, [(1, 9, 2, 0), (1, 9, 2, 64), (1, 9, 2)], (1, 9, 2, 64)),
    "vlstm_step, DQK 0": (vlstm_step, [(1, 2, 0), (1, 2), (1, 2, 0, 0), (1, 2, 0)], (1, 2, 0)),
}


@pytest.mark.parametrize("case", list(EDGES))
def test_every_size_has_a_result(monkeypatch, case):
    op, shapes, shape = EDGES[case]
    grad = with_gradient if op in (ops.attention, packed, vlstm) else lambda f: f
    arrays = [jnp.ones(s, BF16) for s in shapes]
    first = lambda results: jax.tree.leaves(results)[0]
    y = first(grad(op)(*arrays))
    assert y.shape == (shape or shapes[0])
    assert bool(jnp.isfinite(y.astype(jnp.float32)).all())
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    traced = jax.eval_shape(grad(lambda *a: op(*a)), *arrays)  # as on an H100
    assert first(traced).shape == y.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.encoder(jnp.zeros((1, 1), INT), jnp.ones((0, 8)), None), "at least 1 row"),
        (lambda: ops.row_linear(jnp.ones((0, 0)), [jnp.ones((4, 0))]), "not a single row"),
        (lambda: rope(jnp.ones((1, 2, 1, 1))), "D=1 is odd"),
    ],
)
def test_a_size_without_a_result_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rope_in_decode_attention_needs_pairs():
    q, kv = jnp.ones((1, 1, 2, 1), BF16), jnp.ones((1, 8, 1, 1), BF16)
    with pytest.raises(ValueError, match="needs an even D, not 1"):
        decode(q, kv, new=(kv[:, :1],) * 2, theta=1e4)
