"""Orders a program into launches: kernels, glue (glue.py), and PyTorch's operators for the rest."""

import itertools
import math
from collections import Counter

import numpy as np

from pallas_kernels.torch import glue, launch, trace
from pallas_kernels.torch.program import Glue, Plan, Program, Step, Unit


def _lowered(program: Program) -> tuple[Program, dict[int, int]]:
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
        if step.primitive == "kernel":
            aliases = step.params.params["input_output_aliases"]
            roots_of = [roots[n] for n in step.ins]
            shared = [i for i in aliases if reads[roots_of[i]] > 1 or roots_of[i] not in made]
            ins = tuple(copy(n) if i in shared else n for i, n in enumerate(step.ins))
            same |= {step.outs[result]: ins[i] for i, result in aliases.items()}
            step = Step("kernel", trace.kernel(step.params), ins, step.outs)
        steps.append(step)
        made.update(step.outs)
    for number in program.outputs:  # neither inputs, nor constants, nor each other
        fresh = roots[number] in made and roots[number] not in outputs
        outputs.append(roots[number] if fresh else copy(number))
    return Program(program.inputs, program.constants, steps, outputs, arrays, roots), same


def _launches(program: Program) -> list[Step]:
    """Steps in order, and before each the glue that it waits for, as much at once as can be.

    XLA's barriers say which arrays lie in memory, too.
    """
    steps, arrays, roots = program.steps, program.arrays, program.roots
    made = {i: step for step in steps for i in step.outs}
    stored = {*range(program.inputs), *program.constants}
    reads = [None if glue.fits(s, arrays) else {roots[i] for i in s.ins} for s in steps]
    wanted = {*program.outputs}.union(*filter(None, reads))
    done: list[Step] = []
    waiting: list[int] = []

    def flush(now: list[int]) -> None:
        if now:
            text, arguments, blocks = glue.write(program, made, stored, now)
            done.append(Step("glue", Glue(blocks, launch.binary(text)), arguments, ()))
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


def plan(program: Program) -> Plan:
    """The launches of a program, in order, and where in memory their arrays are."""
    shapes = [program.arrays[i] for i in program.outputs]
    program, same = _lowered(program)
    arrays, roots = program.arrays, program.roots

    def owner(number: int) -> int:
        root = roots[number]
        return owner(same[root]) if root in same else root

    done = _launches(program)
    used = [[owner(i) for i in (*x.ins, *x.outs)] for x in done]  # the arrays in memory of each
    last = {root: n for n, each in enumerate(used) for root in each}
    given = [*range(program.inputs), *(root for root in last if root in program.constants)]
    number = {root: n for n, root in enumerate(dict.fromkeys((*given, *last)))}
    results = [owner(root) for root in program.outputs]
    # Tensors: what operators read or make, and the outputs.  The rest shares one allocation.
    operators = [x.primitive not in ("kernel", "glue") for x in done]
    tensors = {*results}.union(*itertools.compress(used, operators)).difference(given)
    returned = {owner(i) for x in itertools.compress(done, operators) for i in x.outs}
    shared, size = {}, 0
    for root, slot in number.items():
        if root not in tensors and root not in given:
            shared[slot] = size
            space = math.prod(arrays[root].shape) * np.dtype(arrays[root].dtype).itemsize
            size += -(-space // 256) * 256
    units = []
    for n, x in enumerate(done):
        dead = [
            number[i] for i in tensors.difference(results).intersection(used[n]) if last[i] == n
        ]
        slots, reads = tuple(number[root] for root in used[n]), ()
        if operators[n]:
            slots = tuple(number[i] for i in x.outs)
            reads = tuple((number[owner(i)], arrays[i].shape) for i in x.ins)
        what = x if operators[n] else x.params
        units.append(Unit(what, slots, reads, tuple(dead)))
    kinds = {root: arrays[root] for root in number} | dict(zip(results, shapes, strict=True))
    made = tuple(number[root] for root in tensors - returned)
    constants = tuple(program.constants[root] for root in given[program.inputs :])
    outputs = tuple(number[root] for root in results)
    return Plan(constants, tuple(units), tuple(kinds.values()), made, shared, size, outputs)
