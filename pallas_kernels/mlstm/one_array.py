"""The mLSTM cell and what follows it in an xLSTM block, on one array:

    (q | k | v | o) = packed,   y = sigmoid(o) layer_norm(cell(q, k, v, i, f), weight)

Splitting the array would copy it.  Here the kernels index its columns, and the backward kernels
write into one gradient: the norm's makes it, with the columns of o, and the kernels of dq, dk and
dv write theirs into it.
"""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.mlstm import chunkwise
from pallas_kernels.norms import kernels as norms
from pallas_kernels.norms.norm import FORMS as NORM_FORMS
from pallas_kernels.options import with_gradient
from pallas_kernels.packed import Packed


def fits(packed: Packed, weight, eps, implementation, form) -> bool:
    """Whether both the cell's and the norm's kernels read the array in place.

    Raises what `layer_norm` raises.
    """
    if not chunkwise.in_place(packed, form):
        return False
    _, (heads, dqk), _, (_, dv) = packed.parts
    h = jax.ShapeDtypeStruct((*packed.array.shape[:2], heads, dv), packed.array.dtype)
    arrays = h, weight, None, None, None, h
    norm, decision, _ = dispatch.choose(
        "layer_norm", NORM_FORMS, implementation, *arrays, centered=True, eps=eps
    )
    if not norm.is_kernel or 2 * heads * dqk % dv:
        return False
    dispatch.record(decision)
    return True


@functools.partial(
    jax.jit,  # traced and lowered once for all layers
    static_argnames=("gate", "normalize", "form", "norm_eps"),
)
def gated_cell(packed, i, f, weight, *, norm_eps, **options):
    """y; options: of `chunkwise.arguments`."""
    (x,), i, lf, _, m, starts, call = chunkwise.arguments(packed, i, f, **options)
    return _gated_cell(x, i, lf, m, starts, weight, call, norm_eps)


def _gated_forward(x, i, lf, m, starts, weight, call, eps):
    (h, _), saved = chunkwise.cell_forward((x,), i, lf, None, m, starts, call)
    (y, _), stats = norms.forward(True, eps, h, None, weight, None, x)
    return y, (saved, h, stats, weight)


def _gated_backward(call, eps, kept, dy):
    saved, h, stats, weight = kept
    (x,), *_ = saved
    # joint: the gradient of x, with the columns of o alone.
    dh, dweight, _, _, joint = norms.backward(True, h, stats, dy, None, weight, None, None, x)
    (d,), di, dlf, _, dm, _ = chunkwise.cell_backward(call, saved, (dh, None), joint)
    return d, di, dlf, dm, None, dweight


_gated_cell = with_gradient(_gated_forward, _gated_backward, nondiff_argnums=(6, 7))
