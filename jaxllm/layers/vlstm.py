"""The mixing layer of an xLSTM 7B block: projections, capped gates, the vLSTM, an output gate."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.layers.cache import Cache
from jaxllm.layers.linear import ROWS, Linear, copies, joined
from jaxllm.layers.norm import HEADS, HeadLayerNorm
from jaxllm.sharding import BATCH, P, per_device
from pallas_kernels import vlstm, vlstm_step
from pallas_kernels.dispatch import Implementation

GATES = P(BATCH, None, "tensor")  # (B, T, NH), or 2 NH: on each device i beside f
STATE = (P(BATCH, "tensor"),) * 3  # (C, n, m)


class VLSTMLayer(nnx.Module):
    """out(sigmoid(o(x)) * norm(vlstm(q(x), k(x), v(x), cap(i(x)), cap(f(x))))).

    q and k are half as wide as v; cap(z) = gate_soft_cap tanh(z / gate_soft_cap); the norm is a
    layer norm of each head.  chunk_size is that of the XLA form; the kernels have their own.
    Beck et al. 2025, "xLSTM 7B", section 3.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_soft_cap: float = 15.0,
        eps: float = 1e-6,
        chunk_size: int = 64,
        std: float = 0.02,
        out_std: float | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        self.q = Linear(d_model, d_model // 2, std=std, rngs=rngs)
        self.k = Linear(d_model, d_model // 2, std=std, rngs=rngs)
        self.v = Linear(d_model, d_model, std=std, rngs=rngs)
        # The gates start independent of the input: input gate almost shut, forget gates open for
        # a spread of time scales, output gate half open.
        self.i = Linear(d_model, n_heads, std=0.0, bias=True, rngs=rngs)
        self.i.bias = nnx.Param(jnp.full(n_heads, -10.0), axes=("tensor",))
        self.f = Linear(d_model, n_heads, std=0.0, bias=True, rngs=rngs)
        self.f.bias = nnx.Param(jnp.linspace(3.0, 6.0, n_heads), axes=("tensor",))
        self.o = Linear(d_model, d_model, std=0.0, rngs=rngs)
        self.norm = HeadLayerNorm(
            n_heads, d_model // n_heads, eps=eps, implementation=implementation
        )
        self.out = Linear(d_model, d_model, axes=ROWS, std=out_std or std, rngs=rngs)
        self.n_heads, self.gate_soft_cap = n_heads, gate_soft_cap
        self.chunk_size, self.implementation = chunk_size, implementation

    def __call__(
        self,
        x: Float[Array, "B T C"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T C"]:
        """The memory starts empty with every sequence and wherever the segment's id changes."""
        return self.with_cache(x, segment_ids, None)[0]

    def with_cache(
        self,
        x: Float[Array, "B T C"],
        segment_ids: Int[Array, "B T"] | None,
        cache: Cache | None,
    ) -> tuple[Float[Array, "B T C"], Cache | None]:
        """(y, what is kept of the tokens from here on); without a cache as `__call__`.

        Segments are not supported with a cache.
        """
        B, T, C = x.shape
        *xs, x_gates, x_o = copies(x, 5)
        q, k, v = (
            w(x).reshape(B, T, self.n_heads, -1)
            for w, x in zip((self.q, self.k, self.v), xs, strict=True)
        )
        # float32: in bf16 a forget gate of 6 is known to 0.03 only, and its error adds up over T.
        if cache is None:
            # One matmul: each of them reads all of x for a few columns.
            gates = joined(x_gates, self.i, self.f, dtype=jnp.float32)
            gates = soft_cap(gates, self.gate_soft_cap)
            h = per_device(
                self._mix_joined,
                in_specs=(HEADS, HEADS, HEADS, GATES, P(BATCH, None)),
                out_specs=HEADS,
            )(q, k, v, gates, segment_ids)
        else:
            i, f = (soft_cap(w(x, jnp.float32), self.gate_soft_cap) for w in (self.i, self.f))
            h, cache = self._mix_with_state(q, k, v, i, f, cache)
        h = self.norm(h).reshape(B, T, C)
        return self.out(jax.nn.sigmoid(self.o(x_o)) * h), cache

    def _mix_joined(self, q, k, v, gates, segment_ids):
        i, f = jnp.split(gates, 2, axis=-1)
        return self._mix(q, k, v, i, f, segment_ids)

    def _mix(self, q, k, v, i, f, segment_ids, return_state=False):
        return vlstm(
            q,
            k,
            v,
            i,
            f,
            segment_ids=segment_ids,
            return_state=return_state,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )

    def _mix_with_state(self, q, k, v, i, f, cache):
        """The first call makes the state, each later one takes it a position further."""
        sequences = (HEADS, HEADS, HEADS, GATES, GATES)
        if cache.arrays is None:
            # Past its row's end a token lets nothing in and nothing fade.
            inside = (cache.positions >= 0)[..., None]
            i, f = jnp.where(inside, i, -jnp.inf), jnp.where(inside, f, 100.0)
            mix = partial(self._mix, segment_ids=None, return_state=True)
            op = per_device(mix, sequences, (HEADS, STATE))
            h, state = op(q, k, v, i, f)
            return h, replace(cache, arrays=state)

        def step(q, k, v, i, f, state):
            h, state = vlstm_step(q[:, 0], k[:, 0], v[:, 0], i[:, 0], f[:, 0], state)
            return h[:, None], state

        op = per_device(step, (*sequences, STATE), (HEADS, STATE))
        h, state = op(q, k, v, i, f, cache.arrays)
        return h, replace(cache, arrays=state)


def soft_cap(z: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """cap tanh(z / cap), in float32, returned in z's dtype."""
    return (cap * jnp.tanh(z.astype(jnp.float32) / cap)).astype(z.dtype)
