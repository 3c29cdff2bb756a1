"""Mosaic GPU kernels for training language models, each with a jnp reference beside it."""

from pallas_kernels.attention import attention
from pallas_kernels.attention.qkv import attention_qkv
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.encoder import encoder
from pallas_kernels.gelu import gelu, gelu_linear
from pallas_kernels.layer_norm import add_layer_norm, layer_norm
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.rope import RopeScaling, rope
from pallas_kernels.swiglu import swiglu, swiglu_linear
from pallas_kernels.vlstm import vlstm, vlstm_step

__all__ = [
    "RopeScaling",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_qkv",
    "cross_entropy",
    "encoder",
    "gelu",
    "gelu_linear",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_linear",
    "vlstm",
    "vlstm_step",
]
