"""The kernel of vlstm_step: one position of the recurrence, in generation.

    m' = max(lf + m, i, -78)  a = exp(lf + m - m')     b = exp(i - m')
    C' = a C + (b k) v^T      n' = a n + b k           h = C'^T q / max(|q . n'|, exp(-m'))

with q scaled by DQK^-1/2.  The state C is read and written once, in place, and only its bytes take
time; XLA takes five kernels of at least 2 us.

    block (batch, head, 32 columns v), one warpgroup:

    C   (DQK, 32) float32, all loads in flight at once -> a C + (b k) v^T -> back to its place
                                                              \\-> times q, summed over DQK -> h
    n   (DQK,), computed again by every block of the head; the first one stores it, and m'
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.reference import floor, narrow

_COLUMNS = 32  # of a block: 128 bytes of each row
_ROWS = 16  # of a tile: a warp has four rows, a lane 16 bytes of one
_TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((_ROWS, _COLUMNS), (4, 4))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)
_ALONG_K, _ALONG_V = _TILE.reduce(1), _TILE.reduce(0)
_LARGEST = 256  # DQK; a thread holds DQK / 4 numbers of C
_SMALL = 16 << 20  # bytes of C


def why_not(q, k, v, i, f, state, *, eps: float, **options) -> str | None:
    if eps != 0:
        return f"eps={eps} is not 0"
    if reason := mosaic.unsupported_dtype(q=q):
        return reason
    dqk, dv = q.shape[-1], v.shape[-1]
    if dqk % _ROWS or dqk > _LARGEST:
        return f"DQK={dqk} is not a multiple of {_ROWS} up to {_LARGEST}"
    if dv % _COLUMNS:
        return f"DV={dv} is not a multiple of {_COLUMNS}"
    return mosaic.empty(q=q, v=v)


def why_slower(q, k, v, *others, **options) -> str | None:
    """Why XLA's form is faster in a loop over tokens, or None.

    By itself the kernel takes half of XLA's time for a small state, too (3.3 and 6.3 us for 3 MB on
    an H100), but there XLA fuses gates and norm with the step: vlstm_124m with 16 rows takes
    0.545 ms a token with the kernel and 0.495 without.  For 67 MB it takes 49 us and XLA 70.
    """
    size = 4 * q.size * v.shape[-1]
    return "XLA fuses the step of a small state with its neighbours" if size < _SMALL else None


# traced and lowered once for all layers
@functools.partial(jax.jit, static_argnames=("gate", "normalize", "eps"))
def advance(q, k, v, i, f, state, *, gate, normalize, eps):
    """(h, (C, n, m)), as `reference.step`."""
    c, n, m = (x.astype(jnp.float32) for x in state)
    (b, heads, dqk), dv = q.shape, v.shape[-1]
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    kernel = mosaic.kernel(
        functools.partial(_body, gate, normalize),
        name="vlstm_step",
        out_type=[
            jax.ShapeDtypeStruct((b, heads, dv), q.dtype),
            like(b, heads, dqk),
            like(b, heads),
        ],
        **mosaic.grid(batch=b, head=heads, part=dv // _COLUMNS),
    )
    c, (h, n, m) = mosaic.in_place(kernel, c, q, k, v, i, f, n, m, results=True)
    return h, (c, n, m)


def _body(gate, normalize, c_ref, q_ref, k_ref, v_ref, i_ref, f_ref, n_ref, m_ref, *outs):
    h_ref, new_n_ref, new_m_ref = outs
    batch, head, part = (lax.axis_index(name) for name in ("batch", "head", "part"))
    columns = pl.ds(part * _COLUMNS, _COLUMNS)
    tile = c_ref.at[batch, head, :, columns]
    c = mosaic.load(tile, _TILE)
    q, k, n = (mosaic.load(ref.at[batch, head], _ALONG_K) for ref in (q_ref, k_ref, n_ref))
    v = mosaic.load(v_ref.at[batch, head, columns], _ALONG_V)
    spread = lambda x, axis: plgpu.layout_cast(mosaic.along(x, c.shape, axis), _TILE)
    along_k, along_v = functools.partial(spread, axis=0), functools.partial(spread, axis=1)
    number = lambda ref: ref[batch, head].astype(jnp.float32)
    i, lf = number(i_ref), _log_sigmoid(number(f_ref)) + number(m_ref)
    i = _log_sigmoid(i) if gate == "sigmoid" else i
    m = jnp.maximum(jnp.maximum(lf, i), floor(jnp.float32))
    forget, admitted = jnp.exp(lf - m), jnp.exp(i - m) * k
    n = forget * n + admitted
    c = forget * c + along_k(admitted) * along_v(v)
    mosaic.store(tile, c)
    q = q * q.shape[0] ** -0.5
    h = jnp.sum(along_k(q) * c, axis=0)
    if normalize:
        l = jnp.sum(along_k(q * n), axis=0)  # the same in every column
        h = h / jnp.maximum(jnp.abs(l), jnp.maximum(jnp.exp(-m), jnp.finfo(jnp.float32).tiny))
    else:
        h = h * jnp.exp(m)
    mosaic.store(h_ref.at[batch, head, columns], narrow(h, h_ref.dtype))

    @pl.when(part == 0)
    def _():
        mosaic.store(new_n_ref.at[batch, head], n)
        new_m_ref[batch, head] = m


def _log_sigmoid(x):
    """log(1 / (1 + e^-x)); also of -inf."""
    e = jnp.exp(-jnp.abs(x))
    more = 1 + e
    # log(1 + e), which alone would lose the digits of e that 1 + e has no room for.
    log = jnp.where(more == 1, e, jnp.log(more) * e / jnp.where(more == 1, 1, more - 1))
    return jnp.minimum(x, 0) - log
