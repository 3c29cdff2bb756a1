"""vLSTM: the mLSTM cell of xLSTM, a linear attention with exponential gates and a normaliser.

    C_t = sigmoid(f_t) C_{t-1} + exp(i_t) k_t v_t^T      n_t = sigmoid(f_t) n_{t-1} + exp(i_t) k_t
    h_t = (s q_t)^T C_t / max(|s q_t . n_t|, 1)          s = DQK^-1/2

C and n are stored as C e^-m and n e^-m, so that no exponential overflows.  Beck et al. 2024,
"xLSTM: Extended Long Short-Term Memory", equations 19 to 27; the chunkwise form is from Beck et al.
2025, "Tiled Flash Linear Attention".  The gradients are exact: they include the normaliser and the
initial and final states.

With a `norm_weight` the output gate and the norm of each head follow, as in an xLSTM block:

    y_t = sigmoid(o_t) layer_norm(h_t) norm_weight
"""

import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.mlstm import chunkwise, reference
from pallas_kernels.norms.norm import layer_norm
from pallas_kernels.options import checked
from pallas_kernels.packed import Packed, operands_of, shapes, split

State = tuple[Float[Array, "B NH DQK DV"], Float[Array, "B NH DQK"], Float[Array, "B NH"]]
Gate = Literal["exp", "sigmoid"]


@checked
def vlstm(
    q: Float[Array, "B T NH DQK"] | Packed,
    k: Float[Array, "B T NH DQK"] | None,
    v: Float[Array, "B T NH DV"] | None,
    i: Float[Array, "B T NH"],
    f: Float[Array, "B T NH"],
    *,
    gate: Gate = "exp",
    normalize: bool = True,
    segment_ids: Integer[ids.Ids, "B T"] | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    norm_weight: Float[Array, "NH DV"] | None = None,
    norm_eps: float = 1e-6,
    eps: float = 0.0,
    chunk_size: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Any:
    """Returns h for every position, in q's dtype, or with return_state (h, the final state).

    q: or a `Packed` of q, k and v, with k=None and v=None.  The kernels read it in place for DQK
        and DV in multiples of 64; otherwise it is split into copies.
    i, f: pre-activations of the input gate and the forget gate; finite, but i may be -inf, which
        closes the input gate.
    gate: whether the input gate is exp(i) or sigmoid(i).
    normalize: False leaves out the denominator.
    segment_ids: the state is reset to zero where the id changes.  The initial state belongs to the
        first segment, the final state to the last.
    initial_state: (C, n, m), float32, which represents (C e^m, n e^m); default zero.
    norm_weight: returns sigmoid(o) layer_norm(h, norm_weight, eps=norm_eps) in place of h, where o
        is a fourth part of the `Packed`.  h is rounded to q's dtype before the norm, which computes
        like `layer_norm`.  To be read in place, the `Packed` needs a DV that divides 2 NH DQK.
    eps: added to the stabilised denominator max(|l|, e^-m); 0 makes values and gradients exact.
    chunk_size: positions in a chunk of the XLA form (default: 64 to 256, by DQK and DV).  Larger
        chunks need more time and memory for their matrices and less for the states between them;
        h stays the same.  The kernels pad DQK and DV to multiples of 64; their chunks have 64
        positions.

    Operands of matmuls have q's dtype; sums, gates and states are float32 (float64 for float64);
    float16 saturates at 65504.  Memory is linear in T.  For the backward pass the kernels save the
    arguments and the states between chunks, the XLA form only the arguments.
    """
    operands = operands_of(q, dict(k=k, v=v), "qkv" if norm_weight is None else "qkvo")
    of_q, of_k, of_v, *of_o = shapes(operands)
    (segment_ids,) = ids.segments(segment_ids)
    mosaic.check_axes("B T NH DQK", q=of_q)
    check(of_q, of_k, of_v, i, f, initial_state, segment_ids, chunk_size)
    if norm_weight is not None:
        if not of_o:
            raise ValueError("norm_weight needs a Packed of q, k, v and o")
        if of_o[0].shape != of_v.shape:
            raise ValueError(f"o has shape {of_o[0].shape} but v {of_v.shape}: they must be equal")
        if norm_weight.shape != of_v.shape[2:]:
            need = f"(NH, DV) = {of_v.shape[2:]}"
            raise ValueError(f"norm_weight has shape {norm_weight.shape}, not {need}")
    options = dict(
        gate=gate, normalize=normalize, segment_ids=segment_ids, initial_state=initial_state,
        return_state=return_state, norm_eps=norm_eps, eps=eps, chunk_size=chunk_size,
        implementation=implementation,  # for the norm, where it is a separate op
    )  # fmt: skip
    return dispatch.run("vlstm", FORMS, implementation, operands, i, f, norm_weight, **options)


@checked
def vlstm_step(
    q: Float[Array, "B NH DQK"],
    k: Float[Array, "B NH DQK"],
    v: Float[Array, "B NH DV"],
    i: Float[Array, "B NH"],
    f: Float[Array, "B NH"],
    state: State,
    *,
    gate: Gate = "exp",
    normalize: bool = True,
    eps: float = 0.0,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "B NH DV"], State]:
    """Returns h for one more position and the state after it, in constant time and memory.

    It computes in float32 (float64 for float64).  The arguments are `vlstm`'s, without T.  XLA
    runs it: a kernel that read and wrote C once made no token of a vLSTM faster (docs/vlstm.md).
    """
    mosaic.check_axes("B NH DQK", q=q)
    check(q, k, v, i, f, state)
    arrays, options = (q, k, v, i, f, state), dict(gate=gate, normalize=normalize, eps=eps)
    return dispatch.run("vlstm_step", STEP, implementation, *arrays, **options)


