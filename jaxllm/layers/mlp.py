"""Feed-forward layers: the MLP of GPT-2 and the gated MLP of Llama."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.layers.layer import Layer
from jaxllm.layers.linear import ROWS, Float8, Linear, linear_of_row, takes_row
from jaxllm.layers.norm import TOKENS, Norm
from jaxllm.sharding import BATCH, P, one_device, per_device
from pallas_kernels import gelu, mlp, swiglu
from pallas_kernels.dispatch import Implementation
from pallas_kernels.mosaic import plus
from pallas_kernels.single_row import Activation

HIDDEN = P(BATCH, "context", "tensor")  # (B, T, F)


class _FeedForward(Layer):
    """What both layers share: matrices, the whole layer in one op, and a single row."""

    activation: Activation

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        linear: Callable[..., Linear] = Linear,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        gated = self.activation == "swiglu"
        linear = partial(linear, bias=not gated, implementation=implementation, rngs=rngs)
        self.gate = linear(d_model, d_ff, name="gate_proj") if gated else None
        self.up = linear(d_model, d_ff, name="up_proj")
        self.down = linear(d_ff, d_model, name="down_proj", axes=ROWS)
        self.implementation = implementation

    def takes_row(self, x: Float[Array, "..."]) -> bool:
        """Whether `of_row` applies to x."""
        return takes_row(x, *self._wide(), norm=True) and takes_row(x, self.down)

    def of_row(self, x: Float[Array, "1 1 C"], norm: Norm) -> Float[Array, "1 1 C"]:
        """x + layer(norm(x)) of a single row, in generation."""
        (hidden,) = linear_of_row(x, *self._wide(), norm=norm, activation=self.activation)
        return linear_of_row(hidden, self.down, residual=x)[0]

    def _wide(self) -> list[Linear]:
        return [layer for layer in (self.gate, self.up) if layer is not None]

    def _joins(self, x: Float[Array, "B T C"]) -> bool:
        """Whether `mlp` applies: on one device, or on each in fp8; in bf16 XLA overlaps gathers."""
        layers = *self._wide(), self.down
        biased = self.gate is not None and any(layer.bias is not None for layer in layers)
        kinds = {(type(w), getattr(w, "total", None) is None) for w in (y.held for y in layers)}
        if biased or len(kinds) > 1 or not all(layer.joins for layer in layers):
            return False
        held = self.up.held
        return held.casts_apart(x) if isinstance(held, Float8) else one_device()

    def _whole(self, x: Float[Array, "B T C"], norm: Norm | None) -> Float[Array, "B T C"]:
        """The whole layer in one op, without the bias of `down`."""
        up, names = self.up, ("up", "down", "gate")
        layers = {name: layer for name in names if (layer := getattr(self, name)) is not None}
        pairs = {name: layer.held.operands(x.dtype) for name, layer in layers.items()}
        arrays: dict[str, Any] = {name: weight for name, (weight, _) in pairs.items()}
        arrays["bias"] = None if up.bias is None else up.bias[...]
        arrays["row_norm"] = None if norm is None or not up.fp8 else norm.row_norm()
        totals = tuple(total for _, total in pairs.values())
        arrays["totals"] = None if totals[0] is None else totals
        options: dict = dict(precision="fp8" if up.fp8 else None, implementation=up.implementation)
        op = lambda x, arrays: mlp(x, **arrays, **options)
        return per_device(op, in_specs=(TOKENS, P()), out_specs=TOKENS)(x, arrays)


class MLP(_FeedForward):
    """down(gelu(up(x))), with biases."""

    activation = "gelu"

    def __call__(
        self, x: Float[Array, "B T C"], *, add_bias: bool = True, norm: Norm | None = None
    ) -> Float[Array, "B T C"]:
        """Applies the layer; add_bias (False leaves the bias of `down`) and norm as for Linear."""
        self.up.check(x)
        if self._joins(x):
            y, bias = self._whole(x, norm), self.down.bias
            return plus(y, bias[...]) if add_bias and bias is not None else y
        if not self.up.joins or self.up.bias is None:
            hidden = (self.up(x),)
        else:
            # The op adds the bias, because its backward pass yields the bias gradient for free.
            hidden = self.up(x, add_bias=False, norm=norm), self.up.bias[...]
            if self.up.fp8:
                # As in `_in_parts` of feed_forward.py: XLA would fuse what cuBLASLt refuses.
                hidden = jax.lax.optimization_barrier(hidden[0]), hidden[1]
        op = partial(gelu, implementation=self.implementation)
        op = per_device(op, (HIDDEN, P("tensor"))[: len(hidden)], HIDDEN)
        return self.down(op(*hidden), add_bias=add_bias)


class GatedMLP(_FeedForward):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer 2020, SwiGLU)."""

    activation = "swiglu"

    def __call__(
        self, x: Float[Array, "B T C"], *, norm: Norm | None = None
    ) -> Float[Array, "B T C"]:
        """Applies the layer; norm: the norm that produced x, as for Linear."""
        self.up.check(x)
        if self._joins(x):
            return self._whole(x, norm)
        # model.remat saves these by name.
        hidden = [checkpoint_name(w(x, norm=norm), "mlp") for w in self._wide()]
        op = partial(swiglu, implementation=self.implementation)
        return self.down(per_device(op, (HIDDEN, HIDDEN), HIDDEN)(*hidden))
