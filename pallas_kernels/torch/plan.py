"""Orders a program into launches: kernels, glue (glue.py), and PyTorch's operators for the rest."""

import math
from typing import NamedTuple

import numpy as np

from pallas_kernels.torch import glue
from pallas_kernels.torch.program import Array, Kernel, Program, Step

SMALL = 2**20  # bytes; temporary arrays up to this size share one allocation


class Unit(NamedTuple):
    """One launch, or one operator of PyTorch."""

    what: Kernel | glue.Glue | Step
    arrays: tuple[int, ...]  # of a launch: its arguments, by slot
    made: tuple[int, ...] = ()  # slots that are allocated before
    dead: tuple[int, ...] = ()  # slots whose memory is free after


class Plan(NamedTuple):
    """A program's launches.  Slots are arrays in memory: the inputs, the constants, the others."""

    inputs: tuple[Array, ...]
    constants: tuple[np.ndarray, ...]
    units: tuple[Unit, ...]
    slots: tuple[Array, ...]
    scratch: tuple[tuple[int, int], ...]  # slot, byte in the shared allocation
    size: int  # of it, in bytes
    outputs: tuple[int, ...]
    views: dict[int, tuple[int, Array]]  # of each number that an operator reads: slot and shape


class _Planner:
    def __init__(self, program: Program, native: bool):
        self.native = native
        self.arrays, self.roots = list(program.arrays), list(program.roots)
        self.constants, self.kept = dict(program.constants), set(program.kept)
        self.steps: list[Step] = []
        self.made: dict[int, Step] = {}  # by array
        self.same: dict[int, int] = {}  # arrays written into another's memory
        self.inputs = range(len(program.inputs))
        self.program = program._replace(
            arrays=self.arrays, roots=self.roots, constants=self.constants
        )
        self.order(program)
        self.outputs = self.results(program)

    def order(self, program: Program) -> None:
        last: dict[int, float] = {}
        read: set[int] = set()  # by glue, perhaps later than its step
        for n, step in enumerate(program.steps):
            roots = [self.roots[i] for i in step.ins]
            last.update(dict.fromkeys(roots, n))
            if glue.fits(step, program):
                read.update(roots)
        last.update(dict.fromkeys((self.roots[i] for i in program.outputs), math.inf))
        for n, step in enumerate(program.steps):
            if isinstance(step.params, Kernel) and self.native:
                roots = [self.roots[i] for i in step.ins]
                own = {r for r in roots if last[r] == n and roots.count(r) == 1 and r in self.made}
                step = self.kernel(step, own - read)
            self.add(step)

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
                wide = np.float64 if x[0].dtype.startswith(("float", "bfloat")) else x[0].dtype
                self.constants[value] = np.asarray(x[1], wide)
                root = self.glued("broadcast_in_dim", {"broadcast_dimensions": ()}, value, x[0])
            operands.append(root)
        outs = dict(zip(kernel.returned, step.outs, strict=True))
        results = [outs[i] if i in outs else self.new(r) for i, r in enumerate(kernel.results)]
        self.same |= {results[i]: operands[j] for i, j in kernel.aliases.items()}
        return Step("kernel", kernel, tuple(operands), tuple(results))

    def results(self, program: Program) -> list[int]:
        """The outputs as arrays that are neither inputs, nor constants, nor each other."""
        found: list[int] = []
        for number in program.outputs:
            root = self.roots[number]
            if root not in self.made or root in found:
                root = self.glued("copy", {}, number, self.arrays[number])
            found.append(root)
        return found

    def launches(self) -> list[Step | glue.Glue]:
        """Steps in order, and before each what it needs of glue: as much at once as can be."""
        program = self.program
        joins = {id(s): glue.fits(s, program) for s in self.steps}
        stored = {*self.inputs, *self.constants}
        wanted = {*self.outputs, *self.kept}
        for step in self.steps:
            if not joins[id(step)]:
                wanted.update(self.roots[i] for i in step.ins)
        done: list[Step | glue.Glue] = []
        waiting: list[int] = []

        def behind(root: int, known: dict[int, bool], top: bool = True) -> bool:
            """Whether an array waits for another one that shall lie in memory."""
            if root in stored:
                return False
            if not top and root in self.kept and root in waiting:
                return True
            if root not in known:
                ins = [self.roots[i] for i in self.made[root].ins]
                known[root] = any(behind(i, known, False) for i in ins)
            return known[root]

        def flush() -> None:
            while waiting:
                known: dict[int, bool] = {}
                now = [root for root in waiting if not behind(root, known)]
                done.append(glue.write(program, self.made, stored, now))
                stored.update(now)
                waiting[:] = [root for root in waiting if root not in stored]

        for step in self.steps:
            if joins[id(step)]:
                waiting += [root for root in step.outs if root in wanted]
                continue
            if any(self.roots[i] in waiting for i in step.ins):
                flush()
            done.append(step)
            stored.update(step.outs)
        flush()
        return done


def plan(program: Program, native: bool = True) -> Plan:
    """native: kernels are launched; otherwise they are functions of tensors, as operators are."""
    p = _Planner(program, native)
    done = p.launches()
    owner = lambda root: owner(p.same[root]) if root in p.same else root
    number: dict[int, int] = {i: i for i in p.inputs}  # of each array its slot
    launch = lambda what: isinstance(what, glue.Glue) or isinstance(what.params, Kernel)
    used = [
        [owner(r) for r in x.arrays]
        if isinstance(x, glue.Glue)
        else [owner(p.roots[i]) for i in (*x.ins, *x.outs)]
        for x in done
    ]
    constants = [r for r in dict.fromkeys(r for each in used for r in each) if r in p.constants]
    for root in (*constants, *(r for each in used for r in each)):
        number.setdefault(root, len(number))
    last = {root: n for n, each in enumerate(used) for root in each}
    outputs = [owner(root) for root in p.outputs]
    tensors = {r for x, each in zip(done, used, strict=True) if not launch(x) for r in each}
    fixed = {*p.inputs, *constants, *outputs}
    units, seen, scratch, size = [], {*p.inputs, *constants}, [], 0
    views = {}
    for n, (what, each) in enumerate(zip(done, used, strict=True)):
        made, dead = [], []
        for root in dict.fromkeys(each):
            if last[root] == n and root not in fixed:
                dead.append(number[root])
            if root in seen:
                continue
            seen.add(root)
            space = math.prod(p.arrays[root].shape) * np.dtype(p.arrays[root].dtype).itemsize
            if root in tensors or root in outputs or space > SMALL:
                made.append(number[root])
            else:
                scratch.append((number[root], size))
                size += -(-space // 256) * 256
        if launch(what):
            units.append(Unit(what, tuple(number[r] for r in each), tuple(made), tuple(dead)))
            continue
        views |= {i: (number[owner(p.roots[i])], p.arrays[i]) for i in (*what.ins, *what.outs)}
        units.append(Unit(what, (), (), tuple(dead)))
    held = dict(scratch)
    units = [u._replace(dead=tuple(s for s in u.dead if s not in held)) for u in units]
    slots = [Array((), "")] * len(number)
    for root, slot in number.items():
        slots[slot] = p.arrays[root]
    for n, root in zip(program.outputs, outputs, strict=True):
        slots[number[root]] = p.arrays[n]
    return Plan(
        program.inputs, tuple(p.constants[r] for r in constants), tuple(units), tuple(slots),
        tuple(scratch), size, tuple(number[r] for r in outputs), views,
    )  # fmt: skip
