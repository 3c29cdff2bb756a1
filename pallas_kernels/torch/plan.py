"""Orders a program into launches: kernels, glue (glue.py), and PyTorch's operators for the rest."""

import itertools
import math
from collections import Counter
from typing import Any, NamedTuple

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
    outputs: list[int]


def _launches(program: Program, native: bool) -> list[Any]:
    """Steps in order, and before each the glue that it waits for, as much at once as can be.

    XLA's barriers say which arrays lie in memory, too.
    """
    steps, arrays, roots = program.steps, program.arrays, program.roots
    made = {i: step for step in steps for i in step.outs}
    stored = {*range(program.inputs), *program.constants}
    reads = [None if glue.fits(s, arrays) else {roots[i] for i in s.ins} for s in steps]
    wanted = {roots[i] for i in program.outputs}.union(*filter(None, reads))
    done: list[Any] = []  # steps and glue
    waiting: list[int] = []

    def flush(now: list[int]) -> None:
        if now:
            written = glue.write(program, made, stored, now)
            done.append(written._replace(binary=launch.binary(written)) if native else written)
            stored.update(now)
            waiting[:] = [root for root in waiting if root not in stored]

    for step, ins in zip(steps, reads, strict=True):
        if ins is None:
            waiting += [root for root in step.outs if root in wanted]
            continue
        if not ins.isdisjoint(waiting):
            flush([root for root in waiting if step.outs or root in ins])
        if step.outs:
            done.append(step)
            stored.update(step.outs)
    flush(waiting)
    return done


def _lowered(program: Program, native: bool) -> tuple[Program, dict[int, int]]:
    """The program with lowered kernels, and the arrays that they write into another's memory.

    What others read is copied before.
    """
    steps, arrays, roots = [], list(program.arrays), list(program.roots)
    every = (step.ins for step in program.steps if step.outs)  # all but barriers
    reads = Counter(roots[i] for each in (*every, program.outputs) for i in each)
    outputs, made, same = [], set(), {}

    def copy(number: int) -> int:
        arrays.append(arrays[number])
        roots.append(len(roots))
        steps.append(Step("copy", {}, (number,), (roots[-1],)))
        return roots[-1]

    for step in program.steps:
        if step.primitive == "kernel" and native:
            aliases = step.params.params["input_output_aliases"]
            roots_of = [roots[n] for n in step.ins]
            shared = [i for i in aliases if reads[roots_of[i]] > 1 or roots_of[i] not in made]
            ins = tuple(copy(n) if i in shared else n for i, n in enumerate(step.ins))
            same |= {step.outs[result]: ins[i] for i, result in aliases.items()}
            step = Step("kernel", programs.kernel(step.params), ins, step.outs)
        steps.append(step)
        made.update(step.outs)
    for number in program.outputs:  # neither inputs, nor constants, nor each other
        fresh = roots[number] in made and roots[number] not in outputs
        outputs.append(roots[number] if fresh else copy(number))
    return Program(program.inputs, program.constants, steps, outputs, arrays, roots), same


def plan(program: Program, native: bool = True) -> Plan:
    """native: kernels are launched; otherwise they are functions of tensors, as operators are."""
    shapes = [program.arrays[i] for i in program.outputs]
    program, same = _lowered(program, native)
    arrays, roots, outputs = program.arrays, program.roots, program.outputs

    def owner(number: int) -> int:
        root = roots[number]
        return owner(same[root]) if root in same else root

    done = _launches(program, native)
    operators = [isinstance(x, Step) and not isinstance(x.params, Kernel) for x in done]
    touched = lambda x: x.arrays if isinstance(x, glue.Glue) else (*x.ins, *x.outs)
    used = [[owner(i) for i in touched(x)] for x in done]  # the arrays in memory of each
    every = dict.fromkeys((*range(program.inputs), *itertools.chain(*used)))
    constants = [root for root in every if root in program.constants]
    given = [*range(program.inputs), *constants]
    number = {root: n for n, root in enumerate(dict.fromkeys((*given, *every)))}
    slots = [arrays[root] for root in number]
    results = [owner(root) for root in outputs]
    for root, array in zip(results, shapes, strict=True):
        slots[number[root]] = array
    # Tensors: what operators read or make, and the outputs.  The rest shares one allocation.
    tensors = {*results}.union(*itertools.compress(used, operators)).difference(given)
    shared, size = {}, 0
    for root, slot in number.items():
        if root not in tensors and root not in given:
            shared[slot] = size
            space = math.prod(arrays[root].shape) * np.dtype(arrays[root].dtype).itemsize
            size += -(-space // 256) * 256
    last = {root: n for n, each in enumerate(used) for root in each}
    units, new = [], set(tensors)
    for n, x in enumerate(done):
        own = tensors.intersection(used[n])
        made = tuple(number[root] for root in own & new)
        dead = tuple(number[root] for root in own.difference(results) if last[root] == n)
        new -= own
        if operators[n]:
            reads = tuple((number[owner(i)], arrays[i].shape) for i in x.ins)
            units.append(Unit(x, tuple(number[i] for i in x.outs), reads, (), dead))
        else:
            what = x if isinstance(x, glue.Glue) else x.params
            units.append(Unit(what, tuple(number[root] for root in used[n]), (), made, dead))
    kept = tuple(program.constants[root] for root in constants)
    return Plan(kept, tuple(units), tuple(slots), shared, size, [number[r] for r in results])
