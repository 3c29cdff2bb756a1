"""The vLSTM on one array of queries, keys and values, and perhaps of the output gates.

    (q | k | v) = qkv,        h = vlstm(q, k, v, i, f)
    (q | k | v | o) = qkvo,   y = sigmoid(o) layer_norm(vlstm(q, k, v, i, f), weight)

One matmul can then compute all of them, and its backward pass takes two matmuls instead of six or
eight.  Splitting the array for `vlstm` and `layer_norm` would copy it.  Here the kernels index its
columns, and those of the backward pass write into one gradient: the norm's makes it, with the
columns of o, and those that compute dq, dk and dv write theirs into it.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.mlstm import chunkwise, reference
from pallas_kernels.mlstm.op import Gate, check, vlstm, why_not
from pallas_kernels.norms import kernels as norms
from pallas_kernels.norms import tiles
from pallas_kernels.norms.norm import LAYER, layer_norm
from pallas_kernels.options import checked


@checked
def vlstm_qkv(
    qkv: Float[Array, "B T P"],
    i: Float[Array, "B T NH"],
    f: Float[Array, "B T NH"],
    dqk: int,
    *,
    gate: Gate = "exp",
    normalize: bool = True,
    segment_ids: Integer[ids.Ids, "B T"] | None = None,
    eps: float = 0.0,
    chunk_size: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T NH DV"]:
    """Returns h for every position, in qkv's dtype, from a state of zero.

    qkv: has P = NH (2 dqk + DV) columns: the NH heads of q, then those of k, then those of v.
    dqk: columns of a head of q, and of k.
    Everything else is as in `vlstm`.  Without padding, that is for dqk and DV in multiples of 64
    and on Hopper T in multiples of 8, the kernels take qkv as it is; else it is split in copies.
    Raises ValueError for columns that do not add up, and what `vlstm` raises.
    """
    dv, heads = _value_width(i, f, dqk, 1, qkv=qkv), i.shape[2]
    segment_ids = ids.documents(segment_ids)
    options: dict[str, Any] = dict(gate=gate, normalize=normalize, segment_ids=segment_ids)
    others: dict[str, Any] = dict(eps=eps, chunk_size=chunk_size, implementation=implementation)
    form = _form(qkv, i, f, dqk, dv, segment_ids=segment_ids, **others)
    if form is None:
        q, k, v = _parts(qkv, heads, dqk, dqk, dv)
        # pyrefly: ignore[bad-return]
        return vlstm(q, k, v, i, f, **options, **others)
    _record(form, implementation)
    return _in_one_array(qkv, i, f, None, dqk=dqk, dv=dv, form=form, **options)


@checked
def vlstm_qkvo(
    qkvo: Float[Array, "B T P"],
    i: Float[Array, "B T NH"],
    f: Float[Array, "B T NH"],
    weight: Float[Array, "NH DV"],
    dqk: int,
    *,
    gate: Gate = "exp",
    normalize: bool = True,
    segment_ids: Integer[ids.Ids, "B T"] | None = None,
    norm_eps: float = 1e-6,
    chunk_size: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T NH DV"]:
    """Returns sigmoid(o) layer_norm(h, weight) for every position, in qkvo's dtype.

    qkvo: has P = NH (2 dqk + 2 DV) columns: the heads of q, k, v and o, as in `vlstm_qkv`.
    weight: of the norm of each head, which has no bias; norm_eps: its eps.
    Everything else is as in `vlstm`, with eps = 0.  h is rounded to qkvo's dtype, and the norm
    computes as `layer_norm`.  The kernels take qkvo as it is where `vlstm_qkv` takes qkv so,
    if DV divides 2 NH dqk; else it is split in copies.
    Raises ValueError for columns that do not add up, and what `vlstm` and `layer_norm` raise.
    """
    dv, heads = _value_width(i, f, dqk, 2, qkvo=qkvo), i.shape[2]
    if weight.shape != (heads, dv):
        raise ValueError(f"weight has shape {weight.shape}, not (NH, DV) = {(heads, dv)}")
    segment_ids = ids.documents(segment_ids)
    options: dict[str, Any] = dict(gate=gate, normalize=normalize, segment_ids=segment_ids)
    others: dict[str, Any] = dict(chunk_size=chunk_size, implementation=implementation)
    form = _form(qkvo, i, f, dqk, dv, segment_ids=segment_ids, eps=0.0, **others)
    general = dispatch.general_form(implementation, rival=False, gpu="sm_90")
    h = jax.ShapeDtypeStruct((*i.shape, dv), qkvo.dtype)
    gated = h, weight, None, None, None, h
    split = tiles.why_not(*gated, kind=LAYER, eps=norm_eps, general=general) or 2 * heads * dqk % dv
    if form is None or split:
        q, k, v, o = _parts(qkvo, heads, dqk, dqk, dv, dv)
        h = vlstm(q, k, v, i, f, **options, **others)
        # pyrefly: ignore[bad-argument-type]
        # pyrefly: ignore[bad-return]
        return layer_norm(h, weight, gate=o, eps=norm_eps, implementation=implementation)
    _record(form, implementation)
    # A GPU that supports the vLSTM's kernels also supports the norm's.
    dispatch.use_kernel("layer_norm", implementation, None, "sm_90", general=general)
    options |= dict(norm=(norm_eps, general))
    return _in_one_array(qkvo, i, f, weight, dqk=dqk, dv=dv, form=form, **options)


def _value_width(i, f, dqk: int, count: int, **array) -> int:
    """DV of the named array, whose columns are q, k and then `count` arrays as wide as v."""
    mosaic.check_axes("B T P", **array)
    mosaic.check_axes("B T NH", i=i, f=f)
    ((name, x),), heads = array.items(), i.shape[2]
    dv, left = divmod(x.shape[2] - 2 * heads * dqk, count * heads or 1)
    if left or heads < 1 or dqk < 1 or dv < 1:
        values = "DV" if count == 1 else f"{count} DV"
        raise ValueError(
            f"{name} has {x.shape[2]} columns, not NH={heads} times 2 dqk={dqk} plus {values} > 0"
        )
    return dv


def _form(x, i, f, dqk, dv, *, segment_ids, eps, chunk_size, implementation):
    """The form of the kernels that take q, k and v as columns of x, None if x must be split.

    Raises what `vlstm` raises.
    """
    general = dispatch.general_form(implementation, rival=False)
    form = chunkwise.GENERAL if general else chunkwise.HOPPER
    of = lambda width: jax.ShapeDtypeStruct((*x.shape[:2], i.shape[2], width), x.dtype)
    shapes = of(dqk), of(dqk), of(dv), i, f
    check(*shapes, segment_ids=segment_ids, chunk_size=chunk_size)
    padded = dqk % 64 or dv % 64 or x.shape[1] % form.rows
    runs = dispatch.decide("vlstm", implementation, None, _gpu(form)).runs
    return None if padded or why_not(*shapes, eps=eps) or runs == "xla" else form


def _record(form: chunkwise.Form, implementation):
    general = form is chunkwise.GENERAL
    dispatch.use_kernel("vlstm", implementation, None, _gpu(form), general=general)


def _gpu(form: chunkwise.Form) -> dispatch.Gpu:
    return "sm_80" if form is chunkwise.GENERAL else "sm_90a"


def _parts(x, heads: int, *widths: int) -> list[jax.Array]:
    """The heads of each of these widths."""
    ends = itertools.accumulate(heads * width for width in widths[:-1])
    parts = jnp.split(x, list(ends), axis=2)
    return [
        part.reshape(*x.shape[:2], heads, width) for part, width in zip(parts, widths, strict=True)
    ]


@functools.partial(
    jax.jit,  # traced and lowered once for all layers
    static_argnames=("dqk", "dv", "gate", "normalize", "form", "norm"),
)
def _in_one_array(x, i, f, weight, *, dqk, dv, gate, normalize, segment_ids, form, norm=None):
    """norm: (eps, whether in the general form), if there is a weight."""
    batch, length, heads = i.shape
    packed = segment_ids is not None
    starts = reference._starts(segment_ids, i.shape[:2]) if packed else None
    i, lf = reference._log_gates(i, f, gate, jnp.float32)
    size, sms = chunkwise.tile_size(dqk, dv, form), mosaic.sm_count()
    m = jnp.zeros((batch, heads), jnp.float32)
    call = chunkwise.Call(length, dqk, dv, size, normalize, packed, False, False, sms, form)
    if weight is None:
        return chunkwise.cell((x,), i, lf, None, m, starts, call)[0]
    return _gated_cell(x, i, lf, m, starts, weight, call, norm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _gated_cell(qkvo, i, lf, m, starts, weight, call, norm):
    return _gated_forward(qkvo, i, lf, m, starts, weight, call, norm)[0]


def _gated_forward(qkvo, i, lf, m, starts, weight, call, norm):
    eps, general = norm
    (h, _), saved = chunkwise.cell_forward((qkvo,), i, lf, None, m, starts, call)
    (y, _), stats = norms.forward(LAYER, eps, general, h, None, weight, None, qkvo)
    return y, (saved, h, stats, weight)


def _gated_backward(call, norm, kept, dy):
    (saved, h, stats, weight), (_, general) = kept, norm
    (qkvo,), *_ = saved
    # joint: the gradient of qkvo, with the columns of o alone.
    dh, dweight, _, _, joint = norms.backward(
        LAYER, general, h, stats, dy, None, weight, None, None, qkvo
    )
    (d,), di, dlf, _, dm, _ = chunkwise.cell_backward(call, saved, (dh, None), joint)
    return d, di, dlf, dm, None, dweight


_gated_cell.defvjp(_gated_forward, _gated_backward)
