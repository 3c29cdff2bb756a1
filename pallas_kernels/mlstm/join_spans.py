"""Carries the state of the mLSTM cell over the spans into which inter_chunk.py splits the chunks.

    S before span n + 1 = (product of span n's decays) (S before span n) + what span n adds

The kernel has a block for some elements of the state.  It walks along the spans with these elements
in registers; all loads for eight spans are in flight at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, ROWS


def join_spans(decay, ends, first, parts, reverse):
    """Returns (S, s) before each span, (B,H,spans,...).

    ends: the states that all spans but the last reach from zero.  This is the same recurrence, with
    the product of a span's decays.
    """
    *pairs, chunks = decay.shape
    span = mosaic.cdiv(chunks, parts)
    decay = decay[:, :, ::-1] if reverse else decay
    decay = decay[:, :, : (parts - 1) * span].reshape(*pairs, parts - 1, span)
    if first is None:
        first = tuple(jnp.zeros((*pairs, *z.shape[3:])) for z in ends)
    first = tuple(z.reshape(-1, *z.shape[2:]) for z in first)
    dx, dy = first[0].shape[1:]
    width = 512  # 4 numbers for each thread, with 8 spans in flight
    wide = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def vlstm_join(decay_ref, ends_ref, s_ends_ref, first_ref, s_first_ref, out_ref, s_out_ref):
        pair, block = lax.axis_index("pair"), lax.axis_index("block")
        carry = functools.partial(_carry, pair, decay_ref)
        carry(ends_ref, first_ref, out_ref, pl.ds(block * width, width), wide)

        @pl.when(block < dx // ROWS)
        def _():
            carry(s_ends_ref, s_first_ref, s_out_ref, pl.ds(block * ROWS, ROWS), COL)

    out = mosaic.kernel(
        vlstm_join,
        out_type=(
            jax.ShapeDtypeStruct((len(first[0]), parts, dx * dy), jnp.float32),
            jax.ShapeDtypeStruct((len(first[0]), parts, dx), jnp.float32),
        ),
        grid=(len(first[0]), dx * dy // width),
        grid_names=("pair", "block"),
    )(
        jnp.prod(decay, -1).reshape(-1, parts - 1),
        ends[0].reshape(-1, parts - 1, dx * dy),
        ends[1].reshape(-1, parts - 1, dx),
        first[0].reshape(-1, dx * dy),
        first[1],
    )
    return out[0].reshape(*pairs, parts, dx, dy), out[1].reshape(*pairs, parts, dx)


def _carry(pair, decay_ref, ends_ref, first_ref, out_ref, at, layout):
    """Carries the elements `at` of a state over all spans."""
    state = mosaic.load(first_ref.at[pair, at], layout)
    mosaic.store(out_ref.at[pair, 0, at], state)
    joined = ends_ref.shape[1]
    for n in range(0, joined, 8):
        group = range(n, min(n + 8, joined))
        loaded = [
            (decay_ref[pair, n], mosaic.load(ends_ref.at[pair, n, at], layout)) for n in group
        ]
        for n, (decay, end) in zip(group, loaded, strict=True):
            state = state * decay + end
            mosaic.store(out_ref.at[pair, n + 1, at], state)
