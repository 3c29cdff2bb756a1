"""The product of quantized_linear where x is quantised, too: int8 x int8 and fp8 x fp8.

    x ~ codes t,   t = max |x| / 127 (int8) or / 448 (fp8) of a row;   w' = codes s of a column
    x w' ~ (sum over k of codes codes) t s

Many rows take as long as the tensor core multiplies, and it multiplies 8 bits twice as fast as
bfloat16.  XLA quantises the rows in two small kernels, multiplies by cuBLASLt or by Triton,
whichever it times faster, and scales the sums in the kernel that adds the bias.  The sums of int8
are exact, in int32; fp8 sums have the result's dtype, and an H100 adds about 14 bits of them.

    |x - codes t|   at most t / 2 (int8), or 2^-4 |x| + 2^-10 t (fp8), and float32's rounding

Dettmers et al. 2022, "LLM.int8()", and Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.quantized.formats import E4M3_MAX, PlainWeight


def product(x, weight: PlainWeight, dtype):
    """x w' in float32 (M, N) for x (M, K), quantised by row (float64 for float64).

    dtype: of the result that is made of it.
    """
    codes, t = quantize_rows(x, weight.codes.dtype)
    # Sums of fp8 as bfloat16 are half the bytes: for 4096 x 4096 x 14336 an H100 takes 416 us, and
    # 470 with float32.  y is then rounded twice, unless XLA keeps the sums wider.
    out = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    out = jnp.int32 if codes.dtype == jnp.int8 else out
    along_k = (((1,), (1,)), ((), ()))
    sums = lax.dot_general(codes, weight.codes, along_k, preferred_element_type=out)
    return sums.astype(t.dtype) * t * weight.scales


def quantize_rows(x, dtype):
    """x (M, K) as codes in int8 or float8_e4m3fn, and scales (M, 1): x is about their product.

    A row that is not finite gets a scale that is not.
    """
    x = x.astype(mosaic.stat_dtype(x.dtype))
    integer = dtype == jnp.int8
    scales = jnp.abs(x).max(1, keepdims=True) / (127 if integer else E4M3_MAX)
    v = x / jnp.where(scales == 0, 1, scales)
    return (jnp.round(v) if integer else v).astype(dtype), scales
