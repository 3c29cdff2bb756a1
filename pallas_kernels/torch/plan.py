"""Orders a program into launches: kernels, glue (glue.py), and PyTorch's operators for the rest."""

import itertools
import math
from collections import Counter

import numpy as np

from pallas_kernels.torch import glue, launch, trace
from pallas_kernels.torch.program import Glue, Plan, Program, ProgramStep, Unit


def _lower(program: Program) -> dict[int, int]:
    """Lowers the kernels, and says which arrays they write into another's memory.

    Arrays that others read are copied first; so are outputs that are inputs, constants or equal.
    """
    roots, steps, outputs = program.roots, program.steps, program.outputs
    every = (step.ins for step in steps if step.outs)  # all but barriers
    reads = Counter(roots[i] for each in (*every, outputs) for i in each)
    program.steps, program.outputs, program.made, same = [], [], {}, {}

    def copy(number: int) -> int:
        out = program.new(program.arrays[number])
        program.step(ProgramStep("copy", {}, (number,), (out,)))
        return out

    for step in steps:
        if step.primitive == "kernel":
            aliases = step.params["of"].params["input_output_aliases"]
            old = [roots[n] for n in step.ins]
            shared = [i for i in aliases if reads[old[i]] > 1 or old[i] not in program.made]
            ins = tuple(copy(n) if i in shared else n for i, n in enumerate(step.ins))
            same |= {step.outs[result]: ins[i] for i, result in aliases.items()}
            step = ProgramStep("kernel", trace.kernel(step.params["of"]), ins, step.outs)
        program.step(step)
    for number in outputs:
        fresh = roots[number] in program.made and roots[number] not in program.outputs
        program.outputs.append(roots[number] if fresh else copy(number))
    return same


def _launches(program: Program) -> list[ProgramStep]:
    """Steps in order, and before each the glue that it waits for, as much at once as can be.

    XLA's barriers say which arrays lie in memory, too.
    """
    steps, arrays, roots = program.steps, program.arrays, program.roots
    stored = {*program.inputs, *program.constants}
    reads = [None if glue.fits(s, arrays) else {roots[i] for i in s.ins} for s in steps]
    wanted = {*program.outputs}.union(*filter(None, reads))
    done: list[ProgramStep] = []
    waiting: list[int] = []
    depth: dict[int, int] = {}

    def flush(now: list[int]) -> None:
        if now:
            text, arguments, blocks = glue.write(program, stored, now)
            done.append(ProgramStep("glue", Glue(blocks, launch.binary(text)), arguments, ()))
            stored.update(now)
            waiting[:] = [root for root in waiting if root not in stored]

    for step, ins in zip(steps, reads, strict=True):
        if ins is None:
            deep = 1 + max((depth.get(roots[i], 0) for i in step.ins), default=0)
            depth |= dict.fromkeys(step.outs, deep % glue.DEEPEST)
            waiting += [root for root in step.outs if root in wanted or deep == glue.DEEPEST]
            flush(waiting * (deep == glue.DEEPEST))
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
    arrays, roots = program.arrays, program.roots
    shapes = [arrays[i] for i in program.outputs]
    same = _lower(program)

    def owner(number: int) -> int:
        root = roots[number]
        return owner(same[root]) if root in same else root

    done = _launches(program)
    used = [[owner(i) for i in (*x.ins, *x.outs)] for x in done]  # the arrays in memory of each
    last = {root: n for n, each in enumerate(used) for root in each}
    given = [*program.inputs, *(root for root in last if root in program.constants)]
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
        here = tensors.difference(results).intersection(used[n])
        dead = tuple(number[i] for i in here if last[i] == n)
        slots, reads = tuple(number[root] for root in used[n]), ()
        if operators[n]:
            slots = tuple(number[i] for i in x.outs)
            reads = tuple((number[owner(i)], arrays[i].shape) for i in x.ins)
        what = x if operators[n] else x.params
        units.append(Unit(what, slots, reads, dead))
    kinds = {root: arrays[root] for root in number} | dict(zip(results, shapes, strict=True))
    made = tuple(number[root] for root in tensors - returned)
    constants = tuple(program.constants[root] for root in given[len(program.inputs) :])
    outputs = tuple(number[root] for root in results)
    return Plan(constants, tuple(units), tuple(kinds.values()), made, shared, size, outputs)
