"""The residual stream between blocks; the next norm performs its last addition."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxllm.layers.cache import Cache
from jaxllm.layers.norm import Norm


class Stream(NamedTuple):
    """The residual stream, (branch + bias) + residual; branch and bias may be None.

    The next norm adds them in its own pass over the stream, and its backward pass yields the bias
    gradient for free.  The first block receives no branch.
    """

    branch: Float[Array, "B T C"] | None
    bias: Float[Array, " C"] | None
    residual: Float[Array, "B T C"]

    def sum(self) -> Float[Array, "B T C"]:
        """The stream as one array, in the residual's dtype."""
        if self.branch is None:
            return self.residual
        x = self.branch
        x = x if self.bias is None else x + self.bias.astype(x.dtype)
        return self.residual + x.astype(self.residual.dtype)

    def normed(self, norm: Norm) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """(norm(s), s) for the sum s, in one pass."""
        if self.branch is None:
            return norm(self.residual), self.residual
        return norm.add(self.branch, self.residual, self.bias)


def of_row(block, mixer, stream: Stream, cache: Cache | None) -> tuple[Stream, Cache] | None:
    """The block's result for one row's next token, or None where its layers cannot fuse it.

    s += mixer(norm_1(s)); s += mlp(norm_2(s)), with norms and sums in the layers' kernels: each
    takes 2 us or more, however little it does, and for one row that is most of the time.

    mixer: the block's attention or vLSTM.
    """
    if cache is None or cache.arrays is None or stream.branch is not None:
        return None
    x = stream.residual
    if not (mixer.takes_row(x) and block.mlp.takes_row(x)):
        return None
    x, cache = mixer.of_row(x, block.norm_1, cache)
    return Stream(None, None, block.mlp.of_row(x, block.norm_2)), cache
