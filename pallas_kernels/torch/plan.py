"""Orders a program into launches: kernels, glue (glue.py), and PyTorch's operators for the rest."""

import itertools
import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from pallas_kernels.torch import glue, launch
from pallas_kernels.torch import program as programs
from pallas_kernels.torch.program import Array, Kernel, Program, Step


class Unit(NamedTuple):
    """One launch with the slots of its arguments, or an operator of PyTorch."""

    what: Kernel | glue.Glue | Step
    slots: tuple[int, ...]  # of an operator: its results
    reads: tuple[tuple[int, tuple[int, ...]], ...]  # of an operator: slots with shapes
    made: tuple[int, ...]  # slots to allocate before
    dead: tuple[int, ...]  # slots whose memory is free after


class Plan(NamedTuple):
    """A program's launches.  Slots are arrays in memory: inputs, constants, the others."""

    inputs: tuple[Array, ...]
    constants: tuple[np.ndarray, ...]
    units: tuple[Unit, ...]
    arrays: tuple[Array, ...]  # of the slots
    shared: dict[int, int]  # slot: its byte in an allocation that temporary arrays share
    size: int  # of it, in bytes
    outputs: tuple[int, ...]


class _Planner:
    """A program's steps, with copies of what a kernel or the caller may not overwrite."""

    def __init__(self, program: Program, native: bool):
        self.arrays, self.roots = list(program.arrays), list(program.roots)
        self.native = native
        self.steps: list[Step] = []
        self.made: dict[int, Step] = {}  # by array
        self.same: dict[int, int] = {}  # arrays written into another's memory
        self.outputs: list[int] = []  # neither inputs, nor constants, nor each other
        true = (s.ins for s in program.steps if s.outs)  # all but barriers
        reads = Counter(self.roots[i] for each in (*true, program.outputs) for i in each)
        for step in program.steps:
            if step.primitive == "kernel" and native:
                kernel, ins = programs.kernel(step.params), list(step.ins)
                for result, i in kernel.aliases.items():
                    if reads[self.roots[ins[i]]] > 1 or self.roots[ins[i]] not in self.made:
                        ins[i] = self.copy(ins[i])
                    self.same[step.outs[result]] = ins[i]
                step = Step("kernel", kernel, tuple(ins), step.outs)
            self.add(step)
        for number in program.outputs:
            root = self.roots[number]
            known = root in self.made and root not in self.outputs
            self.outputs.append(root if known else self.copy(number))
        self.program = program._replace(arrays=tuple(self.arrays), roots=tuple(self.roots))

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self.made.update(dict.fromkeys(step.outs, step))

    def copy(self, number: int) -> int:
        made = len(self.arrays)
        self.arrays.append(self.arrays[number])
        self.roots.append(made)
        self.add(Step("copy", {}, (number,), (made,)))
        return made

    def owner(self, number: int) -> int:
        """The array in whose memory this one lies."""
        root = self.roots[number]
        return self.owner(self.same[root]) if root in self.same else root

    def launches(self) -> list[Step | glue.Glue]:
        """Steps in order, and before each the glue that it waits for, as much at once as can be.

        XLA's barriers say which arrays lie in memory, too.
        """
        stored = {*range(len(self.program.inputs)), *self.program.constants}
        joins = [glue.fits(step, self.arrays) for step in self.steps]
        reads = [
            set() if joined else {self.roots[i] for i in step.ins}
            for step, joined in zip(self.steps, joins, strict=True)
        ]
        wanted = {*self.outputs}.union(*reads)
        done: list[Step | glue.Glue] = []
        waiting: list[int] = []

        def flush(now: list[int]) -> None:
            if now:
                made = glue.write(self.program, self.made, stored, now)
                done.append(made._replace(binary=launch.binary(made)) if self.native else made)
                stored.update(now)
                waiting[:] = [root for root in waiting if root not in stored]

        for step, joined, ins in zip(self.steps, joins, reads, strict=True):
            if joined:
                waiting += [root for root in step.outs if root in wanted]
                continue
            if not ins.isdisjoint(waiting):
                flush([root for root in waiting if step.outs or root in ins])
            if step.outs:
                done.append(step)
                stored.update(step.outs)
        flush(waiting)
        return done


def plan(program: Program, native: bool = True) -> Plan:
    """native: kernels are launched; otherwise they are functions of tensors, as operators are."""
    p = _Planner(program, native)
    done = p.launches()
    operators = [isinstance(x, Step) and not isinstance(x.params, Kernel) for x in done]
    used = [  # the arrays in memory of each
        [p.owner(i) for i in (x.arrays if isinstance(x, glue.Glue) else (*x.ins, *x.outs))]
        for x in done
    ]
    every = [root for each in used for root in each]
    constants = [root for root in dict.fromkeys(every) if root in program.constants]
    given = [*range(len(program.inputs)), *constants]
    number = {root: n for n, root in enumerate(dict.fromkeys((*given, *every)))}
    outputs = [p.owner(root) for root in p.outputs]
    slots = [p.arrays[root] for root in number]
    for n, root in zip(program.outputs, outputs, strict=True):
        slots[number[root]] = p.arrays[n]
    last = {root: n for n, each in enumerate(used) for root in each}
    first = {root: n for n, each in reversed([*enumerate(used)]) for root in each}
    # Tensors: what operators read or make, and the outputs.  The rest shares one allocation.
    tensors = {*outputs}.union(*itertools.compress(used, operators)).difference(given)
    rest = {root: (first[root], last[root]) for root in first.keys() - tensors - {*given}}
    shared, size = _share(rest, p.arrays)
    units = []
    for n, x in enumerate(done):
        made = tensors.intersection(used[n])
        dead = tuple(number[r] for r in made if last[r] == n and r not in outputs)
        made = tuple(number[r] for r in made if first[r] == n)
        if operators[n]:
            reads = tuple((number[p.owner(i)], p.arrays[i].shape) for i in x.ins)
            units.append(Unit(x, tuple(number[i] for i in x.outs), reads, (), dead))
        else:
            what = x if isinstance(x, glue.Glue) else x.params
            units.append(Unit(what, tuple(number[r] for r in used[n]), (), made, dead))
    return Plan(
        program.inputs, tuple(program.constants[r] for r in constants), tuple(units), tuple(slots),
        {number[r]: at for r, at in shared.items()}, size, tuple(number[r] for r in outputs),
    )  # fmt: skip


def _share(lives: dict[int, tuple[int, int]], arrays) -> tuple[dict[int, int], int]:
    """Places arrays with these first and last uses in one allocation: bytes by array, the size."""
    placed: list[tuple[int, int, int]] = []  # byte, end, array
    space = lambda r: (
        -(-math.prod(arrays[r].shape) * np.dtype(arrays[r].dtype).itemsize // 256) * 256
    )
    for root in sorted(lives, key=lambda r: (-space(r), r)):
        at, (first, last) = 0, lives[root]
        for begin, end, other in sorted(placed):
            if lives[other][0] <= last and first <= lives[other][1] and begin < at + space(root):
                at = max(at, end)
        placed.append((at, at + space(root), root))
    return {root: at for at, _, root in placed}, max((end for _, end, _ in placed), default=0)
