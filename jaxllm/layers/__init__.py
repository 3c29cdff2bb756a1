"""Layers (Flax NNX) on the ops of pallas_kernels.

Parameters are float32; layers cast them to the dtype of the activations.  Each parameter carries
`axes`, the mesh axes that shard it; `jaxllm.sharding` reads them.  `implementation` selects how the
ops run: "mosaic" (our kernels), "xla", or None (dispatch.py decides).
"""

from jaxllm.layers.attention import Attention
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLP, GatedMLP
from jaxllm.layers.norm import HeadLayerNorm, LayerNorm, RMSNorm
from jaxllm.layers.vlstm import VLSTMLayer

__all__ = ["MLP", "Attention", "Embedding", "GatedMLP", "HeadLayerNorm"]
__all__ += ["LayerNorm", "Linear", "RMSNorm", "VLSTMLayer"]
