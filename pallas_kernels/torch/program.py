"""The forms of an op: a program of steps, then a plan of launches, which is kept without JAX."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Array(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str


class Kernel(NamedTuple):
    """One Mosaic kernel, whose arguments are the arrays that it reads, then those that it writes.

    module: serialized MLIR, which `MosaicGpuCompile` of JAX's CUDA plugin takes.
    """

    name: str
    module: bytes


class Glue(NamedTuple):
    """A function in CUDA C++, compiled for sm_90, whose argument is a struct of addresses."""

    blocks: int
    binary: bytes


class ProgramStep(NamedTuple):
    """outs = primitive(ins); ins and outs number a program's arrays."""

    primitive: str
    params: Any  # plain values by name; of "kernel" JAX's equation, then a Kernel; of "glue" a Glue
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Program:
    """Inputs, constants, the results of steps and views of them have the numbers 0, 1, 2, ..."""

    def __init__(self, inputs: Sequence[Array]):
        self.arrays: list[Array] = []  # by number
        self.roots: list[int] = []  # by number: the array that a reshaped one is, or the array
        self.constants: dict[int, np.ndarray] = {}
        self.steps: list[ProgramStep] = []
        self.made: dict[int, ProgramStep] = {}  # by number
        self.inputs = [self.new(x) for x in inputs]
        self.outputs: list[int] = []

    def new(self, array: Array, root: int | None = None) -> int:
        self.arrays.append(array)
        self.roots.append(len(self.roots) if root is None else root)
        return len(self.arrays) - 1

    def step(self, step: ProgramStep) -> Sequence[int]:
        self.steps.append(step)
        self.made |= dict.fromkeys(step.outs, step)
        return step.outs


class Unit(NamedTuple):
    """One launch with the slots of its arguments, or an operator of PyTorch."""

    what: Kernel | Glue | ProgramStep
    slots: tuple[int, ...]  # of an operator: its results
    reads: tuple[tuple[int, tuple[int, ...]], ...]  # of an operator: slots with shapes
    dead: tuple[int, ...]  # slots whose tensors are free after


class Plan(NamedTuple):
    """A program's launches.  Slots are arrays in memory: inputs, constants, the others."""

    constants: tuple[np.ndarray, ...]
    units: tuple[Unit, ...]
    arrays: tuple[Array, ...]  # of the slots
    made: tuple[int, ...]  # slots with tensors to allocate first
    shared: dict[int, int]  # slot: its byte in an allocation that temporary arrays share
    size: int  # of it, in bytes
    outputs: tuple[int, ...]


class Entry(NamedTuple):
    """What is known of an op for certain arguments."""

    out: Any  # what the op returns, with `...` for each array
    count: int  # of these arrays
    saved: tuple[int, ...]  # for the backward pass: places among inputs and outputs
    gradients: tuple[int, ...]  # places among the results of the backward pass
    passes: tuple[Any, ...]  # the programs, or plans, of the op and of its backward pass
