"""Turns one of our ops into a program: kernels, and the steps between them.

A program is a list of steps over numbered arrays.  A step is either a Mosaic kernel or one
primitive of the jaxpr.  Only this file imports JAX, and a call that is known on disk does not
import this file.  Nothing here touches a GPU or imports PyTorch: JAX traces shapes, and lowers each
kernel for CUDA.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax._src import xla_bridge
from jax._src.lib.mlir import passmanager
from jax._src.state.discharge import discharge_state
from jax.extend import core

from pallas_kernels.torch.program import Array, Entry, Kernel, Program, ProgramStep

# Tracing needs no device.  Left alone, JAX would start on the GPU and take most of its memory.
if not xla_bridge.backends_are_initialized():
    jax.config.update("jax_platforms", "cpu")

# What wraps an inner jaxpr without changing its meaning, and the parameter that holds it.
_CALLS = dict.fromkeys(("jit", "remat2", "checkpoint"), "jaxpr") | {"custom_vmap_call": "call"}
_CALLS |= dict.fromkeys(("closed_call", "custom_vjp_call", "custom_jvp_call"), "call_jaxpr")
_SAME = set("copy copy_p kernel_guard name optimization_barrier stop_gradient".split())
_VIEWS = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim"}


class _Walk(Program):
    """Collects the steps of a jaxpr."""

    def constant(self, x) -> int:
        self.constants[len(self.arrays)] = np.asarray(x)
        return self.new(_array(x))

    def walk(self, jaxpr, args: Sequence[int]) -> list[int]:
        """The numbers of the jaxpr's results, given the numbers of its arguments."""
        args = (*map(self.constant, getattr(jaxpr, "consts", ())), *args)
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        numbers = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def number(v) -> int:
            if isinstance(v, core.Literal):
                return self.constant(np.asarray(v.val, _array(v.aval).dtype))
            return numbers[v]

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, tuple(map(number, eqn.invars)))
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return list(map(number, jaxpr.outvars))

    def equation(self, eqn, ins: tuple[int, ...]) -> Sequence[int]:
        name = eqn.primitive.name
        if name in _CALLS:
            return self.walk(eqn.params[_CALLS[name]], ins)
        if name == "run_state":
            return self.walk(discharge_state(core.ClosedJaxpr(eqn.params["jaxpr"], ())), ins)
        if name == "optimization_barrier":
            self.step(ProgramStep(name, {}, ins, ()))
            return ins
        if name in _SAME or name.startswith("reduce_") and not eqn.params.get("axes", True):
            return ins
        out = _array(eqn.outvars[0].aval)
        wider = name == "broadcast_in_dim" and eqn.invars[0].aval.size < math.prod(out.shape)
        if name in _VIEWS and not wider:
            return [self.new(out, self.roots[ins[0]])]
        outs = tuple(self.new(_array(v.aval)) for v in eqn.outvars)
        if name == "mpmd_map":
            return self.step(ProgramStep("kernel", {"of": eqn}, ins, outs))
        return self.step(self.turned(ProgramStep(name, _plain(eqn), ins, outs)))

    def turned(self, step: ProgramStep) -> ProgramStep:
        """Products read transposed operands in place; swapped operands transpose a product."""
        before = [self.made.get(i, step) for i in step.ins]
        if any("batch" in x.params for x in (step, *before)):
            return step
        if step.primitive == "transpose" and before[0].primitive == "dot_general":
            (left, right), ins = before[0].params["sums"], before[0].ins
            free = len(self.arrays[ins[0]].shape) - len(left)  # left axes of the result
            order = tuple(step.params["permutation"])
            if order == (*range(free, len(order)), *range(free)):
                return ProgramStep("dot_general", {"sums": (right, left)}, ins[::-1], step.outs)
        if step.primitive == "dot_general":
            ins, sums = list(step.ins), list(step.params["sums"])
            for n, x in enumerate(before):
                order = x.params.get("permutation", ())
                free = [axis for i, axis in enumerate(order) if i not in sums[n]]
                if order and free == sorted(free):
                    ins[n], sums[n] = x.ins[0], tuple(order[i] for i in sums[n])
            return ProgramStep("dot_general", {"sums": tuple(sums)}, tuple(ins), step.outs)
        return step


