"""Every op and its gradients for two members at a time: `jax.vmap` and `jax.lax.map` (a loop).

In a loop XLA joins a kernel with the slices that it reads and writes, which a kernel that writes in
place must not be: natively it once left zeros.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import NO_KERNEL, ON_GPU, kernels_run_here, normal

import pallas_kernels as ops

BF16 = jnp.bfloat16
TOKENS = np.random.default_rng(0).integers(0, 12, (2, 2, 9))
LABELS = np.array([[5, -100, 250], [1, 2, 3]])
ROWS, WEIGHT = (2, 5, 128), (2, 128)


def _packed(qkv):
    return ops.Packed(qkv, ((2, 64), (1, 64), (1, 64)))


CASES = {  # op(*arrays, integers, implementation=), the arrays' shapes, integers, dtype
    "layer_norm": (ops.layer_norm, [ROWS, WEIGHT, WEIGHT], []),
    "layer_norm_residual": (
        lambda x, residual, w, b, **o: ops.layer_norm(x, w, b, residual=residual, **o),
        [ROWS, ROWS, WEIGHT, WEIGHT],
        [],
    ),
    "layer_norm_gate": (
        lambda x, gate, w, **o: ops.layer_norm(x, w, gate=gate, **o),
        [ROWS, ROWS, WEIGHT],
        [],
    ),
    "rms_norm": (ops.rms_norm, [ROWS, WEIGHT], []),
    "rms_norm_residual": (
        lambda x, residual, w, **o: ops.rms_norm(x, w, residual=residual, **o),
        [ROWS, ROWS, WEIGHT],
        [],
    ),
    "gelu": (ops.gelu, [ROWS, WEIGHT], []),
    "swiglu": (ops.swiglu, [ROWS, ROWS], []),
    "mlp": (
        lambda x, gate, up, down, **o: ops.mlp(x, up, down, gate=gate, **o),
        [(2, 128, 64), *[(2, 64, 128)] * 2, (2, 128, 64)],
        [],
        BF16,
    ),
    "mlp_gelu": (
        lambda x, up, bias, down, **o: ops.mlp(x, up, down, bias=bias, **o),
        [(2, 128, 64), (2, 64, 128), (2, 128), (2, 128, 64)],
        [],
        BF16,
    ),
    "rope": (
        lambda q, k, **o: ops.rope(q, k, jnp.arange(9), **o),
        [(2, 1, 9, 2, 64), (2, 1, 9, 1, 64)],
        [],
    ),
    "cross_entropy": (ops.cross_entropy, [(2, 3, 256)], [LABELS]),
    "linear_cross_entropy": (ops.linear_cross_entropy, [(2, 3, 16), (2, 256, 16)], [LABELS]),
    "encoder": (
        lambda wte, wpe, tokens, **o: ops.encoder(tokens, wte, wpe, **o),
        [(2, 12, 128), (2, 9, 128)],
        [TOKENS],
    ),
    "encoder_tied": (
        lambda wte, tokens, **o: ops.encoder(tokens, wte, None, tied=True, **o),
        [(2, 12, 128)],
        [TOKENS],
    ),
    "attention": (ops.attention, [(2, 1, 64, 2, 64), *[(2, 1, 64, 1, 64)] * 2], [], BF16),
    "attention_packed": (
        lambda qkv, **o: ops.attention(
            ops.rope(_packed(qkv), None, jnp.arange(64), theta=1e4, **o), **o
        ),
        [(2, 1, 64, 4 * 64)],
        [],
        BF16,
    ),
    "decode_attention": (  # without a gradient
        lambda *a, **o: ops.decode_attention(*jax.lax.stop_gradient(a), jnp.array([40]), **o),
        [(2, 1, 1, 2, 64), *[(2, 1, 64, 1, 64)] * 2],
        [],
        BF16,
    ),
    "decode_attention_new": (
        lambda q, k, v, *new, **o: jax.lax.stop_gradient(
            ops.decode_attention(
                *jax.lax.stop_gradient((q, k, v)),
                jnp.array([40]),
                new=jax.lax.stop_gradient(new),
                **o,
            )
        ),
        [(2, 1, 1, 2, 64), *[(2, 1, 64, 1, 64)] * 2, *[(2, 1, 1, 1, 64)] * 2],
        [],
        BF16,
    ),
    "fp8_linear": (ops.fp8_linear, [(2, 64, 64), (2, 64, 64)], [], BF16),
    "mlp_fp8": (
        lambda x, up, down, gate, **o: ops.mlp(x, up, down, gate=gate, precision="fp8", **o),
        [(2, 64, 64), (2, 64, 128), (2, 128, 64), (2, 64, 128)],
        [],
        BF16,
    ),
    "quantize_fp8": (  # without a gradient
        lambda x, **o: ops.quantize_fp8(jax.lax.stop_gradient(x), **o)[2],
        [(2, 64, 64)],
        [],
        BF16,
    ),
    "quantized_linear": (
        lambda x, **o: ops.quantized_linear(x, ops.quantize(normal(9, (128, 64))), **o),
        [(2, 3, 128)],
        [],
        BF16,
    ),
    "row_linear": (  # without a gradient
        lambda x, w, **o: ops.row_linear(jax.lax.stop_gradient(x), [jax.lax.stop_gradient(w)], **o),
        [(2, 1, 256), (2, 8, 256)],
        [],
        BF16,
    ),
    "vlstm_step": (  # without a gradient
        lambda *a, **o: ops.vlstm_step(*(a := jax.lax.stop_gradient(a))[:5], a[5:], **o),
        [*[(2, 1, 1, 32)] * 3, *[(2, 1, 1)] * 2, (2, 1, 1, 32, 32), (2, 1, 1, 32), (2, 1, 1)],
        [],
    ),
    "vlstm": (ops.vlstm, [*[(2, 1, 1, 64, 64)] * 3, *[(2, 1, 1, 64)] * 2], [], BF16),
    "vlstm_qkv": (
        functools.partial(ops.vlstm_qkv, dqk=64),
        [(2, 1, 64, 192), *[(2, 1, 64, 1)] * 2],
        [],
        BF16,
    ),
    "vlstm_qkvo": (
        functools.partial(ops.vlstm_qkvo, dqk=64),
        [(2, 1, 64, 256), *[(2, 1, 64, 1)] * 2, (2, 1, 64)],
        [],
        BF16,
    ),
}
# Where kernels are interpreted, the loop of any other op repeats what its other tests show;
# packed attention has the kernels of attention.
IN_PLACE = {"cross_entropy", "linear_cross_entropy", "encoder", "encoder_tied", "attention_packed"}
IN_PLACE |= {"decode_attention_new", "vlstm_step", "vlstm_qkv", "vlstm_qkvo"}
IN_LOOPS = [name for name in CASES if ON_GPU or name in IN_PLACE]


def test_every_op_is_here():
    variants = {"encoder_tied", "attention_packed", "decode_attention_new"}
    variants |= {"layer_norm_residual", "layer_norm_gate", "rms_norm_residual"}
    variants |= {"mlp_gelu", "mlp_fp8"}
    assert set(CASES) - variants == set(ops.__all__) - NO_KERNEL


def results(name, implementation, loop):
    """The outputs and gradients of both members."""
    op, shapes, whole, *dtype = CASES[name]
    arrays = [normal(i, shape, *dtype) for i, shape in enumerate(shapes)]

    def of_one(members):
        arrays, whole = members
        y, pull = jax.vjp(lambda *a: op(*a, *whole, implementation=implementation), *arrays)
        waves = lambda y: jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
        return y, pull(jax.tree.map(waves, y))

    run = functools.partial(jax.lax.map, of_one) if loop else jax.vmap(of_one)
    with jax.default_matmul_precision("float32"):  # XLA's default on a GPU is TF32
        found = jax.jit(run)((arrays, list(map(jnp.asarray, whole))))
        return list(map(np.asarray, jax.tree.leaves(found)))


expected_of = functools.cache(functools.partial(results, implementation="xla", loop=False))


@pytest.mark.parametrize(
    ("name", "loop"),
    [(name, False) for name in CASES] + [slow(name, True) for name in IN_LOOPS],
    ids=[f"{name}-vmap" for name in CASES] + [f"{name}-map" for name in IN_LOOPS],
)
def test_of_two_members(name, loop):
    if name == "vlstm" and not ON_GPU:
        pytest.skip("the interpreter takes a minute for it")
    expected = expected_of(name)
    with kernels_run_here():
        actual = results(name, "mosaic", loop)
    tolerance = 3e-2 if CASES[name][3:] else 1e-5
    if name == "mlp_fp8" and ON_GPU:  # sums in another order move an element of h by a step of e4m3
        tolerance = 6e-2
    for a, e in zip(actual, expected, strict=True):
        a, e = (np.asarray(x, np.float32) for x in (a, e))
        assert a.shape == e.shape
        assert np.sqrt(np.mean((a - e) ** 2)) <= tolerance * (0.1 + np.sqrt(np.mean(e**2)))
