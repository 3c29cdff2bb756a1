"""A linear layer whose weight has 8, 4, 2 or 1 bits: quantized_linear.

    y = activation(x w' + bias),   w' = level s + offset (formats.py),   dx = dy w'^T

Few rows of x read the whole weight, so memory limits the speed, and 4 bits take a quarter of
the time of bfloat16.  The kernels, gemv.py for one row, matmul.py for 2 to 64 and
gemm.py for more, unpack words in registers and multiply on the tensor core; w' never exists in
memory.  XLA writes w' and reads it again, which is nine times the bytes for 4 bits.

With `weight.plain()` in place of the weight x is quantised, too (plain.py), for many rows.

All forms add in float32.  XLA and the kernels of several rows round w' to x's dtype; the kernel of
one row does not round it.  The gradient of x, for LoRA, is gemm.py's kernel for 4 and 8 bits and
more than 64 rows; otherwise XLA dequantizes and multiplies.  The weight has no gradient.  Frantar
et al. 2024, "MARLIN", and Park et al. 2022, "LUT-GEMM", describe such kernels.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations.activation import gelu_reference
from pallas_kernels.dispatch import Form
from pallas_kernels.options import checked, custom_vjp
from pallas_kernels.quantized import gemm, gemv, matmul, plain
from pallas_kernels.quantized.formats import (
    PlainWeight,
    QuantizedWeight,
    check_packed,
    dequantize,
)

Activation = Literal["gelu", "silu"]
# The most that was measured: an H100 takes 631 us for 4096 rows and 4096 x 14336 of 4 bits.  XLA,
# which dequantizes first, takes 956; with some 30,000 rows it should be as fast.
MOST_ROWS = 4096
_ACTIVATIONS = {
    None: lambda y: y,
    "gelu": gelu_reference,
    "silu": jax.nn.silu,
}


@checked
def quantized_linear(
    x: Float[Array, "*rows K"],
    weight: QuantizedWeight | PlainWeight,
    bias: Float[Array, " N"] | None = None,
    *,
    activation: Activation | None = None,
    dtype=None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows N"]:
    """activation(x w' + bias), with sums, bias and activation in float32.

    activation: None, "gelu" (its tanh form) or "silu".
    dtype: of the result; None: x's.  float32 keeps apart logits that are equal in bfloat16.
    weight: `weight.plain()` quantises each row of x to the weight's own int8 or fp8; it has no
    kernel, and its gradient ignores that rounding of x.
    The kernel needs bfloat16 and at most 4096 rows, and for more than one row a Hopper GPU.
    Gradients go to x and bias.
    Raises ValueError for shapes that do not fit or a damaged weight, NotImplementedError under
    implementation="mosaic" for a call that the kernel does not support.
    """
    _check(x, weight, bias)
    if isinstance(weight, PlainWeight):
        implementation = implementation or "xla"
    forms = ONE_ROW if _row_count(x) == 1 else FORMS
    options = dict(activation=activation, dtype=dtype)
    return dispatch.run("quantized_linear", forms, implementation, x, weight, bias, **options)


def quantized_linear_reference(x, weight, bias=None, *, activation=None, dtype=None):
    """The formula in jnp: dequantize to x's dtype, and a matmul with sums in float32."""
    return _rows(x, weight, bias, activation=activation, dtype=dtype, kernel=False)


def _row_count(x) -> int:
    return x.size // max(x.shape[-1], 1)


def _rows(x, weight, bias, *, activation, dtype, kernel=True):
    dtype = jnp.dtype(dtype or x.dtype)
    y = _linear(x.reshape(-1, x.shape[-1]), weight, bias, activation, dtype, kernel)
    return y.reshape(*x.shape[:-1], weight.shape[1])


def why_not(x, weight, bias=None, **options) -> str | None:
    """Why the kernel does not support this call, or None."""
    if isinstance(weight, PlainWeight):
        return "the weight is plain, and XLA has cuBLASLt for it"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, not bfloat16"
    if (rows := _row_count(x)) > MOST_ROWS:
        return f"rows={rows} are more than {MOST_ROWS}"
    return mosaic.empty(x=x)


def _check(x, weight, bias):
    """Raises ValueError for arrays that do not fit."""
    check_packed(weight)
    k, n = weight.shape
    if not x.ndim or x.shape[-1] != k:
        raise ValueError(f"x has shape {x.shape}, but the weight needs (..., {k})")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {bias.shape}, but the weight needs ({n},)")


@functools.partial(custom_vjp, nondiff_argnums=(3, 4, 5))
def _linear(x, weight, bias, activation, dtype, kernel: bool):
    """The op for x (M, K), by the kernels or XLA."""
    if kernel and x.shape[0] == 1:
        (y,) = gemv.products(x[0], (weight,), (bias,), (dtype,), activation=activation)
        return y[None]
    if kernel and dtype == x.dtype and _many(x) and gemm.plan(x.shape[0], weight).splits == 1:
        return gemm.linear(x, weight, bias, activation)
    return _finish(_sums(x, weight, dtype, kernel), bias, activation, dtype)


def _sums(x, weight, dtype, kernel: bool):
    """x w' in float32 (float64 for float64); dtype: the result's."""
    wide = mosaic.stat_dtype(x.dtype)
    if isinstance(weight, PlainWeight):
        return plain.product(x, weight, dtype)
    if not kernel:
        return jnp.matmul(x, _dense(weight, x), preferred_element_type=wide)
    if x.shape[0] == 1:
        return gemv.products(x[0], (weight,), (None,), (wide,))[0][None]
    parts = gemm.sums(x, weight) if _many(x) else matmul.product(x, weight)
    y = functools.reduce(jnp.add, parts)  # in order, which jnp.sum does not promise
    return y[: weight.shape[1], : x.shape[0]].T


def _many(x) -> bool:
    return x.shape[0] > matmul.MAX_ROWS


def _finish(y, bias, activation, dtype):
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return _ACTIVATIONS[activation](y).astype(dtype)


def _forward(x, weight, bias, activation, dtype, kernel):
    if activation is None:  # then the gradients need no y, and the kernel may round it itself
        y = _linear(x, weight, bias, activation, dtype, kernel)
        return y, (weight, bias, None, x[:0])
    y = _sums(x, weight, dtype, kernel)
    return _finish(y, bias, activation, dtype), (weight, bias, y, x[:0])


def _backward(activation, dtype, kernel, saved, dz):
    weight, bias, y, like = saved
    y = dz.astype(mosaic.stat_dtype(like.dtype)) if y is None else y
    _, pull = jax.vjp(lambda y, bias: _finish(y, bias, activation, dtype), y, bias)
    dy, dbias = pull(dz)
    dy = dy.astype(like.dtype)
    if kernel and _many(dy) and gemm.has_gradient(weight):
        return gemm.linear(dy, weight, back=True), None, dbias
    return jnp.matmul(dy, _dense(weight, dy).T), None, dbias


def _dense(weight, x):
    """w' in x's dtype, made to depend on x; otherwise XLA dequantizes every layer up front.

    XLA merges equal, independent work, after it has removed optimization barriers.  So the words
    depend on x through a zero that XLA cannot see through.
    """
    if isinstance(weight, QuantizedWeight) and x.size:
        zero = jnp.minimum((x.reshape(-1)[0] != 0).astype(jnp.int32), 0)
        weight = dataclasses.replace(weight, words=weight.words + zero)
    return dequantize(weight, x.dtype)


_linear.defvjp(_forward, _backward)

ONE_ROW = (
    Form("general", _rows, "sm_80", why_not),
    Form("xla", quantized_linear_reference),
)
FORMS = (
    Form("hopper", _rows, "sm_90a", why_not),
    Form("xla", quantized_linear_reference),
)
