"""A linear layer whose weight has 8, 4, 2 or 1 bits: quantized_linear.

    y = x w' + bias,   w' = level s + offset (formats.py),   dx = dy w'^T

A product with few rows of x reads the whole weight, so memory limits the speed, and 4 bits take a
quarter of the time of bfloat16.  The kernels (gemv.py for one row, matmul.py for 2 to 64, gemm.py
for more) unpack words in registers and multiply on the tensor core; w' never exists in memory.
XLA writes w' and reads it again, which is nine times the bytes for 4 bits.

For many rows `weight.plain()` can take the weight's place.  x is then quantised, too, and the
tensor core multiplies 8 bits twice as fast as bfloat16.

    x ~ codes t,   t = max |x| / 127 (int8) or / 448 (fp8) of a row;   w' = codes s of a column
    |x - codes t|  at most t / 2 (int8), or 2^-4 |x| + 2^-10 t (fp8), and float32's rounding

XLA quantises the rows in two small kernels and multiplies by cuBLASLt or by Triton, whichever it
times faster.  Sums of int8 are exact, in int32; an H100 adds fp8 products with about 14 bits.

All forms add in float32.  XLA and the kernels of several rows round w' to x's dtype; the kernel of
one row does not round it.  The gradient of x, for LoRA, is gemm.py's kernel for 4 and 8 bits and
more than 64 rows; otherwise XLA dequantizes and multiplies.  The weight has no gradient.

Frantar et al. 2024, "MARLIN"; Park et al. 2022, "LUT-GEMM"; Dettmers et al. 2022, "LLM.int8()";
Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.options import checked, with_gradient
from pallas_kernels.quantized import formats, gemm, gemv, matmul
from pallas_kernels.quantized.formats import PlainWeight, QuantizedWeight, dequantize

# The most that was measured: an H100 takes 631 us for 4096 rows and 4096 x 14336 of 4 bits.  XLA,
# which dequantizes first, takes 956; with some 30,000 rows it should be as fast.
MOST_ROWS = 4096


@checked
def quantized_linear(
    x: Float[Array, "*rows K"],
    weight: QuantizedWeight | PlainWeight,
    bias: Float[Array, " N"] | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows N"]:
    """x w' + bias for a packed weight, which stands for the matrix w'; sums and bias in float32.

    dtype: of the result; None: x's.  float32 keeps apart logits that are equal in bfloat16.
    weight: `weight.plain()` quantises each row of x to the weight's own int8 or fp8; it has no
    kernel, and its gradient ignores that rounding of x.
    The kernel needs bfloat16 and at most 4096 rows, and for more than one row a Hopper GPU.
    Gradients go to x and bias.
    """
    _check(x, weight, bias)
    forms = ONE_ROW if x.size == weight.shape[0] else FORMS
    if isinstance(weight, PlainWeight) and implementation is None:
        forms = FORMS[-1:]  # no kernel is missing, which the log would say
    return dispatch.run("quantized_linear", forms, implementation, x, weight, bias, dtype=dtype)


def _rows(x, weight, bias, *, dtype, kernel=True):
    dtype = jnp.dtype(dtype or x.dtype)
    y = _linear(x.reshape(-1, x.shape[-1]) if kernel else x, weight, bias, dtype, kernel)
    return y.reshape(*x.shape[:-1], weight.shape[1])


def why_not(x, weight, bias=None, **options) -> str | None:
    if isinstance(weight, PlainWeight):
        return "the weight is plain, and XLA has cuBLASLt for it"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, not bfloat16"
    if (rows := x.size // max(x.shape[-1], 1)) > MOST_ROWS:
        return f"rows={rows} are more than {MOST_ROWS}"
    return mosaic.empty(x=x)


def _check(x, weight, bias):
    formats.check_packed(weight)
    k, n = weight.shape
    if not x.ndim or x.shape[-1] != k:
        raise ValueError(f"x has shape {x.shape}, but the weight needs (..., {k})")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {bias.shape}, but the weight needs ({n},)")


def _product(x, weight, bias, dtype, kernel: bool):
    """The op for x, by the kernels, which take (M, K), or XLA."""
    if kernel and x.shape[0] == 1:
        return gemv.products(x[0], (weight,), (bias,), (dtype,))[0][None]
    bare, many = bias is None and dtype == x.dtype, kernel and len(x) > matmul.MAX_ROWS
    if bare and many and gemm.plan(x.shape[0], weight).splits == 1:
        return gemm.linear(x, weight)
    wide = mosaic.stat_dtype(x.dtype)
    if isinstance(weight, PlainWeight):
        y = _plain_sums(x, weight, dtype)
    elif not kernel:
        y = jnp.matmul(x, _dense(weight, x), preferred_element_type=wide)
    else:
        parts = gemm.sums(x, weight) if many else matmul.product(x, weight)
        y = functools.reduce(jnp.add, parts)  # in order, which jnp.sum does not promise
        y = y[: weight.shape[1], : x.shape[0]].T
    return mosaic.plus(y, bias).astype(dtype)


def _plain_sums(x, weight: PlainWeight, dtype):
    """x w' in float32 for x (..., K), quantised by row (float64 for float64).

    dtype: of the result that the caller makes of these sums.
    """
    codes, t = quantize_rows(x, weight.codes.dtype)
    # Sums of fp8 as bfloat16 are half the bytes: for 4096 x 4096 x 14336 an H100 takes 416 us, and
    # 470 with float32.  y is then rounded twice, unless XLA keeps the sums wider.
    out = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    out = jnp.int32 if codes.dtype == jnp.int8 else out
    along_k = (((x.ndim - 1,), (1,)), ((), ()))
    sums = lax.dot_general(codes, weight.codes, along_k, preferred_element_type=out)
    return sums.astype(t.dtype) * t * weight.scales


def quantize_rows(x, dtype):
    """x (..., K) as codes in int8 or float8_e4m3fn, and scales (..., 1): x is about their product.

    A row that is not finite gets a scale that is not finite.
    """
    x = x.astype(mosaic.stat_dtype(x.dtype))
    integer = dtype == jnp.int8
    scales = jnp.abs(x).max(-1, keepdims=True) / (127 if integer else formats.E4M3_MAX)
    v = x / jnp.where(scales == 0, 1, scales)
    return (jnp.round(v) if integer else v).astype(dtype), scales


def _forward(x, weight, bias, dtype, kernel):
    like = x[:0], None if bias is None else bias[:0]
    return _product(x, weight, bias, dtype, kernel), (weight, *like)


def _backward(dtype, kernel, saved, dy):
    weight, like, bias = saved
    rows, wide = tuple(range(dy.ndim - 1)), mosaic.stat_dtype(like.dtype)
    dbias = None if bias is None else dy.astype(wide).sum(rows).astype(bias.dtype)
    dy = dy.astype(like.dtype)
    if kernel and len(dy) > matmul.MAX_ROWS and gemm.has_gradient(weight):
        return gemm.linear(dy, weight, back=True), None, dbias
    return jnp.matmul(dy, _dense(weight, dy).T), None, dbias


def _dense(weight, x):
    """w' in x's dtype, made to depend on x; otherwise XLA dequantizes every layer up front.

    XLA merges equal, independent work, after it has removed optimization barriers.  So the words
    depend on x through a zero that XLA cannot see through.
    """
    if isinstance(weight, QuantizedWeight) and x.size:
        zero = jnp.minimum((x[(0,) * x.ndim] != 0).astype(jnp.int32), 0)
        weight = dataclasses.replace(weight, words=weight.words + zero)
    return dequantize(weight, x.dtype)


_linear = with_gradient(_forward, _backward, nondiff_argnums=(3, 4))

_ON_XLA = Form("xla", functools.partial(_rows, kernel=False))
FORMS = Form("hopper", _rows, "sm_90a", why_not), _ON_XLA
ONE_ROW = Form("general", _rows, "sm_80", why_not), _ON_XLA
