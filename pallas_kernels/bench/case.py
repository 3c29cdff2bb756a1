"""What the benchmark knows of a call: an op, its arrays and their sizes."""

import dataclasses
from collections.abc import Callable

from pallas_kernels.dispatch import Gpu


@dataclasses.dataclass(frozen=True)
class A:
    """An array of a call: its axes, by their names in `Case.sizes`, and its values."""

    axes: str
    dtype: str = "bfloat16"
    # "normal"; "arange"; "uniform V" and "zipf V": integers below the size V; "documents L": ids of
    # consecutive documents of length L.
    fill: str = "normal"


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with its arrays, by their names in its signature, at several sizes."""

    op: str
    arrays: dict[str, A]
    sizes: tuple[dict[str, int], ...]
    small: dict[str, int]  # replaces the sizes where errors are measured
    reads: tuple[str, ...] = ()  # what the backward pass must read besides the cotangents
    writes: tuple[str, ...] | None = None  # gradients it must write (None: all floating arrays)
    options: dict = dataclasses.field(default_factory=dict)
    variant: str = ""
    flops: Callable | None = None  # of the forward pass, from the sizes; None: bound by memory
    backward: float = 2.5  # flops of the backward pass, relative to the forward pass
    rate: int = 1  # of the tensor cores, relative to bfloat16
    cudnn: Callable | None = None
    xla: bool = True  # False if the XLA form does not fit in memory
    gpu: Gpu = "sm_80"  # what the kernel needs, as the first of the op's forms
    forward_only: bool = False  # where no user needs the backward pass at these sizes
    derive: Callable | None = None  # further axes of the arrays, from the sizes
    pack: Callable | None = None  # the op's arguments from the arrays, where they differ

    def axes(self, sizes: dict[str, int]) -> dict[str, int]:
        """The length of every axis of the arrays."""
        return sizes | (self.derive(sizes) if self.derive else {})

    def arguments(self, inputs) -> dict:
        """The op's arguments, by name, from the arrays in their order."""
        named = dict(zip(self.arrays, inputs, strict=True))
        return self.pack(**named) if self.pack else named


def shapes(names: str, *rows) -> tuple[dict[str, int], ...]:
    """Sizes of a case; names: of the numbers in a row, separated by spaces."""
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)