def _run(
    operands, i, f, norm_weight, *, kernels: bool, initial_state, return_state, norm_eps, eps,
    chunk_size, implementation, **options,
):  # fmt: skip
    """The op by the kernels or by jnp; with a weight the norm as well."""
    o = None
    if norm_weight is not None:
        alone = kernels and not return_state and initial_state is None
        if alone and chunkwise.gated_fits(operands, norm_weight, norm_eps, implementation):
            return chunkwise.chunkwise(operands, i, f, norm_weight, norm_eps=norm_eps, **options)
        *operands, o = split(operands)
    options |= dict(initial_state=initial_state, return_state=return_state)
    if kernels:
        result = chunkwise.chunkwise(operands, i, f, **options)
    else:
        options |= dict(eps=eps, chunk_size=chunk_size)
        result = reference.chunkwise(*split(operands), i, f, **options)
    if norm_weight is None:
        return result
    h, *state = result if return_state else (result,)
    how = "xla" if h.shape[-1] % 64 else implementation  # the norm has no kernel for such heads
    y = layer_norm(h, norm_weight, gate=o, eps=norm_eps, implementation=how)
    return (y, *state) if return_state else y


def why_not(operands, *arrays, eps=0.0, **options) -> str | None:
    q, _, v, *_ = shapes(operands)
    if eps != 0:
        return f"eps={eps} is not 0, and h is independent of the stabiliser only at 0"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype}, not bfloat16 or float16"
    for name, width, limit in (("DQK", q.shape[-1], 256), ("DV", v.shape[-1], 512)):
        if width % 16 or width > limit:
            return f"{name}={width} is not a multiple of 16 up to {limit}"
    return mosaic.empty(q=q, v=v)


def check(q, k, v, i, f, state=None, segment_ids=None, chunk_size=None):
    """Raises ValueError for shapes, dtypes and options that do not match."""
    if not (q.shape == k.shape and q.shape[:-1] == v.shape[:-1] == i.shape == f.shape):
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}, i {i.shape} and f {f.shape} do not match: v"
            " may differ from q and k only in its last axis, and i and f lack that axis"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: cast them to one dtype")
    if state is not None:
        b, h, dqk, dv = q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1]
        need, have = [(b, h, dqk, dv), (b, h, dqk), (b, h)], [x.shape for x in state]
        if have != need:
            raise ValueError(f"the state (C, n, m) has shapes {have}, not {need}")
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids have shape {segment_ids.shape}, not {q.shape[:2]}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} is not at least 1")


FORMS = (
    Form("general", functools.partial(_run, kernels=True), "sm_80", why_not),
    Form("xla", functools.partial(_run, kernels=False)),
)
STEP = (Form("xla", reference.step),)
