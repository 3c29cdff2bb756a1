"""A linear layer for training whose three matmuls take 8-bit floating-point operands: fp8_linear.

    y = Q4(x) Q4(w),   dx = Q5(dy) Q4(w)^T,   dw = Q4(x)^T Q5(dy)

Q4(a) is a rounded to e4m3 (3 bits of mantissa, up to 448), Q5(a) to e5m2 (2 bits, up to 57344),
after a multiplication by a power of 2 that brings max |a| close to the limit, and which the product
divides out again (quantize.py).  The power comes from the current tensor, so training carries no
scaling state.  Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3.

XLA replaces a dot_general of converted and scaled fp8 arrays with one call of cuBLASLt's fp8
matmul, which multiplies its float32 sums by both scales and rounds once.  XLA 0.12 does this only
with XLA_FLAGS=--xla_gpu_enable_triton_gemm=false, which train.py sets; otherwise it multiplies in
bfloat16, in twice the time.  The gradients' sums over all tokens are the longest, so these products
take HIGHEST, which turns off the "fast accumulation" in about 14 bits.  The backward pass keeps x^T
and w in fp8.  docs/fp8.md has the reasons.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.float8.quantize import TILE, Cast, cast, cast_and_sum, known_norm
from pallas_kernels.options import checked, with_gradient
from pallas_kernels.totals import check_totals, summed

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
_MULTIPLE = 16  # cuBLASLt needs all axes of a matmul in multiples of this


@checked
def fp8_linear(
    x: Float[Array, "*rows K"],
    weight: Float[Array, "K N"],
    bias: Float[Array, " N"] | None = None,
    *,
    row_norm: Float[Array, ""] | None = None,
    total: Float[Array, "K N"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows N"]:
    """x @ weight + bias in x's dtype; this matmul and both gradients' matmuls take fp8 operands.

    The number of rows, K and N must be multiples of 16; other calls compute x @ weight + bias in
    x's dtype, which `dispatch.explain()` reports.
    bias: added in x's dtype; its gradient is summed in float32.
    row_norm: an upper bound on the Euclidean norms of x's rows, if known (as after a norm); x's
    scale then needs no pass over x.  Larger values saturate.
    total: the sum of the weight's gradients so far (totals.py).
    implementation: of the casts.  Their kernels need multiples of 64; the matmuls are always XLA's.
    It is fast only inside jit and with XLA_FLAGS=--xla_gpu_enable_triton_gemm=false.
    An infinity or a NaN in x, weight or dy makes each product that it enters NaN as a whole; with
    row_norm, one in x makes its row NaN.
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[:1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape} are not (..., K) and (K, N)")
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}, not {weight.shape[1:]}")
    if total is not None:
        check_totals((total,), weight)
        if dispatch.shard_map_why_not():  # the devices' gradients are summed, and the total is not
            weight, total = summed(weight, total), None
    row_norm = known_norm(row_norm)
    if (reason := why_not(x, weight)) and implementation != "mosaic":
        why = f"{x.dtype}, not fp8: {reason}"
        dispatch.record(dispatch.Decision("fp8_linear", "xla", "unsupported", why))
        return mosaic.plus(jnp.matmul(x, summed(weight, total).astype(x.dtype)), bias)
    return dispatch.run("fp8_linear", FORMS, implementation, x, weight, bias, row_norm, total)


@functools.cache  # once
def warn_of_flags() -> None:
    """Warns on a GPU if XLA will not find the fp8 matmuls."""
    flag = "xla_gpu_enable_triton_gemm"
    if jax.default_backend() == "gpu" and dispatch.xla_flag(flag) is not False:
        dispatch.log.warning(
            "fp8 matmuls run in bfloat16, up to 5 times slower: set XLA_FLAGS=--%s=false in the"
            " environment before JAX starts",
            flag,
        )


