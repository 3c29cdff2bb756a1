"""The mLSTM cell on one array of queries, keys and values, and perhaps of the output gates.

    (q | k | v) = packed,       h = cell(q, k, v, i, f)
    (q | k | v | o) = packed,   y = sigmoid(o) layer_norm(cell(q, k, v, i, f), weight)

Splitting the array would copy it.  Here the kernels index its columns, and the backward kernels
write into one gradient: the norm's makes it, with the columns of o, and the kernels of dq, dk and
dv write theirs into it.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, mosaic
from pallas_kernels.mlstm import chunkwise, reference
from pallas_kernels.norms import kernels as norms
from pallas_kernels.norms.norm import FORMS as NORM_FORMS
from pallas_kernels.norms.norm import LAYER
from pallas_kernels.options import custom_vjp
from pallas_kernels.packed import Packed


def fits(packed: Packed, form: chunkwise.CellForm) -> bool:
    """Whether the kernels take the array as it is: without padding."""
    (_, dqk), _, (_, dv), *_ = packed.parts
    return not (dqk % 64 or dv % 64 or packed.array.shape[1] % form.rows)


def norm_fits(packed: Packed, weight, eps, implementation) -> bool:
    """Whether the norm's kernels read o in place; otherwise it must be split off.

    Raises what `layer_norm` raises.
    """
    _, (heads, dqk), _, (_, dv) = packed.parts
    h = jax.ShapeDtypeStruct((*packed.array.shape[:2], heads, dv), packed.array.dtype)
    arrays = h, weight, None, None, None, h
    options = dict(kind=LAYER, eps=eps)
    form, decision, _ = dispatch.choose(
        "layer_norm", NORM_FORMS, implementation, *arrays, **options
    )
    if not form.is_kernel or 2 * heads * dqk % dv:
        return False
    dispatch.record(decision)
    return True


@functools.partial(
    jax.jit,  # traced and lowered once for all layers
    static_argnames=("gate", "normalize", "form", "norm_eps"),
)
def _in_one_array(packed, i, f, weight, *, gate, normalize, segment_ids, form, norm_eps):
    batch, length, heads = i.shape
    (_, dqk), _, (_, dv), *_ = packed.parts
    several = segment_ids is not None
    starts = reference._starts(segment_ids, i.shape[:2]) if several else None
    i, lf = reference._log_gates(i, f, gate, jnp.float32)
    size, sms = chunkwise.tile_size(dqk, dv, form), mosaic.sm_count()
    m = jnp.zeros((batch, heads), jnp.float32)
    call = chunkwise.CellCall(length, dqk, dv, size, normalize, several, False, False, sms, form)
    if weight is None:
        return chunkwise.cell((packed.array,), i, lf, None, m, starts, call)[0]
    return _gated_cell(packed.array, i, lf, m, starts, weight, call, norm_eps)


@functools.partial(custom_vjp, nondiff_argnums=(6, 7))
def _gated_cell(x, i, lf, m, starts, weight, call, eps):
    return _gated_forward(x, i, lf, m, starts, weight, call, eps)[0]


def _gated_forward(x, i, lf, m, starts, weight, call, eps):
    (h, _), saved = chunkwise.cell_forward((x,), i, lf, None, m, starts, call)
    (y, _), stats = norms.forward(LAYER, eps, h, None, weight, None, x)
    return y, (saved, h, stats, weight)


def _gated_backward(call, eps, kept, dy):
    saved, h, stats, weight = kept
    (x,), *_ = saved
    # joint: the gradient of x, with the columns of o alone.
    dh, dweight, _, _, joint = norms.backward(LAYER, h, stats, dy, None, weight, None, None, x)
    (d,), di, dlf, _, dm, _ = chunkwise.cell_backward(call, saved, (dh, None), joint)
    return d, di, dlf, dm, None, dweight


_gated_cell.defvjp(_gated_forward, _gated_backward)
