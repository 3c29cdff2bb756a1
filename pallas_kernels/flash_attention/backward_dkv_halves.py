"""dK and dV at a head dimension of 64: a step has 128 queries, in two halves a and b.

    tensor core    S of both, dP a |       | dV a     | dP b, dK a | dV b     | dK b, the next S
    warpgroup                      | P a   | dS a     | P b        | dS b     |

wgmma reads both operands of S from shared memory.  For 64 queries that takes as long as it
multiplies, for 128 three quarters of it, so S of both halves is one wgmma, and b waits in
registers.  A step instead of two also halves what a step takes besides: barriers, indices, copies.
Wider heads leave no registers for b.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.backward_dkv import (
    Worker,
    across,
    column,
    load_later,
    own,
    probabilities,
    release,
)
from pallas_kernels.flash_attention.backward_dkv_alone import sum_own_keys
from pallas_kernels.flash_attention.keys import Item, Step
from pallas_kernels.mosaic import ROWS


def differentiate_in_halves(w: Worker, i: Item):
    """A warpgroup sums dK and dV of its own 64 keys."""
    sum_own_keys(w, i, add_halves)


def add_halves(w: Worker, i: Item, k_ids, dk_acc, dv_acc, step: Step, slot, masked, begins):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    here = own(w, i, step)
    halves = [pl.ds(side * ROWS, ROWS) for side in range(2)]
    q, do = ([ref.at[slot, rows] for rows in halves] for ref in (smem.q, smem.do))
    acc = plgpu.ACC((ROWS, ROWS), jnp.float32)

    def to_dv(scores, side):
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked, side)
        plgpu.wgmma(dv_acc, p.astype(s.dtype), do[side])
        return p, slope

    def gradient(p, slope, dp):
        ds = p * dp
        return (ds if slope is None else ds * slope).astype(s.dtype)

    def first(s_acc, dp_acc):
        plgpu.barrier_wait(smem.do_full.at[slot])
        dp_acc[...] = column(w, smem.minus_delta, slot, 0)
        across(s_acc, smem.k.at[here], smem.q.at[slot])
        across(dp_acc, smem.v.at[here], do[0])
        load_later(w, i, step.g, step.r)
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        if not begins:
            release(w, step.n - 1)
        p, slope = to_dv(scores[:, :ROWS], 0)
        ds = gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=1))
        pl.run_scoped(functools.partial(second, ds, scores[:, ROWS:]), acc)

    def second(ds, scores, dp_acc):
        dp_acc[...] = column(w, smem.minus_delta, slot, 1)
        across(dp_acc, smem.v.at[here], do[1])
        plgpu.wgmma(dk_acc, ds, q[0])
        p, slope = to_dv(scores, 1)
        ds = gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=2))
        plgpu.wgmma(dk_acc, ds, q[1])

    pl.run_scoped(first, plgpu.ACC((ROWS, s.columns), jnp.float32), acc)
