"""The ladder of a matrix of 4-bit weights times one row (README.md)."""

import jax.numpy as jnp
import numpy as np

from learn.ladder import COPY, CYCLES, SMS, Ladder, like, normal
from learn.layer_norm import LATENCY, loads


def inputs(sizes):
    """x (K,) bfloat16, levels (K, N) int8 from -7 to 7, scales (N,) that bfloat16 can hold."""
    k, n = sizes["depth"], sizes["outputs"]
    levels = np.resize(np.random.default_rng(1).integers(-7, 8, 2**20), (k, n))
    levels[0] = 7  # so that the largest weight of an output gives its scale
    scales = 0.01 * (1 + jnp.abs(normal(2, (n,))))
    return (
        normal(0, (k,), jnp.bfloat16),
        jnp.asarray(levels, jnp.int8),
        scales.astype(jnp.bfloat16).astype(jnp.float32),
    )


def reference(x, levels, scales):
    weight = (levels.astype(scales.dtype) * scales).astype(x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, weight, preferred_element_type=wide).astype(x.dtype)


def _weights(sizes):
    return sizes["depth"] * sizes["outputs"]


def _bytes(sizes):
    return _weights(sizes) / 2 + 4 * sizes["outputs"]


def _bfloat16(sizes):
    return 2 * _weights(sizes) / COPY


def _words(sizes):
    return _weights(sizes) / 2 / (SMS * 2048 * 4 / LATENCY)  # 2048 threads have a word under way


def _instructions(each):
    def counted(sizes):
        return max(_bytes(sizes) / COPY, _weights(sizes) * each / (SMS * 128) / CYCLES)

    return counted


def few_bytes(book, x, levels, scales):
    """A weight takes half a byte."""
    others = like(x), like(scales)
    read = sum(e.bytes for e in loads(book) if e.array not in others)
    if not read or read > levels.size / 2:
        return f"{read} bytes of weights are read, not {levels.size // 2}"


def wide_words(book, x, levels, scales):
    """Each of 128 threads loads 16 bytes of words."""
    widest = max((e.bytes for e in loads(book)), default=0)
    complaint = few_bytes(book, x, levels, scales)
    if not complaint and widest < 128 * 16:
        complaint = f"a load of words has {widest / 128:g} bytes for each thread, not 16"
    return complaint


def x_once_for_four(book, x, levels, scales):
    """x is read once for 16 outputs of a block."""
    read = sum(e.bytes for e in loads(book, x))
    most = x.nbytes * levels.shape[1] // 16
    complaint = wide_words(book, x, levels, scales)
    if not complaint and read > most:
        complaint = f"{read} bytes of x are read where {most} would do"
    return complaint


LADDER = Ladder(
    name="low_bit_gemv",
    reference=reference,
    inputs=inputs,
    sizes=({"depth": 4096, "outputs": 14336},),
    small={"depth": 1024, "outputs": 16},
    again={"depth": 2048, "outputs": 32},
    bytes=_bytes,
    flops=lambda sizes: 0,
    counted=(
        _bfloat16,
        _words,
        _instructions(6),
        _instructions(5.25),
        _instructions(4.25),
        _instructions(3),
    ),
    properties={2: few_bytes, 3: wide_words, 4: x_once_for_four},
)
