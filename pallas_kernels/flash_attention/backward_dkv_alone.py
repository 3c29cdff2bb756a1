"""dK and dV where a warpgroup has 64 keys of its own, and a step 64 queries: D = 96 and 128."""

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
    own,
    probabilities,
    release,
    store_dk,
    store_dv,
    store_sums,
    wait_for_k,
)
from pallas_kernels.flash_attention.keys import Item, Step
from pallas_kernels.mosaic import ROWS


def differentiate_alone(w: Worker, i: Item):
    """A warpgroup sums dK and dV of its own 64 keys."""
    sum_own_keys(w, i, add_both)


def sum_own_keys(w: Worker, i: Item, add):
    """Sums dK and dV; add: what a step adds, as `add_both`."""

    def both(dk_acc, dv_acc):
        k_ids = wait_for_k(w, i)
        plgpu.barrier_wait(w.smem.v_bars.at[i.at])
        all_heads(w, i, functools.partial(add, w, i, k_ids, dk_acc, dv_acc))
        dk, dv = dk_acc[...], dv_acc[...]
        plgpu.wait_smem_to_gmem(0)  # the block before has left
        store_dk(w, i, dk)
        store_dv(w, i, dv)
        if w.inputs.sums is not None:
            store_sums(w, i)

    acc = plgpu.ACC((ROWS, w.schedule.width), jnp.float32)
    pl.run_scoped(both, acc, acc)


def add_both(w: Worker, i: Item, k_ids, dk_acc, dv_acc, step: Step, slot, masked, _):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    here = own(w, i, step)

    def add(s_acc, dp_acc):
        # Issue S^T = K Q^T and dP^T = V dO^T.
        across(s_acc, smem.k.at[here], smem.q.at[slot])
        plgpu.barrier_wait(smem.do_full.at[slot])
        across(dp_acc, smem.v.at[here], smem.do.at[slot])
        load_later(w, i, step.g, step.r)
        # Compute P under dP, accumulate dV.
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked)
        plgpu.wgmma(dv_acc, p.astype(s.dtype), smem.do.at[slot])
        # Compute dS under dV, accumulate dK.
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        ds = p * (dp + column(w, smem.minus_delta, slot))
        ds = (ds if slope is None else ds * slope).astype(s.dtype)
        plgpu.wgmma(dk_acc, ds, smem.q.at[slot])
        plgpu.wgmma_wait(0)
        release(w, step.n)

    acc = plgpu.ACC((ROWS, s.columns), jnp.float32)
    pl.run_scoped(add, acc, acc)
