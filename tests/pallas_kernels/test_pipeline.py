"""The ring of pipeline.py alone: every step arrives once, in order, and no slot is filled early."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_checks import ON_GPU, kernels_run_here

from pallas_kernels import mosaic
from pallas_kernels.pipeline import Ring

TILE = 4, 128


def load(smem, slot):
    return mosaic.load(smem.at[slot], mosaic.warp_rows(4))


def call(body, x, slots, *, lengths=None, wgs=2, rings=1):
    """body(ring's slots, x, out, smem, full, free) for out (wgs, steps, *TILE)."""
    steps = len(x)
    kernel = mosaic.kernel(
        functools.partial(body, slots, lengths),
        name="ring",
        out_type=jax.ShapeDtypeStruct((wgs, steps, *TILE), jnp.float32),
        scratch_types=dict(
            smem=plgpu.SMEM((rings * slots, *TILE), jnp.float32),
            full=plgpu.Barrier(num_barriers=rings * slots),
            free=plgpu.Barrier(num_arrivals=wgs, num_barriers=slots),
        ),
        num_threads=wgs,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    jax.jit(kernel).trace(x).lower(lowering_platforms=("cuda",))
    with kernels_run_here():
        return np.asarray(kernel(x))


def shared(slots, _, x, out, smem, full, free):
    """Both warpgroups read every step; the second one loads."""
    steps, wg = x.shape[0], lax.axis_index("wg")
    ring = Ring(slots, full, free, wg=wg, loader=1)
    send = lambda n: pl.when(n < steps)(lambda: ring.send(n, x.at[n], smem))
    pl.when(wg == 1)(lambda: pl.loop(0, slots)(send))

    @pl.loop(0, steps)
    def _(n):
        value = load(smem, ring.wait(n))
        plgpu.commit_smem()  # all four warps have read
        ring.release(n)
        mosaic.store(out.at[wg, n], value * (1.0 + wg))
        ring.refill(n, send)


def own(slots, _, x, out, smem, full, free):
    """Each warpgroup has its ring and takes every other step; nobody else reads them."""
    steps, wg = x.shape[0], lax.axis_index("wg")
    ring = Ring(slots, full, first=wg * slots, flat=True)
    send = lambda n: pl.when(2 * n + wg < steps)(lambda: ring.send(n, x.at[2 * n + wg], smem))
    pl.loop(0, slots)(send)

    @pl.loop(0, lax.div(steps + 1 - wg, jnp.int32(2)))
    def _(n):
        mosaic.store(out.at[0, 2 * n + wg], load(smem, ring.wait(n)))
        plgpu.commit_smem()
        send(n + slots)


def across_items(slots, lengths, x, out, smem, full, free):
    """The loader runs slots - 1 steps ahead, past the ends of items, before it reads a step."""
    steps, wg, ahead = x.shape[0], lax.axis_index("wg"), slots - 1
    ring = Ring(slots, full, free)

    def send(n):
        @pl.when((wg == 0) & (n < steps))
        def _():
            ring.claim(n)
            ring.send(n, x.at[n], smem)

    pl.loop(0, ahead)(send)
    n0 = 0
    for length in lengths:

        @pl.loop(n0, n0 + length)
        def _(n, n0=n0):
            value = load(smem, ring.wait(n))
            send(n + ahead)
            plgpu.commit_smem()
            ring.release(n)
            mosaic.store(out.at[wg, n], value + n0)

        n0 += length


def tiles(steps):
    x = np.random.default_rng(0).standard_normal((steps, *TILE))
    return jnp.asarray(x, jnp.float32)


# Rounds up to the ninth (a barrier has two parities), one slot, fewer steps than slots.
@pytest.mark.parametrize(("steps", "slots"), [(17, 2), (5, 1), (2, 4), slow(13, 3)])
def test_every_reader_gets_every_step(steps, slots):
    x = tiles(steps)
    np.testing.assert_array_equal(call(shared, x, slots), [x, 2 * x])


@pytest.mark.parametrize(("steps", "slots"), [(17, 2), (1, 3)])
def test_rings_of_their_own(steps, slots):
    x = tiles(steps)
    np.testing.assert_array_equal(call(own, x, slots, rings=2)[0], x)


@pytest.mark.parametrize(("lengths", "slots"), [((5, 1, 2, 7), 3), ((1, 1, 1), 4)])
def test_loads_run_ahead_across_items(lengths, slots):
    x = tiles(sum(lengths))
    starts = np.cumsum((0, *lengths[:-1])).repeat(lengths)[:, None, None]
    want = x + jnp.float32(starts)
    np.testing.assert_array_equal(call(across_items, x, slots, lengths=lengths), [want, want])


@pytest.mark.skipif(ON_GPU, reason="a race natively ends the process's CUDA context")
@pytest.mark.parametrize("method", ["wait", "claim"])
def test_a_step_that_nobody_waits_for_is_a_race(monkeypatch, method):
    """The tests above can fail: without a wait the interpreter objects."""
    without = {"wait": lambda ring, n: ring.slot(n), "claim": lambda ring, n: None}
    monkeypatch.setattr(Ring, method, without[method])
    with pytest.raises(Exception, match=r"(?i)race|barrier"):
        call(across_items, tiles(9), 2, lengths=(9,))
