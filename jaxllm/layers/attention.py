"""Causal self-attention with grouped key and value heads and optional RoPE."""

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
from jaxllm.layers.linear import ROWS, Linear, fused_linear, linear_of_row, takes_row
from jaxllm.layers.norm import HEADS, Norm, RMSNorm, plain
from jaxllm.sharding import BATCH, P, axis_size, per_device, split_heads, split_sequence
from pallas_kernels import Packed, attention, decode_attention, ids, rms_norm, rope
from pallas_kernels.dispatch import Implementation
from pallas_kernels.ids import Ids


class Attention(Layer):
    """softmax(q k^T / sqrt(D), causal) v on H query heads; without rope_theta it has no positions.

    H/K query heads share a kv head.

    bias: all four projections have biases; qkv_bias: only q, k and v do.
    qk_norm: epsilon of an RMS norm of every q and k head before RoPE; None: no norm.
    rope_theta: base of the rotary frequencies, in the half-split layout; None: no RoPE.
    rope_scaling: Llama 3.1's scaling of the frequencies, or YaRN's, a RopeScaling or None.
    window: number of keys that a query sees, including its own; None: all up to its own.
    softcap: caps the logits as softcap tanh(logits / softcap); None: no cap.
    linear: makes the layers, like Linear; Llama's names of matrices are passed as `name`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qkv_bias: bool = False,
        qk_norm: float | None = None,
        rope_theta: float | None = None,
        rope_scaling=None,
        window: int | None = None,
        softcap: float | None = None,
        linear: Callable[..., Linear] = Linear,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        self.n_heads, self.n_kv_heads = n_heads, n_heads if n_kv_heads is None else n_kv_heads
        divides(self.n_kv_heads, n_heads, "n_kv_heads", "n_heads")
        if head_dim is None:
            divides(n_heads, d_model, "n_heads", "d_model")
            head_dim = d_model // n_heads
        self.head_dim, biases = head_dim, bias or qkv_bias
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        linear = partial(linear, implementation=implementation, rngs=rngs)
        # Separate matrices let the mesh divide the columns of each by heads.
        self.q = linear(d_model, q, name="q_proj", bias=biases)
        self.k = linear(d_model, kv, name="k_proj", bias=biases)
        self.v = linear(d_model, kv, name="v_proj", bias=biases)
        self.out = linear(q, d_model, name="o_proj", axes=ROWS, bias=bias)
        norm = partial(RMSNorm, self.head_dim, implementation=implementation)
        self.q_norm = None if qk_norm is None else norm(eps=qk_norm)
        self.k_norm = None if qk_norm is None else norm(eps=qk_norm)
        if rope_theta is None and rope_scaling is not None:
            raise ValueError(f"rope_scaling={rope_scaling} needs rope_theta, which it scales")
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        factor = getattr(rope_scaling, "attention_factor", None)  # rope refuses another type
        self.scale = factor and factor**2 / head_dim**0.5
        self.window, self.softcap, self.implementation = window, softcap, implementation

    def __call__(
        self,
        x: Float[Array, "B T C"],
        positions: Integer[Ids, "..."] | None = None,
        segment_ids: Integer[Ids, "B T"] | None = None,
        *,
        add_bias: bool = True,
        norm: Norm | None = None,
    ) -> Float[Array, "B T C"]:
        """Applies the layer; (B, T, C) -> (B, T, C).

        positions: (T,) or (B, T) for RoPE; None: 0 ... T-1.
        segment_ids: tokens see only their own segment.
        add_bias: False leaves the bias of `out` to the next op.
        norm: the norm that produced x, as for Linear.
        """
        self.q.check(x, "B T C")
        divides(axis_size("tensor", "context"), self.n_kv_heads, "tensor x context", "n_kv_heads")
        B, T, _ = x.shape
        positions = jnp.arange(T) if positions is None else ids.saturated("positions", positions)
        qkv = fused_linear(x, self.q, self.k, self.v, norm=norm)
        qkv = qkv.reshape(B, T, self.n_heads + 2 * self.n_kv_heads, self.head_dim)
        specs = HEADS, _spec(positions), P(BATCH, None), P()
        op = per_device(self._attend, in_specs=specs, out_specs=HEADS)
        y = op(qkv, positions, segment_ids, self._norm_weights())
        return self.out(y.reshape(B, T, self.out.in_features), add_bias=add_bias)

    def with_cache(
        self,
        x: Float[Array, "B T C"],
        positions: Integer[Ids, "..."] | None,
        cache: Cache,
        *,
        add_bias: bool = True,
    ) -> tuple[Float[Array, "B T C"], Cache]:
        """(y, updated cache) of the prompts, in the first call, or of one further token per row.

        positions: not read for one further token per row: its slot in the cache is its position.
        """
        q, k, v = self._by_head([layer(x) for layer in (self.q, self.k, self.v)])
        if cache.arrays is not None:
            y, cache = self._attend_to_cache(q, k, v, cache)
        else:
            if self.rope_theta is not None:
                positions = jnp.arange(x.shape[1]) if positions is None else positions
                specs = HEADS, HEADS, _spec(positions)
                q, k = per_device(self._rotate, specs, (HEADS, HEADS))(q, k, positions)
            y = per_device(self._mix, (HEADS, HEADS, HEADS), HEADS)(q, k, v)
            cache = replace(cache, arrays=_filled(k, v, cache))
        return self.out(y.reshape(*x.shape[:2], self.out.in_features), add_bias=add_bias), cache

    def takes_row(self, x: Float[Array, "..."]) -> bool:
        """Whether `of_row` applies to x."""
        return takes_row(x, self.q, self.k, self.v, norm=True) and takes_row(x, self.out)

    def of_row(
        self, x: Float[Array, "1 1 C"], norm: Norm, cache: Cache
    ) -> tuple[Float[Array, "1 1 C"], Cache]:
        """(x + layer(norm(x)), updated cache) of the next token of a single row."""
        qkv = linear_of_row(x, self.q, self.k, self.v, norm=norm)
        y, cache = self._attend_to_cache(*self._by_head(qkv), cache)
        return linear_of_row(y.reshape(1, 1, -1), self.out, residual=x)[0], cache

    def _norm_weights(self):
        """The weights (D,) of q_norm and k_norm, which every device needs; () without them."""
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        if not all(plain(x, RMSNorm, "centered") and x.eps == norms[0].eps for x in norms):
            raise ValueError("q_norm and k_norm are not called: use an RMSNorm of the same eps")
        return tuple(norm.weight[...] for norm in norms)

    def _normed(self, x, weight) -> Any:
        """The RMS norm of each head of x."""
        # pyrefly: ignore[missing-attribute]
        return rms_norm(x, weight, eps=self.q_norm.eps, implementation=self.implementation)

    def _attend(self, qkv, positions, segment_ids, norms):
        qkv = split_heads(qkv)  # this device's part of the H + 2 K heads
        b, t, n, d = qkv.shape
        kv = n * self.n_kv_heads // (self.n_heads + 2 * self.n_kv_heads)
        if norms:
            q, k, v = jnp.split(qkv, (n - 2 * kv, n - kv), axis=2)
            q, k = map(self._normed, (q, k), norms)
            qkv = jnp.concatenate((q, k, v), axis=2)
        packed = Packed(qkv.reshape(b, t, n * d), ((n - 2 * kv, d), (kv, d), (kv, d)))
        if self.rope_theta is not None:
            packed = self._rotate(packed, None, positions)
        return split_sequence(self._mix(packed, segment_ids=segment_ids))

    def _rotate(self, q, k, positions) -> Any:
        options: dict = dict(theta=self.rope_theta, scaling=self.rope_scaling)
        return rope(q, k, positions, **options, implementation=self.implementation)

    def _mix(self, q, k=None, v=None, **options) -> Any:
        options |= dict(window=self.window, softcap=self.softcap, scale=self.scale)
        return attention(q, k, v, **options, implementation=self.implementation)

    def _by_head(self, qkv):
        """q, k and v (B, T, heads, D); q and k are normalized if the layer has norms."""
        q, k, v = (x.reshape(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim) for x in qkv)
        if self.q_norm is not None:
            op = per_device(self._normed, in_specs=(HEADS, P()), out_specs=HEADS)
            q, k = map(op, (q, k), self._norm_weights())
        return q, k, v

    def _attend_to_cache(self, q, k, v, cache):
        """Writes key and value to the cache, and attends from one query per row, (B, 1, H, D)."""

        def op(q, k, v, keys, values, lengths, *scales):
            options: dict = dict(zip(("k_scale", "v_scale"), scales, strict=False))
            options |= dict(window=self.window, softcap=self.softcap, scale=self.scale)
            options |= dict(theta=self.rope_theta, scaling=self.rope_scaling)
            # Not "mosaic", even if training asks for kernels: this kernel has other limits.
            options |= dict(implementation="xla" if self.implementation == "xla" else None)
            return decode_attention(q, keys, values, lengths, new=(k, v), **options)

        keys, values, *scales = cache.arrays
        specs = (*[HEADS] * 5, P(BATCH), *[P(BATCH, HEADS[2])] * len(scales))
        op = per_device(op, in_specs=specs, out_specs=(HEADS,) * 3)
        y, *arrays = op(q, k, v, keys, values, cache.lengths, *scales)
        return y, replace(cache, arrays=(*arrays, *scales))


def _filled(k, v, cache):
    """The arrays of a cache with the keys and values (B, T, K, D) of the prompts."""
    if (t := k.shape[1]) > cache.size:
        raise ValueError(f"T={t} positions are more than the cache's size={cache.size}")
    pad = lambda x: jnp.pad(x, ((0, 0), (0, cache.size - t), (0, 0), (0, 0)))
    if not cache.float8:
        return pad(k), pad(v)
    seen = (jnp.arange(t)[None] < cache.lengths[:, None])[:, :, None, None]
    (k, k_scale), (v, v_scale) = (_to_float8(x, seen) for x in (k, v))
    return pad(k), pad(v), k_scale, v_scale


def _to_float8(x, seen):
    """(x / scale as float8, scale (B, K)) of keys or values (B, T, K, D).

    The scale maps a prompt's largest number to 28, a sixteenth of float8's largest, so numbers of
    later tokens may be 16 times as large before they are clipped.  The largest counts as at least
    1, because a first token's may be tiny.  Down to 1/1792 of it three mantissa bits are kept.
    """
    x = jnp.where(seen, x, 0).astype(jnp.float32)  # padding after a prompt may be of any size
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=(1, 3)), 1) / 28
    return (x / scale[:, None, :, None]).astype(jnp.float8_e4m3fn), scale


def _spec(positions):
    """The PartitionSpec of positions: (T,), (B, T) or None."""
    return P(BATCH, None) if getattr(positions, "ndim", 1) == 2 else P(None)
