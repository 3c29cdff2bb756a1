"""The public names of pallas_kernels, which imports this file when one is asked for."""

from pallas_kernels.activations.activation import gelu, swiglu
from pallas_kernels.activations.feed_forward import mlp
from pallas_kernels.embedding import encoder
from pallas_kernels.flash_attention.decode import decode_attention
from pallas_kernels.flash_attention.op import attention
from pallas_kernels.float8.linear import fp8_linear
from pallas_kernels.losses.cross_entropy import cross_entropy
from pallas_kernels.losses.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.mlstm.op import vlstm, vlstm_step
from pallas_kernels.norms.norm import layer_norm, rms_norm
from pallas_kernels.packed import Packed
from pallas_kernels.quantized.formats import QuantizedWeight, quantize
from pallas_kernels.quantized.op import quantized_linear
from pallas_kernels.rotary import RopeScaling, rope
from pallas_kernels.single_row import row_linear

__all__ = [
    "Packed", "QuantizedWeight", "RopeScaling", "attention", "cross_entropy", "decode_attention",
    "encoder", "fp8_linear", "gelu", "layer_norm", "linear_cross_entropy", "mlp", "quantize",
    "quantized_linear", "rms_norm", "rope", "row_linear", "swiglu", "vlstm", "vlstm_step",
]  # fmt: skip
