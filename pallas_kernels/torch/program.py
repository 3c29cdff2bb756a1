"""Turns an op of ours into a program that needs no JAX to run: kernels, and what is between them.

A program is a list of steps over numbered arrays.  A step is either a Mosaic kernel, kept as the
serialized MLIR module that JAX gives to its own custom call, or one primitive of the jaxpr.
Nothing here touches a GPU or imports PyTorch: JAX traces shapes, and lowers each kernel for CUDA.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir, passmanager
from jax.extend import core

# What wraps an inner jaxpr without changing its meaning, and the parameter that holds it.
_CALLS = dict.fromkeys(("jit", "remat2", "checkpoint"), "jaxpr") | {"custom_vmap_call": "call"}
_CALLS |= dict.fromkeys(("closed_call", "custom_vjp_call", "custom_jvp_call"), "call_jaxpr")
_SAME = {"name", "kernel_guard", "stop_gradient", "optimization_barrier", "copy", "copy_p"}
_VIEWS = {"reshape", "squeeze", "expand_dims"}


class Array(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str


class Kernel(NamedTuple):
    """One Mosaic kernel.

    module: serialized MLIR, which `MosaicGpuCompile` of JAX's CUDA plugin takes.
    operands: for each argument of the kernel a number among the step's inputs, or the array that
      JAX would allocate for it, or (array, value) for one that is filled.
    results: the arrays that it writes.
    aliases: result -> operand in whose memory it is written.
    returned: the results that are outputs of the step, in order.
    """

    name: str
    module: bytes
    operands: tuple[int | Array | tuple[Array, float], ...]
    results: tuple[Array, ...]
    aliases: dict[int, int]
    returned: tuple[int, ...]


class Step(NamedTuple):
    """outs = primitive(ins); ins and outs number the program's arrays."""

    primitive: str
    params: Any  # a dict of plain values; of "kernel" a Kernel
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Program(NamedTuple):
    """inputs, constants and the results of the steps have the numbers 0, 1, 2, ..."""

    inputs: tuple[Array, ...]
    constants: dict[int, np.ndarray]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    arrays: tuple[Array, ...]  # by number
    roots: tuple[int, ...]  # by number: the array that a reshaped one is, or the array itself
    kept: frozenset[int]  # arrays that shall lie in memory, as XLA's barriers would have them


class _Walk:
    """Numbers the arrays of a jaxpr, and collects constants and steps."""

    def __init__(self):
        self.arrays: list[Array] = []
        self.roots: list[int] = []
        self.kept: set[int] = set()
        self.constants: dict[int, np.ndarray] = {}
        self.steps: list[Step] = []
        self.held: dict[int, int] = {}  # of each ref: the array that it holds now

    def new(self, aval, root: int | None = None) -> int:
        self.arrays.append(_array(aval))
        self.roots.append(len(self.roots) if root is None else root)
        return len(self.arrays) - 1

    def constant(self, x, dtype) -> int:
        x = np.asarray(x, dtype)
        self.constants[len(self.arrays)] = x
        return self.new(x)

    def walk(self, jaxpr, args: Sequence[int]) -> list[int]:
        """The numbers of the jaxpr's results, given the numbers of its arguments."""
        consts = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        numbers = dict(zip(jaxpr.invars, args, strict=True))
        if jaxpr.constvars:
            pairs = zip(jaxpr.constvars, consts, strict=True)
            numbers |= {v: self.constant(c, c.dtype) for v, c in pairs}

        def number(v) -> int:
            if isinstance(v, core.Literal):
                return self.constant(v.val, _array(v.aval).dtype)
            return numbers[v]

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, tuple(number(v) for v in eqn.invars))
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return [number(v) for v in jaxpr.outvars]

    def equation(self, eqn, ins: tuple[int, ...]) -> Sequence[int]:
        name, held = eqn.primitive.name, self.held
        if name in _CALLS:
            return self.walk(eqn.params[_CALLS[name]], ins)
        if name in _SAME or name.startswith("reduce_") and not eqn.params.get("axes", True):
            if name == "optimization_barrier":
                self.kept.update(self.roots[i] for i in ins)
            return ins
        if name in _VIEWS:
            return [self.new(eqn.outvars[0].aval, self.roots[ins[0]])]
        if name == "new_ref":
            made = self.new(eqn.outvars[0].aval)
            held[made] = ins[0]
            return [made]
        if name == "run_state":
            refs = [self.new(v.aval) for v in eqn.invars]
            held.update(zip(refs, ins, strict=True))
            self.walk(eqn.params["jaxpr"], refs)
            return [held[n] for n in refs]
        if name == "freeze" or name == "get" and len(ins) == 1:
            return [held[ins[0]]]
        if name == "swap" and len(ins) == 2:
            outs, held[ins[0]] = [held[ins[0]]], ins[1]
            return outs
        if name in ("while", "scan", "cond"):
            raise NotImplementedError(f"{name} has no form in PyTorch")
        outs = [self.new(v.aval) for v in eqn.outvars]
        if name != "mpmd_map":
            self.steps.append(Step(name, _plain(eqn), ins, tuple(outs)))
            return outs
        written = {n: self.new(v.aval) for v, n in zip(eqn.invars, ins, strict=True) if n in held}
        now = tuple(held.get(n, n) for n in ins)
        self.steps.append(Step("kernel", eqn, now, (*outs, *written.values())))
        held.update(written)
        return outs


