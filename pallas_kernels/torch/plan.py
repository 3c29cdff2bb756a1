"""Orders a program into launches: kernels, glue (glue.py), and PyTorch's operators for the rest."""

import math
from typing import NamedTuple

import numpy as np

from pallas_kernels.torch import glue
from pallas_kernels.torch.program import Array, Kernel, Program, Step

SMALL = 2**20  # bytes; temporary arrays up to this size share one allocation


class View(NamedTuple):
    """An array as an operator of PyTorch reads it."""

    slot: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # of its axes


class Unit(NamedTuple):
    """One launch with the slots of its arguments, or an operator of PyTorch with views."""

    what: Kernel | glue.Glue | Step
    slots: tuple[int, ...]  # of an operator: its results
    views: tuple[View, ...]
    made: tuple[int, ...]  # slots to allocate before
    dead: tuple[int, ...]  # slots whose memory is free after


class Plan(NamedTuple):
    """A program's launches.  Slots are arrays in memory: the inputs, the constants, the others."""

    inputs: tuple[Array, ...]
    constants: tuple[np.ndarray, ...]
    units: tuple[Unit, ...]
    slots: tuple[Array, ...]
    scratch: tuple[tuple[int, int], ...]  # slot, byte in the shared allocation
    size: int  # of it, in bytes
    outputs: tuple[int, ...]


class _Planner:
    """A program's steps with all arguments of the kernels, and with steps that fill or copy."""

    def __init__(self, program: Program, native: bool):
        self.arrays, self.roots = list(program.arrays), list(program.roots)
        self.constants = dict(program.constants)
        self.steps: list[Step] = []
        self.made: dict[int, Step] = {}  # by array
        self.same: dict[int, int] = {}  # arrays written into another's memory
        last, read = dict.fromkeys((self.roots[i] for i in program.outputs), math.inf), set()
        for n, step in enumerate(program.steps):
            roots = [self.roots[i] for i in step.ins]
            last |= {r: n for r in roots if last.get(r) != math.inf}
            # Glue reads an array perhaps later than its step, so no kernel may overwrite it.
            read.update(roots if glue.fits(step, program) else ())
        for n, step in enumerate(program.steps):
            if isinstance(step.params, Kernel) and native:
                roots = [self.roots[i] for i in step.ins]
                own = {r for r in roots if last[r] == n and roots.count(r) == 1 and r in self.made}
                step = self.kernel(step, own - read)
            self.add(step)
        self.outputs: list[int] = []  # neither inputs, nor constants, nor each other
        for number in program.outputs:
            root = self.roots[number]
            if root not in self.made or root in self.outputs:
                root = self.glued("copy", {}, number, self.arrays[number])
            self.outputs.append(root)
        arrays, roots = tuple(self.arrays), tuple(self.roots)
        self.program = program._replace(arrays=arrays, roots=roots, constants=self.constants)

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self.made.update(dict.fromkeys(step.outs, step))

    def new(self, array: Array) -> int:
        self.arrays.append(array)
        self.roots.append(len(self.roots))
        return len(self.roots) - 1

    def glued(self, primitive: str, params: dict, source: int, array: Array) -> int:
        made = self.new(array)
        self.add(Step(primitive, params, (source,), (made,)))
        return made

    def kernel(self, step: Step, own: set[int]) -> Step:
        """The step with all of the kernel's arguments; it may overwrite the arrays in `own`."""
        kernel: Kernel = step.params
        operands = []
        for i, x in enumerate(kernel.operands):
            if isinstance(x, int):
                root = self.roots[step.ins[x]]
                if i in kernel.aliases.values() and root not in own:
                    root = self.glued("copy", {}, root, self.arrays[root])
            elif isinstance(x, Array):
                root = self.new(x)
            else:
                value = self.new(Array((), x[0].dtype))
                self.constants[value] = np.asarray(x[1])
                root = self.glued("broadcast_in_dim", {"broadcast_dimensions": ()}, value, x[0])
            operands.append(root)
        outs = dict(zip(kernel.returned, step.outs, strict=True))
        results = [outs[i] if i in outs else self.new(r) for i, r in enumerate(kernel.results)]
        self.same |= {results[i]: operands[j] for i, j in kernel.aliases.items()}
        return Step("kernel", kernel, tuple(operands), tuple(results))

    def source(self, step: Step, i: int) -> tuple[int, tuple[int, ...] | None]:
        """What a step reads as array i: products read arrays that are transposed otherwise."""
        before = self.made.get(i)
        if step.primitive == "dot_general" and before and before.primitive == "transpose":
            return before.ins[0], before.params["permutation"]
        return i, None

    def launches(self) -> list[Step | glue.Glue]:
        """Steps in order, and before each the glue that it waits for, as much at once as can be."""
        stored = {*range(len(self.program.inputs)), *self.constants}
        joins = {id(s) for s in self.steps if glue.fits(s, self.program)}
        reads = {
            id(s): [self.roots[self.source(s, i)[0]] for i in s.ins]
            for s in self.steps
            if id(s) not in joins
        }
        kept = self.program.kept
        wanted = {*self.outputs, *kept, *(root for each in reads.values() for root in each)}
        done: list[Step | glue.Glue] = []
        waiting: list[int] = []

        def behind(root: int, known: dict[int, bool], top: bool = True) -> bool:
            """Whether glue must first write another array, which shall lie in memory."""
            if root in stored:
                return False
            if not top and root in kept and root in waiting:
                return True
            if root not in known:
                ins = [self.roots[i] for i in self.made[root].ins]
                known[root] = any(behind(i, known, False) for i in ins)
            return known[root]

        def flush() -> None:
            while waiting:
                known: dict[int, bool] = {}
                now = [root for root in waiting if not behind(root, known)]
                done.append(glue.write(self.program, self.made, stored, now))
                stored.update(now)
                waiting[:] = [root for root in waiting if root not in stored]

        for step in self.steps:
            if id(step) in joins:
                waiting += [root for root in step.outs if root in wanted]
                continue
            if not set(waiting).isdisjoint(reads[id(step)]):
                flush()
            done.append(step)
            stored.update(step.outs)
        flush()
        return done


