"""Operands that lie side by side in one array, as a matmul with joint weights yields them.

    array (B, T, P)    | q: H heads of D columns | k: K heads of D | v: K heads of D |

One matmul computes all operands, and its backward pass takes two matmuls instead of two for each.
An op that accepts a `Packed` reads its operands in place and writes their gradients into one array
if its kernels can; splitting the array would copy it.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Several operands (B, T, heads, width) side by side in the columns of one array.

    parts: (heads, width) of each operand, in order; an op raises ValueError where they do not fit.
    """

    array: Float[Array, "B T P"]
    parts: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})

    def check(self, *names: str) -> None:
        """Raises ValueError unless there is a part for each name and the columns add up."""
        try:
            pairs = [(operator.index(heads), operator.index(width)) for heads, width in self.parts]
        except (TypeError, ValueError):
            need = "pairs of integers (heads, width)"
            raise ValueError(f"packed has parts {self.parts!r}, not {need}") from None
        if len(pairs) != len(names):
            raise ValueError(f"packed has {len(pairs)} parts, not {', '.join(names)}")
        if any(heads < 1 or width < 1 for heads, width in pairs):
            raise ValueError(f"packed has parts {self.parts}: heads and width must be at least 1")
        if len(shape := getattr(self.array, "shape", ())) != 3:
            raise ValueError(f"packed has an array {shape}, but needs (B, T, P)")
        need = sum(heads * width for heads, width in self.parts)
        if self.array.shape[2] != need:
            terms = " + ".join(f"{heads} x {width}" for heads, width in self.parts)
            raise ValueError(f"packed has {self.array.shape[2]} columns, not {terms} = {need}")


def operands_of(q, others: dict, parts: Sequence[str]) -> Packed | tuple:
    """q if it is a `Packed`, whose parts have these names; otherwise (q, *others).

    Raises ValueError unless q is packed and `others`, by name, are all None, or neither.
    """
    names = " and ".join(others)
    if isinstance(q, Packed):
        if any(x is not None for x in others.values()):
            nothing = " and ".join(f"{name}=None" for name in others)
            raise ValueError(f"q is packed with {names}: pass {nothing}")
        q.check(*parts)
        return q
    if any(x is None for x in others.values()):
        raise ValueError(f"q is not packed: pass {names}, too")
    return q, *others.values()


def shapes(operands: Packed | tuple) -> Sequence:
    """The operands, or for a `Packed` their shapes and dtypes."""
    if not isinstance(operands, Packed):
        return operands
    rows, dtype = operands.array.shape[:2], operands.array.dtype
    return [jax.ShapeDtypeStruct((*rows, *part), dtype) for part in operands.parts]


def split(operands: Packed | tuple) -> Sequence:
    """The operands; a `Packed` is split into copies."""
    if not isinstance(operands, Packed):
        return operands
    ends = itertools.accumulate(heads * width for heads, width in operands.parts[:-1])
    parts = jnp.split(operands.array, list(ends), axis=2)
    return [x.reshape(y.shape) for x, y in zip(parts, shapes(operands), strict=True)]
