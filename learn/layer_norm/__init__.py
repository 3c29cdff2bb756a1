"""The ladder of layer norm's forward pass (README.md)."""

import functools

import jax.numpy as jnp

from learn.ladder import COPY, CYCLES, SMS, Ladder, like, normal
from pallas_kernels import layer_norm

L2 = 5.5e6  # bytes a microsecond of the L2 cache
LATENCY = 0.6  # microseconds of a load from memory
STAYS = "call the largest number of blocks BLOCKS, which the test sets to 2"


def inputs(sizes):
    """Rows of mean 1 and variance 1, times 1 to 1/128: of the small ones 1e-5 is a large part."""
    shape = sizes["rows"], sizes["cols"]
    weights = [normal(i, shape[1:]) for i in (1, 2)]
    scale = 2.0 ** -(jnp.arange(shape[0]) % 8)
    return ((1 + normal(0, shape)) * scale[:, None]).astype(jnp.bfloat16), *weights


def _bytes(sizes):
    return 2 * 2 * sizes["rows"] * sizes["cols"]  # bfloat16 in and out


def _thread_a_row(sizes):
    return 4 * sizes["rows"] * sizes["cols"] / SMS / CYCLES  # a request for each element


def _warp_a_row(sizes):
    walk = _bytes(sizes) / 2 / (SMS * 2048 * 2 / LATENCY)  # 2048 threads have 2 bytes under way
    return walk + 2 * walk / 3 + _bytes(sizes) / 2 / COPY


def _vectors(sizes):
    return _bytes(sizes) / COPY + 2 * _bytes(sizes) / 2 / L2


def _once(sizes):
    return _bytes(sizes) / COPY


def loads(book, array=None):
    """Loads from global memory, of all arrays or of one like this."""
    found = [e for e in book.events if e.kind == "load" and e.space == "global"]
    return found if array is None else [e for e in found if e.array == like(array)]


def one_request_for_64_bytes(book, x, weight, bias):
    """A load of 32 neighbours of 2 bytes is one request."""
    of_x = [e for e in loads(book, x) if e.requests]
    wanted, done = sum(e.bytes for e in of_x) / 64, sum(e.requests for e in of_x)
    if not of_x:
        return "no warp loads x from global memory"
    if done > wanted:
        return f"the warps make {done} requests for x where {wanted:.0f} would do"


def loads_of_16_bytes(book, x, weight, bias):
    """Each of 128 threads loads 16 bytes."""
    of_x = loads(book, x)
    if not of_x or min(e.bytes for e in of_x) < 128 * 16:
        least = min((e.bytes for e in of_x), default=0)
        return f"a load of x has {least / 128:g} bytes for each thread, not 16"


def reads_once(book, x, weight, bias):
    """x comes from global memory once, by loads or by TMA."""
    read = sum(e.bytes for e in loads(book, x))
    copied = sum(e.bytes for e in book.events if e.kind == "copy in" and e.array == like(x))
    if read + copied > x.nbytes:
        return f"{read + copied} bytes of x are read, of an x of {x.nbytes} bytes"


def copies_overlap(book, x, weight, bias):
    """While a block waits for a tile, the copy of another one is under way."""
    under_way, alone, turns = 0, 0, 0
    first = [e for e in book.events if e.block == book.events[0].block]
    barriers = {e.barrier for e in first if e.kind == "copy in" and e.array == like(x)}
    for e in first:
        under_way += e.kind == "copy in" and e.array == like(x)
        if e.kind == "wait" and e.buffer in barriers:
            turns, alone, under_way = turns + 1, alone + (under_way < 2), under_way - 1
    if turns < 3:
        return f"a block has {turns} tiles, not a few: let it stay; {STAYS}"
    if alone > 1:  # nothing follows the last tile
        return f"in {alone} of {turns} turns a block waits for the only copy that is under way"


LADDER = Ladder(
    name="layer_norm",
    reference=functools.partial(layer_norm, implementation="xla"),
    inputs=inputs,
    sizes=({"rows": 32768, "cols": 768}, {"rows": 16384, "cols": 4096}),
    small={"rows": 8, "cols": 512},
    again={"rows": 128, "cols": 768},
    bytes=_bytes,
    flops=lambda sizes: 0,
    counted=(_thread_a_row, _warp_a_row, _vectors, _once, _once, _once, _once),
    properties={
        2: one_request_for_64_bytes,
        3: loads_of_16_bytes,
        4: reads_once,
        5: copies_overlap,
    },
    beside=("cuda_cpp",),
)
