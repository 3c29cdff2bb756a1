"""jnp twins of the vLSTM's two kernels: the same formulas, rounded to the data's dtype where the
kernels round.  In float64 nothing is rounded, so a cell built on them is exact.  The cell's
recurrent and parallel forms, to which the chunkwise ones are held.  The arguments with which the
kernels are tested, and how two ops are compared bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel_checks import kernels_run_here, normal

from pallas_kernels import mosaic
from pallas_kernels.mlstm import reference
from pallas_kernels.mlstm.states import Heads

FOUR = np.repeat([[4, 1, 2, 1], [0, 1, 2, 3]], [20, 50, 4, 6], axis=1)  # documents of 80 positions
# Copies of the data, in a lowered program.
COPIES = r"stablehlo\.(slice|concatenate|pad|dynamic_update_slice|transpose|copy) .*bf16"


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


def with_gradients(op, **options):
    """Returns run(arrays, dy): op's result and its gradients."""

    def run(arrays, dy):
        y, pull = jax.vjp(functools.partial(op, **options), *arrays)
        return y, pull(dy)

    return run


def assert_same_bits(op, other, arrays, dy, **options):
    """Asserts that two ops have the same results and gradients, none of which is all zero."""
    with kernels_run_here():
        actual, expected = (
            jax.block_until_ready(with_gradients(f, **options)(arrays, dy)) for f in (op, other)
        )
    for path, a in jax.tree.leaves_with_path(actual):
        e = functools.reduce(lambda tree, key: tree[key.idx], path, expected)
        assert np.asarray(e, np.float32).any()
        np.testing.assert_array_equal(a, e, err_msg=jax.tree_util.keystr(path))


def recurrent(
    q, k, v, i, f, *, segment_ids=None, initial_state=None, return_state=False, **options
):  # fmt: skip
    """The cell's definition, position by position, in float32 (float64 for float64)."""
    starts = reference.starts_of(_one_document(i) if segment_ids is None else segment_ids)

    def position(state, x):
        q, k, v, i, f, start = x
        reset = lambda s: jnp.where(start.reshape(-1, *[1] * (s.ndim - 1)), 0, s)
        h, state = reference.step(q, k, v, i, f, tuple(map(reset, state)), **options)
        return state, h

    sequence = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, i, f, starts))
    state, h = jax.lax.scan(position, reference.state_of(initial_state, q, v), sequence)
    h = jnp.moveaxis(h, 0, 1)
    return (h, state) if return_state else h


def _one_document(i):
    return jnp.zeros(i.shape[:2], jnp.int32)


def parallel(q, k, v, i, f, *, gate="exp", normalize=True, segment_ids=None, eps=0.0):
    """Computes all positions at once from a T x T matrix, like attention, without states."""
    dtype, stat = q.dtype, mosaic.stat_dtype(q.dtype)
    segment_ids = _one_document(i) if segment_ids is None else segment_ids
    q, k, v = (jnp.swapaxes(x, 1, 2).astype(stat) for x in (q, k, v))  # (B,H,T,D)
    i, lf = (jnp.swapaxes(x, 1, 2) for x in reference.log_gates(i, f, gate, stat))  # (B,H,T)
    document = jnp.cumsum(reference.starts_of(segment_ids), 1)
    seen = jnp.tril(document[:, :, None] == document[:, None, :])[:, None]  # (B,1,T,T)
    log_d = jnp.where(seen, reference._sums_between(lf) + i[..., None, :], -jnp.inf)
    m = jnp.max(log_d, -1)
    matmul = functools.partial(reference._matmul, dtype)
    p = max(q.shape[-1], 1) ** -0.5 * matmul(q, k.mT) * jnp.exp(log_d - m[..., None])
    scale = reference._row_scale(jnp.sum(p, -1), m, gate, normalize, eps)
    return reference.narrow(jnp.swapaxes(matmul(scale[..., None] * p, v), 1, 2), dtype)


def states(
    x, y, weight, vector, decay, first=None, other=None, *,
    reverse=False, last=True,
):  # fmt: skip
    (heads, count, size) = weight.shape[1:]
    x, y = (_chunks(_apart(z, heads), count, size) for z in (x, y))
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
    a, b, x, chunk_states, vectors, along=None, like=None, joint=None, *, mode,
    normalize=True,
):  # fmt: skip
    assert joint is None
    of = vectors
    (heads, count, size), length = of["row"].shape[1:], a.array.shape[1]
    a, b, x = (_chunks(_apart(z, heads), count, size) for z in (a, b, x))
    row, column = (lambda vector: vector[..., :, None]), (lambda vector: vector[..., None, :])
    seeing, seen = (column, row) if mode in ("dk", "dv") else (row, column)
    position = jnp.arange(size)
    visible = seen(position) <= seeing(position)
    if of["start"] is not None:
        visible &= seen(position) >= seeing(of["start"])
    d = jnp.exp2(jnp.where(visible, seeing(of["row"]) + seen(of["col"]), -jnp.inf))
    w = _einsum("bhnld,bhnmd->bhnlm", a, b) * d
    turned = mode in ("dq", "dk")
    through = _einsum("bhnld,bhnxd->bhnlx" if turned else "bhnld,bhndx->bhnlx", a, chunk_states)
    inner, stats = of["scale"], ()
    if turned:
        y = _chunks(_apart(like, heads), count, size)
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
    out = out.reshape(out.shape[0], count * size, -1, size)
    return out[:, :length].astype(x.dtype), *stats


def together(x):
    """(B,T,H,D) as the kernels take it, in tiles of 64 columns."""
    return Heads.of(x, x.shape[-1])


def _apart(x: Heads, heads):
    """(B,T,H,D) of heads that are an array of their own."""
    assert x.array.shape[2] == heads * x.tiles
    return x.array.reshape(*x.array.shape[:2], heads, -1)


def _chunks(x, count, size):
    """(B,T,H,D) -> (B,H,N,L,D), with zeros past T."""
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1]), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 3, 1)


def _einsum(formula, x, y):
    wide = mosaic.stat_dtype(x.dtype)
    return jnp.einsum(formula, x, y, precision="highest", preferred_element_type=wide)
