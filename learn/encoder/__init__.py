"""The ladder of the encoder's forward pass (README.md)."""

import functools

import jax.numpy as jnp
import numpy as np

from learn.ladder import COPY, SMS, Ladder, normal
from learn.layer_norm import LATENCY, loads
from pallas_kernels.embedding import encoder_reference

ROUND = 16 * SMS  # blocks of 128 threads that run at the same time


def tokens(sizes):
    """Tokens as common as in text: the share of token i is about 1 / ((i + 1) log V)."""
    u = np.random.default_rng(0).random((sizes["batch"], sizes["time"]))
    return jnp.asarray(sizes["vocab"] ** u - 1, jnp.int32)


def inputs(sizes):
    wte = normal(1, (sizes["vocab"], sizes["width"]))
    return tokens(sizes), wte, normal(2, (sizes["time"], sizes["width"]))


def reference(tokens, wte, wpe):
    dtype = jnp.bfloat16 if wte.dtype == jnp.float32 else wte.dtype
    return encoder_reference(tokens, wte, wpe, dtype=dtype)


@functools.cache
def distinct(*sizes):
    """How many tokens occur."""
    return np.unique(np.asarray(tokens(dict(sizes)))).size


def _written(sizes):
    return 2 * sizes["batch"] * sizes["time"] * sizes["width"]


def _bytes(sizes):
    rows = distinct(*sizes.items()) + sizes["time"]
    return _written(sizes) + 4 * rows * sizes["width"]


def _rounds(sizes):
    return sizes["batch"] * sizes["time"] / ROUND


def _block_a_token(sizes):
    return _rounds(sizes) * (1 + sizes["width"] / 128) * LATENCY


def _every_row(sizes):
    """No row is found in a cache: each takes 4 bytes a column where a result has 2."""
    return max(3 * _written(sizes) / COPY, _rounds(sizes) * 2 * LATENCY)


def _once(sizes):
    return _bytes(sizes) / COPY


def whole_rows(book, tokens, wte, wpe):
    """A block loads a row of wte in one instruction."""
    of_wte = loads(book, wte)
    if not of_wte or min(e.bytes for e in of_wte) < 4 * wte.shape[1]:
        least = min((e.bytes for e in of_wte), default=0)
        return f"a load of wte has {least} bytes of a row of {4 * wte.shape[1]}"


def position_once(book, tokens, wte, wpe):
    """wpe is read once for eight sequences."""
    read = sum(e.bytes for e in loads(book, wpe))
    most = wpe.nbytes * max(1, tokens.shape[0] // 8)
    if read > most:
        return f"{read} bytes of wpe are read where {most} would do"


def slabs_in_order(book, tokens, wte, wpe):
    """The blocks of the last columns start after all blocks of the first ones."""
    complaint = position_once(book, tokens, wte, wpe)
    if complaint:
        return complaint
    stores = [e for e in book.events if e.kind == "store"]
    if max(e.bytes for e in stores) > 2 * 256:
        return "a block stores more than 256 columns of a row"
    half = len(stores) // 2
    first, second = ({e.first for e in part} for part in (stores[:half], stores[half:]))
    if first & second:
        return "the same columns are written by blocks of the first and of the second half"


LADDER = Ladder(
    name="encoder",
    reference=reference,
    inputs=inputs,
    sizes=({"batch": 32, "time": 1024, "width": 768, "vocab": 50304},),
    small={"batch": 8, "time": 4, "width": 512, "vocab": 50},
    again={"batch": 16, "time": 3, "width": 768, "vocab": 70},
    bytes=_bytes,
    flops=lambda sizes: 0,
    counted=(_block_a_token, _every_row, _every_row, _once, _once),
    properties={2: whole_rows, 3: position_once, 4: slabs_in_order},
)
