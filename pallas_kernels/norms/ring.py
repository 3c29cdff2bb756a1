"""The ring of tiles in shared memory through which a persistent block streams its rows, by TMA."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norms.tiles import Tiling


class Ring(NamedTuple):
    """The arrays of a persistent block and their shared-memory buffers, under the same names."""

    streams: dict[str, Any]  # (rows, heads, blocks, block), read tile by tile
    weights: dict[str, Any]  # (heads, blocks, block)
    results: dict[str, Any]  # written from the buffer of the stream with the same name
    smem: dict[str, Any]
    bars: Any  # one for each slot; its streams arrive on it
    weight_bar: Any


def ring_types(t: Tiling, streams, weights) -> dict:
    """Scratch types of a ring; every part has its own buffers and barriers."""
    tiles = (t.parts, t.slots, t.tile, t.blocks, t.block)
    smem = {k: plgpu.SMEM(tiles, a.dtype) for k, a in streams.items()}
    smem |= {k: plgpu.SMEM((t.parts, *tiles[3:]), a.dtype) for k, a in weights.items()}
    return smem | dict(
        bars=plgpu.Barrier(num_arrivals=len(streams), num_barriers=t.parts * t.slots),
        weight_bar=plgpu.Barrier(num_arrivals=max(len(weights), 1), num_barriers=t.parts),
    )


def fetch_weights(t: Tiling, ring: Ring):
    """Starts the copies of this head's row of every weight."""
    part = lax.axis_index("part")
    for k, ref in ring.weights.items():
        window = ref.at[lax.axis_index("head"), *_part_columns(t)]
        plgpu.copy_gmem_to_smem(window, ring.smem[k].at[part], ring.weight_bar.at[part])


def _part_columns(t: Tiling):
    """The slices of this part's columns: of blocks, and within a block.

    Their start is a variable because JAX 0.12 rejects slices that are statically too wide.
    """
    zero = lax.rem(lax.axis_index("head"), jnp.int32(1))
    return pl.ds(lax.axis_index("part") * t.blocks + zero, t.blocks), pl.ds(zero, t.block)


def stream(t: Tiling, ring: Ring, step, carry):
    """Runs carry = step(slot, tile, carry) for every tile of this program; returns the last carry.

    Streams are copied to their buffers slots - 1 tiles ahead of the step.  After the step the
    results are copied back from the same buffers.
    """
    program, part = lax.axis_index("program"), lax.axis_index("part")
    steps = lax.div(t.tiles - 1 - program, jnp.int32(t.programs)) + 1
    slot_of = lambda i: lax.rem(i, jnp.int32(t.slots))
    tile_of = lambda i: program + i * t.programs
    window = lambda ref, i: ref.at[*t.place(ref, tile_of(i)), *_part_columns(t)]
    bar_of = lambda i: ring.bars.at[part * t.slots + slot_of(i)]

    def fetch(i):
        for k, ref in ring.streams.items():
            slot = ring.smem[k].at[part, slot_of(i)]
            plgpu.copy_gmem_to_smem(window(ref, i), slot, bar_of(i))

    # Fill all slots but one.
    for i in range(t.slots - 1):
        pl.when(i < steps)(functools.partial(fetch, jnp.int32(i)))
    if ring.weights:
        plgpu.barrier_wait(ring.weight_bar.at[part])  # after the rows' copies have started

    def body(i, carry):
        slot = slot_of(i)
        plgpu.barrier_wait(bar_of(i))
        carry = step(slot, tile_of(i), carry)
        plgpu.commit_smem()
        for k, ref in ring.results.items():
            plgpu.copy_smem_to_gmem(ring.smem[k].at[part, slot], window(ref, i))

        @pl.when(i + (t.slots - 1) < steps)
        def _():
            # The next tile replaces the previous step's results; this step's may still be copied.
            plgpu.wait_smem_to_gmem(len(ring.results), wait_read_only=True)
            fetch(i + (t.slots - 1))

        return carry

    carry = lax.fori_loop(0, steps, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
