"""The vLSTM on one array of queries, keys and values.

    (q | k | v) = qkv,   h = vlstm(q, k, v, i, f)

One matmul can then compute q, k and v, and its backward pass takes two matmuls instead of six.
Splitting the array for `vlstm` would copy it.  Here the kernels index its columns, and the kernels
that compute dq, dk and dv write into one gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, mosaic
from pallas_kernels.mlstm import chunkwise, reference
from pallas_kernels.mlstm.op import Gate, check, vlstm, why_not


def vlstm_qkv(
    qkv: Float[Array, "B T P"],
    i: Float[Array, "B T NH"],
    f: Float[Array, "B T NH"],
    dqk: int,
    *,
    gate: Gate = "exp",
    normalize: bool = True,
    segment_ids: Int[Array, "B T"] | None = None,
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
    mosaic.check_axes("B T P", qkv=qkv)
    mosaic.check_axes("B T NH", i=i, f=f)
    heads = i.shape[2]
    dv, left = divmod(qkv.shape[2], heads or 1)
    dv -= 2 * dqk
    if left or heads < 1 or dqk < 1 or dv < 1:
        raise ValueError(
            f"qkv has {qkv.shape[2]} columns, not NH={heads} times 2 dqk={dqk} plus DV > 0"
        )
    general = dispatch.general_form(implementation, rival=False)
    form = chunkwise.GENERAL if general else chunkwise.HOPPER
    gpu = "sm_80" if general else "sm_90a"
    of = lambda width: jax.ShapeDtypeStruct((*qkv.shape[:2], heads, width), qkv.dtype)
    shapes = of(dqk), of(dqk), of(dv), i, f
    check(*shapes, gate, segment_ids=segment_ids, chunk_size=chunk_size)
    padded = dqk % 64 or dv % 64 or qkv.shape[1] % form.rows
    decision = dispatch.decide("vlstm", implementation, None, gpu)
    options: dict[str, Any] = dict(gate=gate, normalize=normalize, segment_ids=segment_ids)
    if padded or why_not(*shapes, eps=eps) or decision.runs != "mosaic":
        parts = jnp.split(qkv, (heads * dqk, 2 * heads * dqk), axis=2)
        q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in parts)
        options |= dict(eps=eps, chunk_size=chunk_size, implementation=implementation)
        # pyrefly: ignore[bad-return]
        return vlstm(q, k, v, i, f, **options)
    dispatch.use_kernel("vlstm", implementation, None, gpu, general=general)
    return _in_one_array(qkv, i, f, dqk=dqk, form=form, **options)


@functools.partial(
    jax.jit,  # traced and lowered once for all layers
    static_argnames=("dqk", "gate", "normalize", "form"),
)
def _in_one_array(qkv, i, f, *, dqk, gate, normalize, segment_ids, form):
    (batch, length, columns), heads = qkv.shape, i.shape[2]
    packed = segment_ids is not None
    starts = reference._starts(segment_ids, i.shape[:2]) if packed else None
    i, lf = reference._log_gates(i, f, gate, jnp.float32)
    size = chunkwise.tile_size(dqk, columns // heads - 2 * dqk, form)
    sms, m = mosaic.sm_count(), jnp.zeros((batch, heads), jnp.float32)
    call = chunkwise.Call(length, dqk, size, normalize, packed, False, False, sms, form)
    return chunkwise.cell((qkv,), i, lf, None, m, starts, call)[0]