def build(jaxpr) -> Program:
    """The program of a jaxpr; its kernels are still equations, which `kernel` lowers."""
    w = _Walk()
    inputs = [w.new(v.aval) for v in getattr(jaxpr, "jaxpr", jaxpr).invars]
    outputs = w.walk(jaxpr, inputs)
    used, steps = {w.roots[i] for i in outputs}, []
    for step in reversed(_turned(w.steps, outputs, w.arrays)):  # without what nobody reads
        if used.intersection(step.outs):
            used.update(w.roots[i] for i in step.ins)
            steps.append(step)
    return Program(
        tuple(w.arrays[i] for i in inputs),
        {i: x for i, x in w.constants.items() if i in used},
        tuple(reversed(steps)), tuple(outputs), tuple(w.arrays), tuple(w.roots), frozenset(w.kept),
    )  # fmt: skip


def _turned(steps: list[Step], outputs, arrays) -> list[Step]:
    """A transposed product is the product of the operands in the other order."""
    made = {i: step for step in steps for i in step.outs}
    reads = [i for step in steps for i in step.ins] + list(outputs)
    done = []
    for step in steps:
        dot = made.get(step.ins[0]) if step.primitive == "transpose" else None
        if dot is not None and dot.primitive == "dot_general" and reads.count(dot.outs[0]) == 1:
            (left, right), batch = dot.params["dimension_numbers"]
            count = len(arrays[dot.ins[0]].shape) - len(left)  # left axes of the result
            order = tuple(step.params["permutation"])
            if not batch[0] and order == (*range(count, len(order)), *range(count)):
                turned = {"dimension_numbers": ((right, left), batch)}
                step = Step("dot_general", turned, dot.ins[::-1], step.outs)
        done.append(step)
    return done


def _is_ref(v) -> bool:
    return hasattr(v.aval, "inner_aval")


def _array(aval) -> Array:
    aval = getattr(aval, "inner_aval", aval)
    return Array(tuple(map(int, aval.shape)), np.dtype(aval.dtype).name)


def _plain(eqn) -> dict[str, Any]:
    """The parameters of an equation that say what it computes, as plain values."""
    params, numbers = eqn.params, eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "dot_general":
        return {"dimension_numbers": tuple(tuple(map(tuple, pair)) for pair in numbers)}
    if eqn.primitive.name == "scatter":
        return {k: tuple(getattr(numbers, k)) for k in numbers._fields if "dims" in k}
    drop = ("sharding", "accuracy", "mode", "out_sharding", "new_dtype", "dtype")
    return {k: v for k, v in params.items() if k not in drop}


def call_of(eqn, **override) -> Callable:
    """The equation of a kernel as a function of arrays; refs that it writes are results, too."""
    refs = [i for i, v in enumerate(eqn.invars) if _is_ref(v)]

    def call(*args):
        made = {i: jax.new_ref(args[i]) for i in refs}
        args = [made.get(i, x) for i, x in enumerate(args)]
        outs = eqn.primitive.bind(*args, **eqn.params | override)
        return (*outs, *(jax.freeze(made[i]) for i in refs))

    return call


def kernel(eqn) -> Kernel:
    """Lowers the equation of one kernel for CUDA, as JAX does for its own custom call."""
    call = call_of(eqn)
    structs = [jax.ShapeDtypeStruct(*_array(v.aval)) for v in eqn.invars]
    lowered = jax.jit(call, keep_unused=True).trace(*structs).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir()
    with module.context:
        mgpu.dialect.register_inliner_extensions(module.context)
        inline = passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})")
        inline.run(module.operation)
        (main,) = (f for f in module.body.operations if f.attributes["sym_name"].value == "main")
        return _read(str(eqn.params["name"]), main.body.blocks[0])


