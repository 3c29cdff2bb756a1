"""Attention backward at a head dimension of 256: two warpgroups sum dK and dV of the same 64 keys.

Each has registers for one of the two.  P^T goes from one to the other through shared memory, in
fp32; no matmul is done twice.  The rings and the steps are those of backward_dkv.py.

    warpgroup 0:  S^T = K Q^T, P^T, dV += P^T dO   -- p_full -->   warpgroup 1:  dP^T = V dO^T,
                                                  <-- p_free --                  dS^T, dK += dS^T Q
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.backward_dkv import (
    Worker,
    across,
    all_heads,
    column,
    load_later,
    probabilities,
    release,
    store_dk,
    store_dv,
    wait_for_k,
)
from pallas_kernels.flash_attention.keys import Item, Step
from pallas_kernels.mosaic import ROWS, WGMMA


def differentiate_in_pairs(w: Worker, i: Item):
    """The first warpgroup sums and stores dV, the second dK."""
    acc = plgpu.ACC((ROWS, w.schedule.width), jnp.float32)
    pl.when(w.wg == 0)(lambda: pl.run_scoped(functools.partial(sum_dv, w, i), acc))
    pl.when(w.wg == 1)(lambda: pl.run_scoped(functools.partial(sum_dk, w, i), acc))


def sum_dv(w: Worker, i: Item, dv_acc):
    k_ids = wait_for_k(w, i)
    all_heads(w, i, functools.partial(add_dv, w, i, k_ids, dv_acc))
    store_dv(w, i, dv_acc[...])


def sum_dk(w: Worker, i: Item, dk_acc):
    plgpu.barrier_wait(w.smem.v_bars.at[i.at])
    all_heads(w, i, functools.partial(add_dk, w, i, dk_acc))
    store_dk(w, i, dk_acc[...])


def add_dv(w: Worker, i: Item, k_ids, dv_acc, step: Step, slot, masked, begins):
    """Hands P over, and adds P^T dO to dV."""
    s, smem = w.schedule, w.smem

    def add(s_acc):
        # Compute P.
        across(s_acc, smem.k.at[i.at], smem.q.at[slot])
        scores = s_acc[...]
        if not begins:
            release(w, step.n - 1)
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked)
        # Hand it over.
        plgpu.barrier_wait(smem.p_free)
        smem.p[...] = p if slope is None else p * slope
        plgpu.barrier_arrive(smem.p_full)
        # Accumulate dV, under the next step.
        plgpu.barrier_wait(smem.do_full.at[slot])
        plgpu.wgmma(dv_acc, p.astype(s.dtype), smem.do.at[slot])

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))


def add_dk(w: Worker, i: Item, dk_acc, step: Step, slot, masked, begins):
    """Takes P, and adds dS^T Q to dK; the mask is in P."""
    s, smem = w.schedule, w.smem

    def add(dp_acc):
        # Compute dP.
        plgpu.barrier_wait(smem.do_full.at[slot])
        across(dp_acc, smem.v.at[i.at], smem.do.at[slot])
        dp = dp_acc[...]
        if not begins:
            release(w, step.n - 1)
        load_later(w, i, step.g, step.r)
        # Take P, compute dS.
        plgpu.barrier_wait(smem.p_full)
        p = plgpu.load(smem.p, layout=WGMMA)
        ds = (p * (dp + column(w, smem.minus_delta, slot))).astype(s.dtype)
        plgpu.barrier_arrive(smem.p_free)
        # Accumulate dK, under the next step.
        plgpu.wgmma(dk_acc, ds, smem.q.at[slot])

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))
