"""The ladder of the encoder's backward pass, with tokens that collide (README.md)."""

import jax
import jax.numpy as jnp
import numpy as np

from learn import encoder as forward
from learn.ladder import COPY, CYCLES, Ladder, like, normal
from learn.layer_norm import LATENCY, loads


def inputs(sizes):
    shape = sizes["batch"], sizes["time"], sizes["width"]
    wte = jnp.zeros((sizes["vocab"], sizes["width"]))
    return forward.tokens(sizes), normal(1, shape, jnp.bfloat16), wte


def reference(tokens, dy, wte):
    """Autodiff of the formula: XLA adds to the rows with atomics, in no fixed order."""
    wpe = jnp.zeros((dy.shape[1], dy.shape[2]), wte.dtype)
    y, pull = jax.vjp(lambda *tables: forward.reference(tokens, *tables), wte, wpe)
    return pull(dy.astype(y.dtype))


def _bytes(sizes):
    places = sizes["batch"] * sizes["time"]
    return sizes["width"] * (2 * places + 4 * (sizes["vocab"] + sizes["time"]))


def _longest(sizes):
    """Places of the most common token."""
    return np.bincount(np.asarray(forward.tokens(sizes)).ravel()).max()


def _search(sizes):
    rounds = sizes["vocab"] / forward.ROUND
    return rounds * sizes["batch"] * sizes["time"] * 40 / CYCLES


def _one_by_one(sizes):
    return max(_bytes(sizes) / COPY, _longest(sizes) * 2 * LATENCY)


def _eight(sizes):
    return max(_bytes(sizes) / COPY, _longest(sizes) / 8 * 2 * LATENCY)


def _once(sizes):
    return _bytes(sizes) / COPY


def stores(book, array):
    return [e for e in book.events if e.kind == "store" and e.array == like(array)]


def table_written_once(book, tokens, dy, wte):
    """No row of dwte is written twice."""
    written = sum(e.bytes for e in stores(book, wte))
    if written > wte.nbytes:
        return f"{written} bytes of dwte are written, which has {wte.nbytes}"


def several_loads(book, tokens, dy, wte):
    """Rows of dy are asked for by several instructions of the kernel, not one in a loop."""
    kernels = {e.kernel for e in stores(book, wte)}  # not the one that makes dwpe
    rows = {e.where for e in loads(book, dy) if e.kernel in kernels}
    if len(rows) < 4:
        return f"{len(rows)} instruction(s) load rows of dy: nothing else is on the way meanwhile"


LADDER = Ladder(
    name="encoder_backward",
    reference=reference,
    inputs=inputs,
    sizes=({"batch": 32, "time": 1024, "width": 768, "vocab": 50304},),
    small={"batch": 2, "time": 32, "width": 256, "vocab": 6},
    again={"batch": 4, "time": 56, "width": 512, "vocab": 9},
    bytes=_bytes,
    flops=lambda sizes: 0,
    counted=(_search, _one_by_one, _eight, _once, _once),
    properties={2: table_written_once, 3: several_loads},
)
