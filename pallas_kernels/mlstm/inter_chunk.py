"""The inter-chunk states of the mLSTM cell (walk.py) on Hopper.

a block: an L x L tile of S, in registers; for L = 128 two warpgroups of 64 rows each

    X: L positions x 64     --TMA->  x[2][warpgroup]  --weight *-->  scaled[warpgroup]
    Y: L positions x L      --TMA->  y[2]                                   |
    weight, vector          --TMA->  vectors[2]               acc <- decay acc + scaled^T Y
                                        ^     |                             |
          the last warpgroup loads      |     | full[2]                     v
          two chunks ahead              +-----+------- free[2] --- out[warpgroup] --TMA-> S
"""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.reference import narrow
from pallas_kernels.mlstm.walk import STAGES, Walk, Walker, WalkInputs
from pallas_kernels.mosaic import ROW, ROWS, WGMMA
from pallas_kernels.pipeline import Ring

PREFIX = ""  # of the kernel's name
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED  # layout of a transposed square


def prepared(s: Walk, inputs: WalkInputs, out_types):
    return inputs, out_types


def scratch(s: Walk, with_other: bool) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    buffer = functools.partial(mosaic.tiled, dtype=s.dtype)
    return dict(
        x=buffer(STAGES, s.wgs, s.size, ROWS),
        y=buffer(STAGES, s.size, s.size),
        vectors=plgpu.SMEM((STAGES, 2, s.size), jnp.float32),  # weight, vector
        scaled=buffer(s.wgs, s.size, ROWS),  # weight * X
        out=buffer(s.wgs, ROWS, s.size),
        full=plgpu.Barrier(num_barriers=STAGES, num_arrivals=s.wgs + 3),
        free=plgpu.Barrier(num_barriers=STAGES, num_arrivals=s.wgs),
        other=buffer(s.wgs, ROWS, s.size) if with_other else None,
        other_full=plgpu.Barrier(num_barriers=s.wgs) if with_other else None,
    )


def body(s: Walk, inputs: WalkInputs, outputs, /, **smem):
    smem, wg = SimpleNamespace(**smem), lax.axis_index("wg")
    # The last warpgroup loads what all read; each loads its own columns of X.
    ring = Ring(STAGES, smem.full, smem.free, wg=wg, loader=s.wgs - 1)
    w = Walker.of(s, inputs, outputs, smem, wg, ring)

    # Load the first chunks.
    pl.loop(0, STAGES)(functools.partial(_load_x, w))
    pl.when(w.wg == s.wgs - 1)(lambda: pl.loop(0, STAGES)(functools.partial(_load_common, w)))

    # Walk along the span.
    acc = plgpu.ACC((ROWS, s.size), jnp.float32)
    sums, state = pl.run_scoped(functools.partial(_along_chunks, w), acc)

    w.store_end(state, sums)
    plgpu.wait_smem_to_gmem(0)


# Load.


def _load_x(w: Walker, n):
    """Loads the warpgroup's own columns of step n's X."""
    size = w.schedule.size

    @pl.when(n < w.steps)
    def _():
        x = w.inputs.x.at(w.b, pl.ds(w.chunk(n) * size, size), w.h, w.x_tile)
        w.ring.send(n, x.at[:, pl.ds(w.wg * ROWS, ROWS)], w.smem.x, w.wg)


def _load_common(w: Walker, n):
    """Loads what all warpgroups read in step n; the last warpgroup calls it."""
    size, chunk = w.schedule.size, w.chunk(n)

    @pl.when(n < w.steps)
    def _():
        y = w.inputs.y.at(w.b, pl.ds(chunk * size, size), w.h, w.y_tile)
        w.ring.send(n, y, w.smem.y)
        for place, ref in enumerate((w.inputs.weight, w.inputs.vector)):
            w.ring.send(n, ref.at[w.b, w.h, chunk], w.smem.vectors, place)


def _load_other(w: Walker, n):
    source = w.inputs.other.at[w.b, w.h, w.chunk(n), *w.here]
    plgpu.copy_gmem_to_smem(source, w.smem.other.at[w.wg], w.smem.other_full.at[w.wg])


# Walk.


def _along_chunks(w: Walker, acc):
    """Walks along the span's chunks; returns the final (s, S)."""
    acc[...], sums = w.first(TRANSPOSED.reduce(1))
    if w.inputs.other is not None:
        _load_other(w, 0)
    _, sums = lax.fori_loop(0, w.steps, functools.partial(_step, w, acc), (w.decay(0), sums))
    return sums, acc[...]


def _step(w: Walker, acc, n, carry):
    decay, sums = carry
    smem, stage = w.smem, w.ring.slot(n)
    ahead = w.decay(n + 1)
    # Store the state before the chunk.
    state = acc[...]
    if w.outputs.before is not None:
        _store_state(w, n, state, sums)
    if w.inputs.other is not None:
        _multiply_other(w, n, state)
    # Decay the state.
    acc[...] = state * decay
    pl.when(n > 0)(lambda: w.ring.refill(n - 1, functools.partial(_load_common, w)))
    # Load X and scale it.
    w.ring.wait(n)
    weight = mosaic.read(smem.vectors.at[stage, 0], ROW)
    x = plgpu.load(smem.x.at[stage, w.wg], layout=WGMMA).astype(jnp.float32)
    smem.scaled[w.wg] = (x * mosaic.along(weight, x.shape, 0)).astype(w.schedule.dtype)
    plgpu.commit_smem()
    # Accumulate.
    plgpu.wgmma(acc, smem.scaled.at[w.wg].transpose((1, 0)), smem.y.at[stage])
    sums = lax.cond(w.y_tile == 0, lambda: sums * decay + _sum_columns(w, stage), lambda: sums)
    plgpu.commit_smem()  # waits until all four warps have read x and its vectors
    _load_x(w, n + STAGES)
    plgpu.wgmma_wait(0)
    w.ring.release(n)
    return ahead, sums


def _store_state(w: Walker, n, state, sums):
    out = w.smem.out
    plgpu.wait_smem_to_gmem(0)  # the copy of the state before must have read the buffer
    out[w.wg] = narrow(state, w.schedule.dtype, not w.schedule.reverse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out.at[w.wg], w.outputs.before.at[w.b, w.h, w.chunk(n), *w.here])
    w.store_before(n, sums)


def _multiply_other(w: Walker, n, state):
    plgpu.barrier_wait(w.smem.other_full.at[w.wg])
    w.multiply_other(n, state, w.smem.other.at[w.wg])
    plgpu.commit_smem()
    pl.when(n + 1 < w.steps)(lambda: _load_other(w, n + 1))


def _sum_columns(w: Walker, stage):
    # Read X again, transposed: a column's sum is then in 4 lanes and not in all warps.
    square = w.smem.x.at[stage, w.wg].transpose((1, 0))
    x = plgpu.load(square, layout=TRANSPOSED).astype(jnp.float32)
    vector = mosaic.read(w.smem.vectors.at[stage, 1], TRANSPOSED.reduce(0))
    return jnp.sum(x * mosaic.along(vector, x.shape, 1), axis=1)
