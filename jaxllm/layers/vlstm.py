"""The mixing layer of an xLSTM 7B block: projections, capped gates, the vLSTM, an output gate."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jaxllm.config.model import divides
from jaxllm.layers.cache import Cache
from jaxllm.layers.layer import Layer
from jaxllm.layers.linear import ROWS, Linear, fan_out, fused_linear, linear_of_row, takes_row
from jaxllm.layers.norm import HEADS, HeadLayerNorm, Norm, plain
from jaxllm.sharding import BATCH, P, axis_size, per_device, split_heads, split_sequence
from pallas_kernels import Packed, vlstm, vlstm_step
from pallas_kernels.dispatch import Implementation
from pallas_kernels.ids import Ids
from pallas_kernels.options import own_settings

# (B, T, NH), or side by side on each device: i and f (B, T, 2 NH); q, k, v, o (B, T, P).
GATES = P(BATCH, "context", "tensor")
STATE = (P(BATCH, "tensor"),) * 3  # (C, n, m)


class VLSTMLayer(Layer):
    """out(sigmoid(o(x)) * norm(vlstm(q(x), k(x), v(x), cap(i(x)), cap(f(x))))).

    q and k are half as wide as v; cap(z) = gate_soft_cap tanh(z / gate_soft_cap); the norm is a
    layer norm of each head.  chunk_size applies to the XLA form; the kernels have their own.
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
        linear: Callable[..., Linear] = Linear,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        divides(2 * n_heads, d_model, "2 n_heads", "d_model")
        if not gate_soft_cap > 0:
            raise ValueError(f"gate_soft_cap={gate_soft_cap} must be positive")
        self.n_heads, self.qk_dim = n_heads, d_model // (2 * n_heads)
        linear = partial(linear, implementation=implementation, rngs=rngs)
        self.q = linear(d_model, d_model // 2)
        self.k = linear(d_model, d_model // 2)
        self.v = linear(d_model, d_model)
        # Initially the gates do not depend on the input: the input gates are almost closed, the
        # forget gates open with a range of time scales, the output gates half open.
        self.i = linear(d_model, n_heads, std=0.0, bias=True)
        self.i.bias = nnx.Param(jnp.full(n_heads, -10.0, jnp.float32), axes=("tensor",))
        self.f = linear(d_model, n_heads, std=0.0, bias=True)
        spread = jnp.linspace(3.0, 6.0, n_heads, dtype=jnp.float32)
        self.f.bias = nnx.Param(spread, axes=("tensor",))
        self.o = linear(d_model, d_model, std=0.0)
        self.norm = HeadLayerNorm(n_heads, 2 * self.qk_dim, eps=eps, implementation=implementation)
        self.out = linear(d_model, d_model, axes=ROWS)
        self.gate_soft_cap = gate_soft_cap
        self.chunk_size, self.implementation = chunk_size, implementation

    def __call__(
        self,
        x: Float[Array, "B T C"],
        segment_ids: Integer[Ids, "B T"] | None = None,
        *,
        norm: Norm | None = None,
    ) -> Float[Array, "B T C"]:
        """Applies the layer; the state is zero at the start of every sequence and segment.

        norm: the norm that produced x, as for Linear.
        """
        self.q.check(x, "B T C")
        divides(axis_size("tensor", "context"), self.n_heads, "tensor x context", "n_heads")
        # The joint matmul includes o, unless devices share a sequence: they do not exchange o.
        joins = axis_size("context") == 1 and plain(self.norm, HeadLayerNorm)
        # The gates come first: XLA fuses no gradient addition into a matmul of few columns.
        x_gates, x_joint, *x_o = fan_out(x, 2 if joins else 3)
        # One joint matmul: two would each read all of x for a few columns.  In float32: near 6,
        # bf16 has a resolution of 0.03, and the error adds up over T.
        gates = fused_linear(x_gates, self.i, self.f, dtype=jnp.float32)
        gates = soft_cap(gates, self.gate_soft_cap)
        layers = (self.q, self.k, self.v, self.o)[: 4 if joins else 3]
        joint = fused_linear(x_joint, *layers, norm=norm)
        weight = self.norm.weight[...].reshape(self.n_heads, -1) if joins else None
        specs = GATES, GATES, P("tensor", None), P(BATCH, None)
        y = per_device(self._mix_joint, specs, HEADS)(joint, gates, weight, segment_ids)
        y = y if joins else self.norm(y, self.o(*x_o, norm=norm).reshape(y.shape))
        return self.out(y.reshape(x.shape))

    def with_cache(
        self, x: Float[Array, "B T C"], cache: Cache
    ) -> tuple[Float[Array, "B T C"], Cache]:
        """(y, updated cache) of the prompts, in the first call, or of one further token per row."""
        h, cache = self._mix_with_state(x, [w(x) for w in (self.q, self.k, self.v, self.o)], cache)
        return self.out(h), cache

    def takes_row(self, x: Float[Array, "..."]) -> bool:
        """Whether `of_row` applies to x."""
        return takes_row(x, self.q, self.k, self.v, self.o) and takes_row(x, self.out)

    def of_row(
        self, x: Float[Array, "1 1 C"], norm: Norm, cache: Cache
    ) -> tuple[Float[Array, "1 1 C"], Cache]:
        """(x + layer(norm(x)), updated cache) of the next token of a single row."""
        y = norm(x)  # in a separate kernel: the gates need it, too, and have few columns
        h, cache = self._mix_with_state(y, linear_of_row(y, self.q, self.k, self.v, self.o), cache)
        return linear_of_row(h, self.out, residual=x)[0], cache

    def _mix(self, q, k, v, i, f, **options) -> Any:
        options |= dict(chunk_size=self.chunk_size, implementation=self.implementation)
        return vlstm(q, k, v, i, f, **options)

    def _mix_joint(self, x, gates, weight, segment_ids):
        """x: q, k, v and, if there is a weight of the norm, o."""
        x, gates = map(split_heads, (x, gates))
        i, f = jnp.split(gates, 2, axis=-1)
        heads, d = i.shape[2], self.qk_dim
        parts = (heads, d), (heads, d), *[(heads, 2 * d)] * (1 if weight is None else 2)
        options = dict(norm_weight=weight, norm_eps=self.norm.eps, segment_ids=segment_ids)
        return split_sequence(self._mix(Packed(x, parts), None, None, i, f, **options))

    def _mix_with_state(self, x, qkvo, cache):
        """(the input of `out`, updated cache), of x and its q, k, v and o (B, T, P).

        The first call computes the state; each later call advances it by one position.
        """
        by_head = lambda a: a.reshape(*x.shape[:2], self.n_heads, a.shape[2] // self.n_heads)
        q, k, v, o = map(by_head, qkvo)
        i, f = (soft_cap(w(x, jnp.float32), self.gate_soft_cap) for w in (self.i, self.f))
        sequences = (HEADS, HEADS, HEADS, GATES, GATES)
        if cache.arrays is None:
            # Padding must not change the state: its input gate is closed, its forget gate open.
            inside = (jnp.arange(q.shape[1])[None] < cache.lengths[:, None])[..., None]
            i, f = jnp.where(inside, i, -jnp.inf), jnp.where(inside, f, 100.0)
            op = per_device(partial(self._mix, return_state=True), sequences, (HEADS, STATE))
            h, state = op(q, k, v, i, f)
        else:
            op = per_device(self._step, (*sequences, STATE), (HEADS, STATE))
            h, state = op(q, k, v, i, f, cache.arrays)
        return self.norm(h, o).reshape(x.shape), replace(cache, arrays=state)

    def _step(self, q, k, v, i, f, state):
        if (t := q.shape[1]) != 1:
            raise ValueError(f"T={t} tokens after the prompts: a call takes one token per row")
        q, k, v, i, f = (x[:, 0] for x in (q, k, v, i, f))
        # Not "mosaic", even if training asks for kernels: this kernel has other limits.
        implementation = "xla" if self.implementation == "xla" else None
        h, state = vlstm_step(q, k, v, i, f, state, implementation=implementation)
        return h[:, None], state


@own_settings()
def soft_cap(z: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """cap tanh(z / cap), computed in float32 and returned in z's dtype."""
    return (cap * jnp.tanh(z.astype(jnp.float32) / cap)).astype(z.dtype)
