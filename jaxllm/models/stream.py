"""The residual stream between blocks; the next norm performs its last addition."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxllm.layers import LayerNorm, RMSNorm


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

    def normed(
        self, norm: LayerNorm | RMSNorm
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """(norm(s), s) for the sum s, in one pass."""
        if self.branch is None:
            return norm(self.residual), self.residual
        return norm.add(self.branch, self.residual, self.bias)
