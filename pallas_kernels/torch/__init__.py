"""The ops of pallas_kernels for PyTorch: `import pallas_kernels.torch as pk` (docs/pytorch.md)."""

import pallas_kernels as _ops
from pallas_kernels import Packed, QuantizedWeight, RopeScaling
from pallas_kernels.torch.ops import quantize, register

__all__ = [
    "Packed", "QuantizedWeight", "RopeScaling", "attention", "cross_entropy", "encoder",
    "layer_norm", "linear_cross_entropy", "mlp", "patch", "quantize", "quantized_linear",
    "rms_norm", "rope", "swiglu", "vlstm",
]  # fmt: skip

attention = register("attention", _ops.attention, autocast=True)
cross_entropy = register("cross_entropy", _ops.cross_entropy)
encoder = register("encoder", _ops.encoder)
layer_norm = register("layer_norm", _ops.layer_norm)
linear_cross_entropy = register("linear_cross_entropy", _ops.linear_cross_entropy, autocast=True)
mlp = register("mlp", _ops.mlp, autocast=True)
quantized_linear = register("quantized_linear", _ops.quantized_linear)
rms_norm = register("rms_norm", _ops.rms_norm)
rope = register("rope", _ops.rope)
swiglu = register("swiglu", _ops.swiglu)
vlstm = register("vlstm", _ops.vlstm)

from pallas_kernels.torch.llama import patch  # noqa: E402  (it calls the ops above)
