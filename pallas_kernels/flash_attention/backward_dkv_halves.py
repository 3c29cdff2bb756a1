"""dK and dV at a head dimension of 64: a step has 128 queries, in two halves.

S and dP of the second half are on their way while the first one is computed:

    warpgroup      | P of a     | dS of a        | P of b     | dS of b   |
    tensor core    | dP a       | dV a, S b      | dK a, dP b | dV b      | dK b, S and dP of the next a

One step instead of two also halves what a step takes besides: barriers, indices, copies.  Wider
heads leave no registers for a second half.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.backward_dkv import (
    Worker,
    all_heads,
    column,
    load_later,
    own,
    probabilities,
    release,
    store_dk,
    store_dv,
    wait_for_k,
)
from pallas_kernels.flash_attention.keys import Item, Step
from pallas_kernels.mosaic import ROWS


def differentiate_in_halves(w: Worker, i: Item):
    """A warpgroup sums dK and dV of its own 64 keys."""

    def both(dk_acc, dv_acc):
        k_ids = wait_for_k(w, i)
        plgpu.barrier_wait(w.smem.v_bars.at[i.at])
        all_heads(w, i, functools.partial(add_halves, w, i, k_ids, dk_acc, dv_acc))
        dk, dv = dk_acc[...], dv_acc[...]
        plgpu.wait_smem_to_gmem(0)  # the block before has left
        store_dk(w, i, dk)
        store_dv(w, i, dv)

    acc = plgpu.ACC((ROWS, w.schedule.width), jnp.float32)
    pl.run_scoped(both, acc, acc)


def add_halves(w: Worker, i: Item, k_ids, dk_acc, dv_acc, step: Step, slot, masked, begins):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    here = own(w, i, step)
    halves = [pl.ds(side * ROWS, ROWS) for side in range(2)]
    q, do = ([ref.at[slot, rows] for rows in halves] for ref in (smem.q, smem.do))
    across = lambda acc, x, y: plgpu.wgmma(acc, x, y.transpose((1, 0)))
    acc = plgpu.ACC((ROWS, ROWS), jnp.float32)

    def to_dv(scores, side):
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked, side)
        plgpu.wgmma(dv_acc, p.astype(s.dtype), do[side])
        return p, slope

    def start_dp(dp_acc, side):
        dp_acc[...] = column(w, smem.delta, slot, side)
        across(dp_acc, smem.v.at[here], do[side])

    def gradient(p, slope, dp):
        ds = p * dp
        return (ds if slope is None else ds * slope).astype(s.dtype)

    def first(s_acc, dp_acc):
        plgpu.barrier_wait(smem.do_full.at[slot])
        dp_acc[...] = column(w, smem.delta, slot, 0)
        across(s_acc, smem.k.at[here], q[0])
        across(dp_acc, smem.v.at[here], do[0])
        load_later(w, i, step.g, step.r)
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        if not begins:
            release(w, step.n - 1)
        p, slope = to_dv(scores, 0)
        ds = gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=1))
        pl.run_scoped(functools.partial(second, ds), acc, acc)

    def second(ds, s_acc, dp_acc):
        dp_acc[...] = column(w, smem.delta, slot, 1)
        across(s_acc, smem.k.at[here], q[1])
        plgpu.wgmma(dk_acc, ds, q[0])
        across(dp_acc, smem.v.at[here], do[1])
        p, slope = to_dv(plgpu.wgmma_accumulator_load(s_acc, wait_n=2), 1)
        ds = gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=1))
        plgpu.wgmma(dk_acc, ds, q[1])

    pl.run_scoped(first, acc, acc)
