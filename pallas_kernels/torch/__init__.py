"""The ops of pallas_kernels for PyTorch: `import pallas_kernels.torch as pk` (docs/pytorch.md)."""

from pallas_kernels import activations as _activations  # noqa: F401
from pallas_kernels import (
    attention as _attention,
)
from pallas_kernels import (
    cross_entropy as _cross_entropy,
)
from pallas_kernels import (
    encoder as _encoder,
)
from pallas_kernels import (
    layer_norm as _layer_norm,
)
from pallas_kernels import (
    linear_cross_entropy as _linear_cross_entropy,
)
from pallas_kernels import (
    mlp as _mlp,
)
from pallas_kernels import (
    quantized_linear as _quantized_linear,
)
from pallas_kernels import (
    rms_norm as _rms_norm,
)
from pallas_kernels import (
    rope as _rope,
)
from pallas_kernels import (
    swiglu as _swiglu,
)
from pallas_kernels import (
    vlstm as _vlstm,
)
from pallas_kernels.torch.ops import register

attention = register("attention", _attention, autocast=("q",))
cross_entropy = register("cross_entropy", _cross_entropy)
encoder = register("encoder", _encoder)
layer_norm = register("layer_norm", _layer_norm)
linear_cross_entropy = register("linear_cross_entropy", _linear_cross_entropy, autocast=("x",))
mlp = register("mlp", _mlp, autocast=("x",))
quantized_linear = register("quantized_linear", _quantized_linear)
rms_norm = register("rms_norm", _rms_norm)
rope = register("rope", _rope)
swiglu = register("swiglu", _swiglu)
vlstm = register("vlstm", _vlstm)