def why_not(x, weight, *others, kernels: bool = False) -> str | None:
    """Why the matmuls cannot take fp8 operands, or the kernels cannot cast them, or None."""
    sizes = dict(rows=x.size // max(x.shape[-1], 1), K=weight.shape[0], N=weight.shape[1])
    reason = mosaic.not_a_multiple(_MULTIPLE, **sizes)
    reason = reason or mosaic.unsupported_dtype(x=x, weight=weight)
    return reason or (mosaic.not_a_multiple(TILE, **sizes) if kernels else None)


def _linear_forward(x, weight, bias, row_norm, total, kernel: bool):
    warn_of_flags()
    x8, w8 = cast(x, FORWARD, kernel, row_norm), cast(weight, FORWARD, kernel)
    like = weight[:0], None if bias is None else bias[:0]
    y = mosaic.plus(times(x8, w8, x.dtype), bias)
    return y, (x8._replace(values=None), w8._replace(transposed=None), like, total)


def _linear_backward(kernel, saved, dy):
    x8, w8, (like_weight, like_bias), total = saved
    dy8, dbias = cast_and_sum(dy, BACKWARD, kernel, like_bias is not None)
    dbias = None if dbias is None else dbias.astype(like_bias.dtype)
    dx, totals = times_weight(dy8, w8, dy.dtype), None if total is None else (total,)
    (dw,), totals = weight_gradients(totals, like_weight.dtype, (x8, dy8))
    return dx, dw, dbias, None, totals and totals[0]  # row_norm has no gradient


# ---- the three products, of casts --------------------------------------------------------------


def times(x: Cast, w: Cast, dtype):
    """x w."""
    return _product(x.values, x.inverse, w.transposed, w.inverse, axes=1, dtype=dtype)


def times_weight(dy: Cast, w: Cast, dtype):
    """dy w^T, the gradient of x."""
    return _product(dy.values, dy.inverse, w.values, w.inverse, axes=1, dtype=dtype, exact=True)


def weight_gradient(x: Cast, dy: Cast, dtype):
    """x^T dy."""
    a, b = x.transposed, dy.transposed
    return _product(a, x.inverse, b, dy.inverse, axes=a.ndim - 1, dtype=dtype, exact=True)


def weight_gradients(totals: tuple | None, dtype, *pairs: tuple[Cast, Cast]) -> tuple:
    """(gradients of weights, gradients of their totals) of pairs (x, dy); totals.py."""
    if totals is None:
        return [weight_gradient(*pair, dtype) for pair in pairs], None
    # In float32, because XLA adds to a total inside an fp8 matmul only if that rounds nothing.
    more = [weight_gradient(*pair, jnp.float32) for pair in pairs]
    return [None] * len(pairs), tuple(t + dw for t, dw in zip(totals, more, strict=True))


def _product(a, a_scale, b, b_scale, *, axes, dtype, exact=False):
    """(a a_scale) (b b_scale)^T over the last `axes` axes of both, in dtype.

    Inside jit XLA recognises this form as an fp8 matmul.  In dtypes other than bfloat16 and float32
    it would not recognise one with float32 scales.
    """
    wide = dtype if dtype == jnp.bfloat16 else jnp.float32
    a, b = (v.astype(wide) * s.astype(wide) for v, s in ((a, a_scale), (b, b_scale)))
    contracted = tuple(range(a.ndim - axes, a.ndim)), tuple(range(b.ndim - axes, b.ndim))
    y = lax.dot_general(
        a, b, (contracted, ((), ())), precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=wide,
        out_sharding=mosaic.place((a, slice(-axes)), (b, slice(-axes))),
    )  # fmt: skip
    return y.astype(dtype)


linear = with_gradient(_linear_forward, _linear_backward, nondiff_argnums=(5,))

_kernels_why_not = functools.partial(why_not, kernels=True)
# The matmuls are XLA's in both.
FORMS = (
    Form("general", lambda *arrays: linear(*arrays, True), "sm_89", _kernels_why_not),
    Form("xla", lambda *arrays: linear(*arrays, False)),
)
