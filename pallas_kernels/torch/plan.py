"""Orders a program into launches: kernels, glue (glue.py), and PyTorch's operators for the rest."""

import itertools
import math
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

    constants: tuple[np.ndarray, ...]
    units: tuple[Unit, ...]
    arrays: tuple[Array, ...]  # of the slots
    shared: dict[int, int]  # slot: its byte in an allocation that temporary arrays share
    size: int  # of it, in bytes
    outputs: tuple[int, ...]


def _launches(program: Program, steps: list[Step], native: bool) -> list[Step | glue.Glue]:
    """Steps in order, and before each the glue that it waits for, as much at once as can be.

    XLA's barriers say which arrays lie in memory, too.
    """
    made = {i: step for step in steps for i in step.outs}
    stored = {*range(program.inputs), *program.constants}
    joins = [glue.fits(step, program.arrays) for step in steps]
    reads = [
        set() if joined else {program.roots[i] for i in step.ins}
        for step, joined in zip(steps, joins, strict=True)
    ]
    wanted = {program.roots[i] for i in program.outputs}.union(*reads)
    done: list[Step | glue.Glue] = []
    waiting: list[int] = []

    def flush(now: list[int]) -> None:
        if now:
            written = glue.write(program, made, stored, now)
            done.append(written._replace(binary=launch.binary(written)) if native else written)
            stored.update(now)
            waiting[:] = [root for root in waiting if root not in stored]

    for step, joined, ins in zip(steps, joins, reads, strict=True):
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
    steps, same = list(program.steps), {}  # arrays written into another's memory
    for n, step in enumerate(steps):
        if step.primitive == "kernel" and native:
            written = [step.ins[i] for i in programs.refs_of(step.params)]
            same |= dict(zip(reversed(step.outs), reversed(written), strict=False))
            steps[n] = step._replace(params=programs.kernel(step.params))

    shaped = program.outputs
    # Outputs are neither inputs, nor constants, nor each other.
    arrays, roots, outputs = list(program.arrays), list(program.roots), []
    for number in program.outputs:
        root = roots[number]
        if root < program.inputs or root in (*program.constants, *outputs):
            root = len(roots)
            arrays.append(arrays[number])
            roots.append(root)
            steps.append(Step("copy", {}, (number,), (root,)))
        outputs.append(root)
    program = program._replace(arrays=tuple(arrays), roots=tuple(roots), outputs=tuple(outputs))

    def owner(number: int) -> int:
        root = program.roots[number]
        return owner(same[root]) if root in same else root

    done = _launches(program, steps, native)
    operators = [isinstance(x, Step) and not isinstance(x.params, Kernel) for x in done]
    used = [  # the arrays in memory of each
        [owner(i) for i in (x.arrays if isinstance(x, glue.Glue) else (*x.ins, *x.outs))]
        for x in done
    ]
    every = [root for each in used for root in each]
    constants = [root for root in dict.fromkeys(every) if root in program.constants]
    given = [*range(program.inputs), *constants]
    number = {root: n for n, root in enumerate(dict.fromkeys((*given, *every)))}
    outputs = [owner(i) for i in program.outputs]
    slots = [program.arrays[root] for root in number]
    for n, root in zip(shaped, outputs, strict=True):
        slots[number[root]] = program.arrays[n]
    last = {root: n for n, each in enumerate(used) for root in each}
    first = {root: n for n, each in reversed([*enumerate(used)]) for root in each}
    # Tensors: what operators read or make, and the outputs.  The rest shares one allocation.
    tensors = {*outputs}.union(*itertools.compress(used, operators)).difference(given)
    rest = {root: (first[root], last[root]) for root in first.keys() - tensors - {*given}}
    shared, size = _share(rest, program.arrays)
    units = []
    for n, x in enumerate(done):
        made = tensors.intersection(used[n])
        dead = tuple(number[r] for r in made if last[r] == n and r not in outputs)
        made = tuple(number[r] for r in made if first[r] == n)
        if operators[n]:
            reads = tuple((number[owner(i)], program.arrays[i].shape) for i in x.ins)
            units.append(Unit(x, tuple(number[i] for i in x.outs), reads, (), dead))
        else:
            what = x if isinstance(x, glue.Glue) else x.params
            units.append(Unit(what, tuple(number[r] for r in used[n]), (), made, dead))
    return Plan(
        tuple(program.constants[r] for r in constants), tuple(units), tuple(slots),
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