def _read(name: str, block) -> Kernel:
    """The one kernel of a function; its other operations allocate or fill operands."""
    values: dict[Any, Any] = {a: i for i, a in enumerate(block.arguments)}
    calls, returned = [], []
    for op in block.operations:
        target = op.attributes["call_target_name"].value if op.name.endswith("custom_call") else ""
        if target == "AllocateBuffer":
            values[op.results[0]] = _typed(op.results[0])
        elif target.startswith("mosaic_gpu"):
            calls.append(op)
        elif op.name == "stablehlo.constant":
            splat: Any = ir.DenseElementsAttr(op.attributes["value"])
            values[op.results[0]] = (_typed(op.results[0]), next(iter(splat)) if len(splat) else 0)
        elif op.name == "stablehlo.broadcast_in_dim":
            values[op.results[0]] = (_typed(op.results[0]), values[op.operands[0]][1])
        elif op.name == "func.return":
            returned = list(op.operands)
        else:
            raise NotImplementedError(f"{name} needs {op.name} around its kernel")
    if len(calls) != 1:
        raise NotImplementedError(f"{name} is {len(calls)} kernels, not one")
    call: Any = calls[0]
    results = list(call.results)
    pattern = r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)"
    aliases = re.findall(pattern, " ".join(map(str, call.attributes["output_operand_aliases"])))
    return Kernel(
        name,
        call.attributes["mhlo.backend_config"]["module"].value_bytes,
        tuple(values[x] for x in call.operands),
        tuple(map(_typed, results)),
        {int(out or 0): int(operand) for out, operand in aliases},
        tuple(results.index(x) for x in returned),
    )


_DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "i1": "bool",
    "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2",
    **{f"i{n}": f"int{n}" for n in (4, 8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (4, 8, 16, 32, 64)},
}  # fmt: skip


def _typed(value) -> Array:
    typed = ir.RankedTensorType(value.type)
    return Array(tuple(typed.shape), _DTYPES[str(typed.element_type)])


def trace_run(op: Callable, structs: Sequence[jax.ShapeDtypeStruct]):
    """The jaxpr of op(*structs) and the tree of its outputs."""
    jaxpr, shapes = jax.make_jaxpr(lambda *a: op(*a), return_shape=True)(*structs)
    return jaxpr, jax.tree.structure(shapes)


def trace_train(op: Callable, structs: Sequence[jax.ShapeDtypeStruct], wrt: Sequence[int]):
    """Forward with residuals, where they lie, and backward.

    Returns (forward jaxpr, tree, number of outputs, saved, backward jaxpr).
    """
    kept: dict[str, Any] = {}

    def forward(*arrays):
        def part(*chosen):
            full = list(arrays)
            for i, x in zip(wrt, chosen, strict=True):
                full[i] = x
            return op(*full)

        out, vjp = jax.vjp(part, *(arrays[i] for i in wrt))
        leaves, kept["tree"] = jax.tree.flatten(out)
        residuals, kept["vjp"] = jax.tree.flatten(vjp)
        kept["n"] = len(leaves)
        kept["floats"] = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        kept["outs"] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        kept["residuals"] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in residuals]
        return (*leaves, *residuals)

    jaxpr = jax.make_jaxpr(forward)(*structs)

    def backward(*arrays):
        residuals, given = arrays[: len(kept["residuals"])], list(arrays[len(kept["residuals"]) :])
        cts = [
            given.pop(0) if yes else np.zeros(x.shape, jax.dtypes.float0)
            for x, yes in zip(kept["outs"], kept["floats"], strict=True)
        ]
        vjp = jax.tree.unflatten(kept["vjp"], residuals)
        return vjp(jax.tree.unflatten(kept["tree"], cts))

    floats = [x for x, yes in zip(kept["outs"], kept["floats"], strict=True) if yes]
    back = jax.make_jaxpr(backward)(*kept["residuals"], *floats)
    return jaxpr, kept["tree"], kept["n"], kept["floats"], back


def split_forward(program: Program, n: int) -> tuple[Program, tuple[tuple[str, int], ...]]:
    """Leaves out residuals that are inputs or repeated outputs, and says where all lie."""
    outputs, roots, saved = list(program.outputs[:n]), program.roots, []
    for number in program.outputs[n:]:
        lies = [roots[i] for i in outputs]
        if roots[number] < len(program.inputs):
            saved.append(("in", roots[number]))
        elif roots[number] in lies:
            saved.append(("out", lies.index(roots[number])))
        else:
            saved.append(("out", len(outputs)))
            outputs.append(number)
    return program._replace(outputs=tuple(outputs)), tuple(saved)


def distinct(program: Program) -> tuple[Program, tuple[int, ...]]:
    """Leaves out repeated outputs, and says which is which."""
    outputs = list(dict.fromkeys(program.outputs))
    return program._replace(outputs=tuple(outputs)), tuple(map(outputs.index, program.outputs))


@functools.cache
def source_hash() -> str:
    """Changes with JAX and with every line of this package."""
    total = hashlib.sha256(jax.__version__.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
