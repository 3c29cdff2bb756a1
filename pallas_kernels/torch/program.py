"""What an op is without JAX: a program of steps, then a plan of launches, which is kept on disk."""

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


class Step(NamedTuple):
    """outs = primitive(ins); ins and outs number the program's arrays."""

    primitive: str
    params: Any  # a dict of plain values; of "kernel" JAX's equation
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Program(NamedTuple):
    """`inputs` arrays, constants and the results of the steps have the numbers 0, 1, 2, ..."""

    inputs: int
    constants: dict[int, np.ndarray]
    steps: Sequence[Step]
    outputs: Sequence[int]
    arrays: Sequence[Array]  # by number
    roots: Sequence[int]  # by number: the array that a reshaped one is, or the array itself


class Unit(NamedTuple):
    """One launch with the slots of its arguments, or an operator of PyTorch."""

    what: Kernel | Glue | Step
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
    saved: tuple[tuple[str, int], ...]  # for the backward pass: inputs and outputs
    gradients: tuple[int, ...]  # places among the results of the backward pass
    passes: tuple[Any, ...]  # the programs, or plans, of the op and of its backward pass