def build(jaxpr) -> Program:
    """The program of a jaxpr; its kernels are still equations, which `kernel` lowers."""
    w = _Walk([_array(v.aval) for v in jaxpr.jaxpr.invars])
    w.outputs = w.walk(discharge_state(jaxpr), w.inputs)  # without references
    used, steps = {w.roots[i] for i in w.outputs}, []
    for step in reversed(w.steps):  # without what nobody reads
        if step.primitive == "optimization_barrier":
            steps.append(step._replace(ins=tuple(i for i in step.ins if w.roots[i] in used)))
        elif not used.isdisjoint(step.outs):
            used.update(w.roots[i] for i in step.ins)
            steps.append(step)
    w.steps = steps[::-1]
    return w


def _array(aval) -> Array:
    return Array(tuple(map(int, aval.shape)), np.dtype(aval.dtype).name)


def _plain(eqn) -> dict[str, Any]:
    """The parameters of an equation that say what it computes, as plain values."""
    params = eqn.params
    if eqn.primitive.name == "dot_general":
        sums, batch = (tuple(map(tuple, pair)) for pair in params["dimension_numbers"])
        return {"sums": sums} | ({"batch": batch} if batch[0] else {})
    if eqn.primitive.name == "scatter":
        return {}
    drop = ("sharding", "accuracy", "mode", "out_sharding", "new_dtype", "dtype")
    return {k: v for k, v in params.items() if k not in drop}


def call_of(eqn, **override) -> Callable:
    """The equation of a kernel as a function of arrays."""
    return lambda *args: eqn.primitive.bind(*args, **eqn.params | override)


def kernel(eqn) -> Kernel:
    """Lowers the equation of one kernel for CUDA, as JAX does for its own custom call."""
    structs = [jax.ShapeDtypeStruct(*_array(v.aval)) for v in eqn.invars]
    traced = jax.jit(call_of(eqn), keep_unused=True).trace(*structs)
    module: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        mgpu.dialect.register_inliner_extensions(module.context)
        inline = passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})")
        inline.run(module.operation)
        (main,) = (f for f in module.body.operations if f.attributes["sym_name"].value == "main")
        arguments, (launch, *end) = main.body.blocks[0].arguments, main.body.blocks[0].operations
        plain = list(launch.operands) == list(arguments) and len(end) == 1
        if not plain or list(end[0].operands) != list(launch.results):
            raise NotImplementedError(f"{eqn.params['name']} needs more than one kernel: {main}")
        code = launch.attributes["mhlo.backend_config"]["module"].value_bytes
        return Kernel(str(eqn.params["name"]), code)


def trace(op: Callable, structs: Sequence[jax.ShapeDtypeStruct], wrt: Sequence[int] = ()) -> Entry:
    """The program of op(*structs), and of its backward pass for the arrays `wrt`."""

    def forward(*arrays):
        def part(*chosen):
            return op(*(dict(enumerate(arrays)) | dict(zip(wrt, chosen, strict=True))).values())

        return jax.vjp(part, *(arrays[i] for i in wrt)) if wrt else (op(*arrays), ())

    jaxpr, (out, vjp) = jax.make_jaxpr(forward, return_shape=True)(*structs)
    leaves, tree = jax.tree.flatten(out)
    program, n = build(jaxpr), len(leaves)
    # Residuals that are inputs, or outputs already, are no further outputs.
    roots, residuals, program.outputs = program.roots, program.outputs[n:], program.outputs[:n]
    known = [roots[i] for i in (*program.inputs, *program.outputs)]
    for number in residuals:
        if roots[number] not in known:
            program.outputs.append(number)
            known.append(roots[number])
    what = tree.unflatten([...] * n), n, tuple(known.index(roots[number]) for number in residuals)
    if not wrt:
        return Entry(*what, (), (program,))
    back = build(jax.make_jaxpr(lambda vjp, *given: vjp(tree.unflatten(given)))(vjp, *leaves))
    every, back.outputs = back.outputs, list(dict.fromkeys(back.outputs))
    return Entry(*what, tuple(map(back.outputs.index, every)), (program, back))
