"""jnp twins of the vLSTM's two kernels: the same formulas, rounded to the data's dtype where the
kernels round.  In float64 nothing is rounded, so a cell built on them is exact.  And the arguments
with which both forms of the kernels are tested."""

import jax
import jax.numpy as jnp
import numpy as np
from kernel_checks import normal

from pallas_kernels import mosaic

FOUR = np.repeat([[4, 1, 2, 1], [0, 1, 2, 3]], [20, 50, 4, 6], axis=1)  # documents of 80 positions


def flat(form):
    """Returns form(q, k, v, i, f, *state), which has the parts of the state as arguments."""

    def call(q, k, v, i, f, *state, **options):
        return form(q, k, v, i, f, initial_state=state or None, **options)

    return call


def inputs(b, t, h, dqk, dv, dtype=jnp.bfloat16, mean=1.0, state=False):
    """A mean keeps |l| away from 0, where every form amplifies rounding errors."""
    arrays = [
        normal(0, (b, t, h, dqk), dtype, offset=mean),
        normal(1, (b, t, h, dqk), dtype, offset=mean),
        normal(2, (b, t, h, dv), dtype),
        normal(3, (b, t, h), scale=2.0),
        normal(4, (b, t, h), scale=2.0, offset=2.0),
    ]
    if state:
        arrays += [
            normal(10, (b, h, dqk, dv)),
            normal(11, (b, h, dqk), offset=mean),
            normal(12, (b, h)),
        ]
    return arrays


def states(
    x, y, weight, vector, decay, first=None, other=None, *,
    reverse=False, saturate=True, last=True, sms=0,
):  # fmt: skip
    count, size = weight.shape[2:]
    x, y = _chunks(x, count, size), _chunks(y, count, size)
    change = _einsum("bhnlx,bhnly->nbhxy", (weight[..., None] * x).astype(x.dtype), y)
    vectors = jnp.einsum("bhnl,bhnlx->nbhx", vector, x.astype(vector.dtype), precision="highest")

    def step(state, chunk):
        (state, sums), (decay, change, vector, other) = state, chunk
        dot, decay = jnp.sum(state * other, -1), decay[..., None]
        after = decay[..., None] * state + change, decay * sums + vector
        return after, (state.astype(x.dtype), sums, dot)

    others = jnp.zeros_like(change) if other is None else jnp.moveaxis(other, 2, 0)
    first = first or (jnp.zeros_like(change[0]), jnp.zeros_like(vectors[0]))
    chunks = jnp.moveaxis(decay, 2, 0), change, vectors, others
    end, parts = jax.lax.scan(step, first, chunks, reverse=reverse)
    before, sums, dots = (jnp.moveaxis(z, 0, 2) for z in parts)
    return before, sums, end if last else None, None if other is None else dots[..., None, :]


def chunk_outputs(
    a, b, x, chunk_states, vectors, *, mode, along=None, y=None,
    normalize=True, packed=False, sms=0,
):  # fmt: skip
    of = vectors
    (count, size), length = of["row"].shape[2:], a.shape[1]
    a, b, x = (_chunks(z, count, size) for z in (a, b, x))
    row, column = (lambda vector: vector[..., :, None]), (lambda vector: vector[..., None, :])
    seeing, seen = (column, row) if mode in ("dk", "dv") else (row, column)
    position = jnp.arange(size)
    visible = seen(position) <= seeing(position)
    if packed:
        visible &= seen(position) >= seeing(of["start"])
    d = jnp.exp2(jnp.where(visible, seeing(of["row"]) + seen(of["col"]), -jnp.inf))
    w = _einsum("bhnld,bhnmd->bhnlm", a, b) * d
    turned = mode in ("dq", "dk")
    through = _einsum("bhnld,bhnxd->bhnlx" if turned else "bhnld,bhndx->bhnlx", a, chunk_states)
    inner, stats = of["scale"], ()
    if turned:
        y = _chunks(y, count, size)
        logits = _einsum("bhnld,bhnmd->bhnlm", y, x)
    if mode == "forward":
        norm, sign = of["one"], jnp.zeros_like(of["one"])
        if normalize:
            l = jnp.sum(w, -1) + inner * jnp.sum(a.astype(w.dtype) * along[..., None, :], -1)
            above = jnp.abs(l) > of["one"]
            norm = 1 / jnp.where(above, jnp.abs(l), of["one"])
            sign = jnp.where(above, -jnp.sign(l), 0)
        w, inner, stats = row(norm) * w, norm * inner, (norm, sign)
    if mode == "dq":
        dot = jnp.sum(w * logits, -1) + inner * jnp.sum(through * y, -1)
        shift, stats = of["sign"] * dot, (dot,)
        w += d * row(shift)
        through += row(shift) * along[..., None, :]
    if mode == "dk":
        w += d * column(of["shift"])
        through += along[..., None, :]
        stats = jnp.sum(w * logits, -1), inner * jnp.sum(through * y, -1)
    out = row(inner) * through + _einsum("bhnlm,bhnmx->bhnlx", w.astype(x.dtype), x)
    out = jnp.moveaxis(out, 1, 3)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length].astype(x.dtype), *stats


def _chunks(x, count, size):
    """(B,T,H,D) -> (B,H,N,L,D), with zeros past T."""
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1]), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 3, 1)


def _einsum(formula, x, y):
    wide = mosaic.stat_dtype(x.dtype)
    return jnp.einsum(formula, x, y, precision="highest", preferred_element_type=wide)
