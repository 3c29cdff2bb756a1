"""A small call of every op and of its variants, for two members at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from kernel_checks import normal

import pallas_kernels as ops
from pallas_kernels.bench import compiling, operands
from pallas_kernels.bench.cases import CASES as BENCHMARKS

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
    "vlstm": (ops.vlstm, [*[(2, 1, 1, 64, 64)] * 3, *[(2, 1, 1, 64)] * 2], [], BF16),
    "vlstm_packed": (
        lambda x, i, f, **o: ops.vlstm(ops.Packed(x, ((1, 64),) * 3), None, None, i, f, **o),
        [(2, 1, 64, 192), *[(2, 1, 64, 1)] * 2],
        [],
        BF16,
    ),
    "vlstm_gated": (
        lambda x, i, f, w, **o: ops.vlstm(
            ops.Packed(x, ((1, 64),) * 4), None, None, i, f, norm_weight=w, **o
        ),
        [(2, 1, 64, 256), *[(2, 1, 64, 1)] * 2, (2, 1, 64)],
        [],
        BF16,
    ),
}


def _of_benchmark(case):
    """The first case of an op that has no call above, at its small sizes; floats come first."""
    found = operands.arrays(case, operands.small(case, case.sizes[0]))
    floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]
    whole = [np.stack([x, x]) for x in found[len(floats) :]]
    op = lambda *a, **o: compiling.public(case, **o)(*a)
    return op, [(2, *x.shape) for x in floats], whole, floats[0].dtype


for _case in BENCHMARKS:
    if _case.op not in CASES:
        CASES[_case.op] = _of_benchmark(_case)