def plan(program: Program, native: bool = True) -> Plan:
    """native: kernels are launched; otherwise they are functions of tensors, as operators are."""
    p = _Planner(program, native)
    done: list = p.launches()
    inputs = range(len(program.inputs))
    launched = [isinstance(x, glue.Glue) or isinstance(x.params, Kernel) for x in done]

    def owner(number: int) -> int:
        root = p.roots[number]
        return owner(p.same[root]) if root in p.same else root

    used = []  # the arrays in memory of each
    for x in done:
        args = x.arrays if isinstance(x, glue.Glue) else [p.source(x, i)[0] for i in x.ins]
        used.append([owner(i) for i in (*args, *(() if isinstance(x, glue.Glue) else x.outs))])
    every = [root for each in used for root in each]
    constants = [root for root in dict.fromkeys(every) if root in p.constants]
    number = {root: n for n, root in enumerate(dict.fromkeys((*inputs, *constants, *every)))}
    last = {root: n for n, each in enumerate(used) for root in each}
    outputs = [owner(root) for root in p.outputs]
    tensors = {*outputs, *(r for n, each in enumerate(used) if not launched[n] for r in each)}
    slots = [p.arrays[root] for root in number]
    for n, root in zip(program.outputs, outputs, strict=True):
        slots[number[root]] = p.arrays[n]
    units, size = [], 0
    seen, scratch = {*inputs, *constants}, {}
    for n, (x, each) in enumerate(zip(done, used, strict=True)):
        fresh = [] if not launched[n] else [r for r in dict.fromkeys(each) if r not in seen]
        seen.update(each)
        for root in fresh:
            space = math.prod(p.arrays[root].shape) * np.dtype(p.arrays[root].dtype).itemsize
            if root not in tensors and space <= SMALL:
                scratch[number[root]] = size
                size += -(-space // 256) * 256
        made = tuple(number[r] for r in fresh if number[r] not in scratch)
        fixed = {*inputs, *constants, *outputs}
        dead = {number[r] for r in each if last[r] == n and r not in fixed}.difference(scratch)
        views = []
        if not launched[n]:
            for i in x.ins:
                of, order = p.source(x, i)
                views.append(View(number[owner(of)], p.arrays[of].shape, order))
            each = [owner(i) for i in x.outs]
        what = x.params if launched[n] and isinstance(x, Step) else x
        places = tuple(number[r] for r in each)
        units.append(Unit(what, places, tuple(views), made, tuple(dead)))
    return Plan(
        program.inputs, tuple(p.constants[r] for r in constants), tuple(units), tuple(slots),
        tuple(scratch.items()), size, tuple(number[r] for r in outputs),
    )  # fmt: skip
