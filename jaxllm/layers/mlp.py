"""Feed-forward layers: the MLP of GPT-2 and the gated MLP of Llama."""

from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.layers.linear import ROWS, Linear, linear_of_row, takes_row
from jaxllm.layers.norm import LayerNorm, RMSNorm
from jaxllm.sharding import BATCH, P, one_device, per_device
from pallas_kernels import (
    fp8_mlp,
    gelu,
    gelu_linear,
    gelu_mlp,
    swiglu,
    swiglu_linear,
    swiglu_mlp,
)
from pallas_kernels.activations.gelu import linear_why_not as gelu_why_not
from pallas_kernels.activations.gelu import mlp_why_not as gelu_mlp_why_not
from pallas_kernels.activations.swiglu import linear_why_not as swiglu_why_not
from pallas_kernels.activations.swiglu import mlp_why_not as swiglu_mlp_why_not
from pallas_kernels.dispatch import Implementation

HIDDEN = P(BATCH, "context", "tensor")  # (B, T, F)


class MLP(nnx.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        std: float = 0.02,
        out_std: float | None = None,
        saves_products: bool = False,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """saves_products: the backward pass keeps the product of `up`, but not GELU of it."""
        linear = partial(Linear, bias=True, implementation=implementation, rngs=rngs)
        self.up = linear(d_model, d_ff, std=std)
        self.down = linear(d_ff, d_model, axes=ROWS, std=out_std or std)
        self.saves_products = saves_products
        self.implementation = implementation

    def __call__(
        self,
        x: Float[Array, "B T C"],
        *,
        add_bias: bool = True,
        norm: LayerNorm | RMSNorm | None = None,
    ) -> Float[Array, "B T C"]:
        """Applies the layer.

        add_bias: False leaves the bias of `down` to the next op.
        norm: the norm that x is a result of, as for Linear.
        """
        if self.up.generates:
            hidden = (self.up(x),)
        elif self.up.fp8 and one_device():
            y = _in_fp8(x, self.up, self.down, norm=norm)
            return self.down.plus_bias(y) if add_bias else y
        else:
            # The op adds the bias, because its backward pass yields the bias gradient for free.
            bias = self.up.bias
            assert bias is not None
            alone = one_device()  # on several jit must sum the gradient of `down`
            # The kernel that multiplies would multiply again for the activation's result.
            if alone and not self.saves_products:
                arrays = x, self.up.cast(x), bias[...], self.down.cast(x)
                if gelu_mlp_why_not(*arrays) is None:
                    y = gelu_mlp(*arrays, implementation=self.implementation)
                    return self.down.plus_bias(y) if add_bias else y
            hidden = self.up(x, add_bias=False, norm=norm), bias[...]
            if self.up.fp8:
                # XLA would move GELU into cuBLASLt's fp8 matmul, with z as a second output, which
                # its own compiler then refuses ("RET_CHECK ... !has_aux_output", JAX 0.12.0.1).
                hidden = jax.lax.optimization_barrier(hidden[0]), hidden[1]
            if alone:
                weight = self.down.cast(x)
                # Where the fused kernel does not apply, that of the activation alone may.
                if gelu_why_not(*hidden, weight) is None:
                    y = gelu_linear(*hidden, weight, implementation=self.implementation)
                    return self.down.plus_bias(y) if add_bias else y
        op = per_device(
            partial(gelu, implementation=self.implementation),
            in_specs=(HIDDEN, P("tensor"))[: len(hidden)],
            out_specs=HIDDEN,
        )
        return self.down(op(*hidden), add_bias=add_bias)

    def takes_row(self, x: Float[Array, "..."]) -> bool:
        """Whether `of_row` applies to x."""
        return takes_row(x, self.up, norm=True) and takes_row(None, self.down)

    def of_row(self, x: Float[Array, "1 1 C"], norm: LayerNorm | RMSNorm) -> Float[Array, "1 1 C"]:
        """x + layer(norm(x)) of a single row, in generation."""
        (hidden,) = linear_of_row(x, self.up, norm=norm, activation="gelu")
        return linear_of_row(hidden, self.down, residual=x)[0]


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer 2020, SwiGLU)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        std: float = 0.02,
        out_std: float | None = None,
        saves_products: bool = False,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """saves_products: the backward pass keeps gate and up, but not the activation's result."""
        linear = partial(Linear, implementation=implementation, rngs=rngs)
        self.gate = linear(d_model, d_ff, std=std)
        self.up = linear(d_model, d_ff, std=std)
        self.down = linear(d_ff, d_model, axes=ROWS, std=out_std or std)
        self.saves_products = saves_products
        self.implementation = implementation

    def __call__(
        self, x: Float[Array, "B T C"], *, norm: LayerNorm | RMSNorm | None = None
    ) -> Float[Array, "B T C"]:
        """Applies the layer; norm: the norm that x is a result of, as for Linear."""
        if self.up.fp8 and one_device():
            return _in_fp8(x, self.up, self.down, gate=self.gate, norm=norm)
        alone = one_device() and not self.down.generates  # a packed weight has its own kernel
        if alone and not self.saves_products:  # as above
            weights = [layer.cast(x) for layer in (self.gate, self.up, self.down)]
            if swiglu_mlp_why_not(x, *weights) is None:
                return swiglu_mlp(x, *weights, implementation=self.implementation)
        # model.remat saves these by name; `gelu` names the sum in the MLP above itself.
        gate, up = (checkpoint_name(w(x, norm=norm), "mlp") for w in (self.gate, self.up))
        hidden = gate, up
        if alone:
            weight = self.down.cast(x)
            if swiglu_why_not(*hidden, weight) is None:
                return swiglu_linear(*hidden, weight, implementation=self.implementation)
        op = per_device(
            partial(swiglu, implementation=self.implementation),
            in_specs=(HIDDEN, HIDDEN),
            out_specs=HIDDEN,
        )
        return self.down(op(*hidden))

    def takes_row(self, x: Float[Array, "..."]) -> bool:
        """Whether `of_row` applies to x."""
        return takes_row(x, self.gate, self.up, norm=True) and takes_row(None, self.down)

    def of_row(self, x: Float[Array, "1 1 C"], norm: LayerNorm | RMSNorm) -> Float[Array, "1 1 C"]:
        """x + layer(norm(x)) of a single row, in generation."""
        (hidden,) = linear_of_row(x, self.gate, self.up, norm=norm, activation="swiglu")
        return linear_of_row(hidden, self.down, residual=x)[0]


def _in_fp8(
    x: Float[Array, "B T C"], up: Linear, down: Linear, *, gate: Linear | None = None, norm=None
) -> Float[Array, "B T C"]:
    """The layer's matmuls and activation in one op; without the bias of `down`."""
    return fp8_mlp(
        x,
        up.cast(x),
        down.cast(x),
        gate=None if gate is None else gate.cast(x),
        bias=None if up.bias is None else up.bias[...],
        row_norm=None if norm is None else norm.row_norm(),
        implementation=up.implementation,
    )
