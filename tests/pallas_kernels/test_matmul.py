import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import ON_GPU, assert_error_ratio, assert_lowers, kernels_run_here, normal

import pallas_kernels.gelu
import pallas_kernels.swiglu  # noqa: F401 - the attributes of the package are the functions
from pallas_kernels.matmul_sm90 import Plan, matmul_then, why_not

swiglu, gelu = (sys.modules[f"pallas_kernels.{name}"] for name in ("swiglu", "gelu"))


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "plan", "sms"),
    [
        (swiglu, (384, 192, 256), jnp.bfloat16, Plan(2, 2, 2), 2),  # a low last group of rows
        (gelu, (256, 192, 256), jnp.float16, Plan(3, 3, 8, turns=False), 1),
        (swiglu, (256, 64, 256), jnp.float16, Plan(2, 2, 2, cluster=2), 2),  # one step
        (gelu, (512, 128, 128), jnp.bfloat16, Plan(2, 3, 4, cluster=2), 132),
    ],
)
def test_matmul_then_the_backward_pass_of_an_activation(op, shape, dtype, plan, sms):
    (n, k, f), sums = shape, op is gelu
    a, b = normal(0, (n, k), dtype), normal(1, (f, k), dtype, scale=k**-0.5)
    xs = tuple(normal(2 + i, (n, f), dtype, scale=2) for i in range(1 if sums else 2))
    assert why_not(a, b, xs) is None
    run = functools.partial(
        matmul_then, tile=op._backward_tile, outputs=len(xs), sums=sums, name="and_then",
        plan=plan, sms=sms,
    )  # fmt: skip

    @jax.jit
    def reference(a, b, *xs):
        product = jnp.matmul(a, b.T, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
        ys = op._backward_tile(*(x.astype(product.dtype) for x in xs), product)
        rounded = [y.astype(a.dtype) for y in ys]
        return (*rounded, ys[0].sum(0)) if sums else tuple(rounded)

    assert_lowers(run, (a, b, xs), ["and_then"])
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (a, b, *xs)]
        truth = [np.asarray(y) for y in reference(*wide)]
    with kernels_run_here():
        actual = jax.block_until_ready(run(a, b, xs))
        if ON_GPU:
            for x, y in zip(actual, run(a, b, xs), strict=True):
                assert bool((x == y).all()), "two runs differ"
    for y, e, t in zip(actual, reference(a, b, *xs), truth, strict=True):
        assert (y.shape, y.dtype) == (e.shape, e.dtype)
        assert_error_ratio(y, e, t)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "reason"),
    [
        (((128, 64), (128, 64)), ("float32", "float32"), "a is float32"),
        (((128, 64), (128, 64)), ("bfloat16", "float16"), "b is float16"),
        (((192, 64), (128, 64)), ("bfloat16", "bfloat16"), "N=192 is no multiple of 128"),
        (((128, 64), (192, 64)), ("bfloat16", "bfloat16"), "F=192 is no multiple of 128"),
        (((128, 96), (128, 96)), ("bfloat16", "bfloat16"), "K=96 is no multiple of 64"),
    ],
)
def test_what_the_kernel_does_not_take(shapes, dtypes, reason):
    assert (why_not(*map(jax.ShapeDtypeStruct, shapes, dtypes)) or "").startswith(reason)
