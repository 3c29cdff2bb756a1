"""The interpreter that stands behind the other tests finds races, and computes as JAX does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_jaxpr
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_checks import ON_GPU, kernels_run_here, normal

from pallas_kernels import mosaic


def _hand_over(synchronised, x_ref, y_ref, *, smem, bar):
    """Warpgroup 0 writes x to shared memory, and warpgroup 1 reads it there."""
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _():
        smem[...] = x_ref[...]
        if synchronised:
            plgpu.commit_smem()
            plgpu.barrier_arrive(bar)

    @pl.when(wg == 1)
    def _():
        if synchronised:
            plgpu.barrier_wait(bar)
        y_ref[...] = smem[...]


def _handed_over(x, synchronised):
    call = mosaic.kernel(
        functools.partial(_hand_over, synchronised),
        name="hand_over",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=dict(smem=plgpu.SMEM(x.shape, x.dtype), bar=plgpu.Barrier()),
        num_threads=2,
        thread_name="wg",
        **mosaic.grid(block=1),
    )
    with kernels_run_here():
        return jax.block_until_ready(jax.jit(call)(x))


def _copy_two(x_ref, y_ref, out_ref, *, smem, bar):
    """Copies x to the only tile of columns of `out`, and y past it."""
    for i, ref in enumerate((x_ref, y_ref)):
        plgpu.copy_gmem_to_smem(ref, smem, bar)
        plgpu.barrier_wait(bar)
        first = (lax.axis_index("block") + i) * 64
        plgpu.copy_smem_to_gmem(smem, out_ref.at[:, pl.ds(first, 64)])
        plgpu.wait_smem_to_gmem(0)


def test_a_copy_past_a_single_tile_lands_on_it():
    """As on a GPU with JAX 0.12: kernels must not count on it to change nothing."""
    x, y = (normal(i, (64, 64), jnp.bfloat16) for i in range(2))
    tiles = mosaic.wgmma_tiles(64, x.dtype)
    call = mosaic.kernel(
        _copy_two,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=dict(
            smem=plgpu.SMEM(x.shape, x.dtype, transforms=tiles), bar=plgpu.Barrier()
        ),
        **mosaic.grid(block=1),
    )
    with kernels_run_here():
        np.testing.assert_array_equal(jax.jit(call)(x, y), y)


def _copy_second(x_ref, out_ref, *, smem, bar):
    """Copies the second member of x, of which there may be only one."""
    plgpu.copy_gmem_to_smem(x_ref.at[lax.axis_index("block") + 1], smem, bar)
    plgpu.barrier_wait(bar)
    out_ref[...] = smem[...]


@pytest.mark.parametrize("members", [1, 2])
def test_a_copy_past_an_axis_of_length_one_lands_on_it(members):
    x = normal(0, (members, 128))
    call = mosaic.kernel(
        _copy_second,
        out_type=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        scratch_types=dict(smem=plgpu.SMEM(x.shape[1:], x.dtype), bar=plgpu.Barrier()),
        **mosaic.grid(block=1),
    )
    with kernels_run_here():
        np.testing.assert_array_equal(jax.jit(call)(x), x[-1])


def test_a_barrier_hands_over():
    x = normal(0, (128,))
    np.testing.assert_array_equal(_handed_over(x, True), x)


@pytest.mark.skipif(ON_GPU, reason="only the interpreter looks for races")
def test_a_missing_barrier_is_a_race():
    with pytest.raises(Exception, match="race"):
        _handed_over(normal(0, (128,)), False)


def _of_floats(x, y):
    z = jnp.where(x > y, jnp.exp2(x), jnp.tanh(y)) / (1 + jnp.abs(y)) - jnp.maximum(x, 0.5)
    z = lax.fori_loop(0, 3, lambda i, z: z * 0.5 + i, z.T)  # a scan
    z = lax.while_loop(lambda z: jnp.sum(z) < 100, lambda z: z + 1, z)
    z = lax.dynamic_update_slice(z, jnp.log(x[:1, :1] ** 2 + 1), (7, 1))
    part = lax.dynamic_slice(z, (jnp.int32(99), jnp.int32(-1)), (2, 3))  # moved inside
    kind = lax.switch(jnp.int32(1), [jnp.sin, jnp.cos, jnp.sqrt], part)
    z = jnp.concatenate([part, kind, jnp.sort(part)]).astype(jnp.bfloat16)  # sort has no rule
    return z.sum(0), jnp.clip(z, -1, 1).max(), lax.rsqrt(jnp.float32(2))


def _of_integers(x, y):
    n = (x * 100).astype(jnp.int32)
    d = jnp.where(y > 0, 3, -3).astype(jnp.int32)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    shifts = lax.shift_right_logical(bits, 3), bits >> 2, (bits << 1) ^ 5, ~bits | 8
    return lax.div(n, d), lax.rem(n, d), *shifts, n * 2**30, lax.cumsum(n), n.min(), jnp.sign(n)


@pytest.mark.parametrize("f", [_of_floats, _of_integers])
def test_numpy_computes_as_jax_does(f):
    x, y = normal(1, (5, 4)), normal(2, (5, 4))
    traced = jax.make_jaxpr(f)(x, y)
    found = numpy_jaxpr.evaluate(traced.jaxpr, traced.consts, x, y)
    for a, e in zip(found, f(x, y), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(np.float32(a), np.float32(e), rtol=1e-6)
