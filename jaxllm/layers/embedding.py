"""Token embedding with optional learned positions; it can serve as a tied head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jaxllm.layers.layer import Layer
from jaxllm.layers.linear import array_and_total
from jaxllm.layers.norm import TOKENS
from jaxllm.sharding import SHARDS, P, all_tokens, constrain, normal, own_tokens, per_device
from pallas_kernels import encoder, ids, mosaic
from pallas_kernels.dispatch import Implementation
from pallas_kernels.ids import Ids
from pallas_kernels.totals import summed


class Embedding(Layer):
    """y[b,t] = wte[token[b,t]] + wpe[position], both N(0, std^2).

    max_seq_len: rows of wpe; None: no learned positions.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        max_seq_len: int | None = None,
        std: float = 0.02,
        dtype=jnp.float32,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        axes = ("tensor", "fsdp")
        wte = normal(rngs.params(), (vocab_size, d_model), std, axes)
        self.wte = nnx.Param(wte, axes=axes, summed=True)
        if max_seq_len is None:
            self.wpe = None
        else:
            wpe = normal(rngs.params(), (max_seq_len, d_model), std, (None, "fsdp"))
            self.wpe = nnx.Param(wpe, axes=(None, "fsdp"))
        self.dtype, self.implementation = dtype, implementation

    def __call__(
        self, tokens: Integer[Ids, "B T"], positions: Integer[Ids, "..."] | None = None
    ) -> Float[Array, "B T C"]:
        """Looks up tokens (B, T) and adds their positions; returns (B, T, C) in `dtype`.

        positions: (T,) or (B, T); None: 0 ... T-1; ignored without wpe.
        Raises ValueError if T exceeds max_seq_len.
        """
        return self._embed(tokens, positions, adds=True)

    def with_table(
        self, tokens: Integer[Ids, "B T"], positions: Integer[Ids, "..."] | None = None
    ) -> tuple[Float[Array, "B T C"], tuple[Float[Array, "V C"], Float[Array, "V C"] | None]]:
        """(y, (wte, total)) for a tied head, which adds its gradient to the total, if any."""
        return self._embed(tokens, positions, adds=False), array_and_total(self.wte.get_value())

    def _embed(self, tokens, positions, *, adds: bool):
        wte, wpe, rows = summed(*array_and_total(self.wte.get_value()), adds), None, None
        tokens = ids.saturated("tokens", tokens)
        mosaic.check_axes("B T", tokens=tokens)
        positions = None if positions is None else ids.saturated("positions", positions)
        if self.wpe is not None:
            if tokens.shape[-1] > (wpe := self.wpe[...]).shape[0]:
                raise ValueError(
                    f"T={tokens.shape[-1]} exceeds max_seq_len={wpe.shape[0]}; shorten the sequence"
                )
            either = tokens.shape[1:], tokens.shape
            if positions is not None and positions.shape not in either:
                raise ValueError(f"positions have shape {positions.shape}, none of {either}")
            if positions is not None and positions.ndim == 2:
                # The lookup sums the gradient in a fixed order, as for tokens, unlike a scatter.
                wpe, rows = None, self._look_up(positions, wpe, None, jnp.float32)
            elif positions is not None:
                wpe = jnp.take(wpe, positions, axis=0, mode="clip")  # as the lookup does
        dtype = self.dtype if rows is None else jnp.float32  # rounded once, after the sum
        y = self._look_up(tokens, wte, wpe, dtype)
        return y if rows is None else (y + rows).astype(self.dtype)

    def _look_up(self, tokens, wte, wpe, dtype):
        # Devices that shard the table do not gather it: each looks up all devices' tokens in its
        # own columns, then they exchange the results.
        options = dict(dtype=dtype, implementation=self.implementation)
        op = lambda tokens, *tables: own_tokens(encoder(all_tokens(tokens), *tables, **options))
        table = P(None, SHARDS)
        return per_device(op, (TOKENS, table, table), TOKENS)(tokens, wte, wpe)

    def logits(self, x: Float[Array, "... C"], dtype=None) -> Float[Array, "... V"]:
        """The logits x wte^T of a tied head, in `dtype` or, if None, in x's."""
        weight = constrain(self.wte[...].astype(x.dtype), "tensor", None)
        return jnp.matmul(x, weight.T, preferred_element_type=dtype or x.dtype)
