"""dQ at a head dimension of 64: a step has 128 keys, in two halves, as in backward_dkv_halves.py.

    warpgroup      | P of a     | dS of a   | P of b       | dS of b   |
    tensor core    | dP a       | S b       | dP b, dQ a   |           | dQ b, S and dP of the next a
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.backward_dq import (
    Rows,
    Worker,
    operands,
    probabilities,
    refill_free,
    release_k,
    v_slot,
)
from pallas_kernels.flash_attention.queries import Item
from pallas_kernels.mosaic import ROWS, along


def step_in_halves(w: Worker, i: Item, rows: Rows, dq_acc, n, masked):
    """Adds dS K of step n to dQ."""
    s, smem = w.schedule, w.smem
    slot, slot_of_v = s.slot(n), v_slot(s, n)
    q, do, k, v = operands(w, i, n)
    halves = [pl.ds(half * ROWS, ROWS) for half in range(2)]
    across = lambda acc, x, y, half: plgpu.wgmma(acc, x, y.at[halves[half]].transpose((1, 0)))
    delta = along(rows.delta, (ROWS, ROWS), 0)
    acc = plgpu.ACC((ROWS, ROWS), jnp.float32)

    def gradient(p, slope, dp):
        ds = p * dp
        return (ds if slope is None else ds * slope).astype(s.dtype)

    def first(s_acc, dp_acc):
        plgpu.barrier_wait(smem.k_full.at[slot])
        plgpu.barrier_wait(smem.v_full.at[slot_of_v])
        dp_acc[...] = delta
        across(s_acc, q, k, 0)
        across(dp_acc, do, v, 0)
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        release_k(w, i, n)
        p, slope = probabilities(w, i, rows, scores, n, masked, 0)
        pl.run_scoped(functools.partial(second, p, slope, dp_acc), acc)

    def second(p, slope, dp_acc, s_acc):
        across(s_acc, q, k, 1)
        ds = gradient(p, slope, plgpu.wgmma_accumulator_load(dp_acc, wait_n=1))
        pl.run_scoped(functools.partial(third, ds, s_acc), acc)

    def third(ds, s_acc, dp_acc):
        dp_acc[...] = delta
        across(dp_acc, do, v, 1)
        plgpu.wgmma(dq_acc, ds, k.at[halves[0]])
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=2)
        p, slope = probabilities(w, i, rows, scores, n, masked, 1)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        plgpu.barrier_arrive(smem.free.at[slot])
        plgpu.wgmma(dq_acc, gradient(p, slope, dp), k.at[halves[1]])
        refill_free(w, i, n)

    pl.run_scoped(first, acc, acc)
