"""The ops of pallas_kernels for PyTorch: `import pallas_kernels.torch as pk` (docs/pytorch.md)."""

from typing import TYPE_CHECKING

import pallas_kernels
from pallas_kernels.torch.ops import Op, quantize

if TYPE_CHECKING:
    from pallas_kernels import Packed, QuantizedWeight, RopeScaling

__all__ = [
    "Packed", "QuantizedWeight", "RopeScaling", "attention", "cross_entropy", "encoder",
    "layer_norm", "linear_cross_entropy", "mlp", "patch", "quantize", "quantized_linear",
    "rms_norm", "rope", "swiglu", "vlstm",
]  # fmt: skip

attention = Op("attention", autocast=True)
cross_entropy = Op("cross_entropy")
encoder = Op("encoder")
layer_norm = Op("layer_norm")
linear_cross_entropy = Op("linear_cross_entropy", autocast=True)
mlp = Op("mlp", autocast=True)
quantized_linear = Op("quantized_linear")
rms_norm = Op("rms_norm")
rope = Op("rope")
swiglu = Op("swiglu")
vlstm = Op("vlstm")

from pallas_kernels.torch.llama import patch  # noqa: E402  (it calls the ops above)


def __getattr__(name: str):
    if name in __all__:  # the classes, which import JAX
        return getattr(pallas_kernels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
