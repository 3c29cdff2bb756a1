"""A case's op as programs for each direction, how it runs, and what it moves and computes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.bench.case import Case
from pallas_kernels.bench.operands import array, floating, structs, writes


def public(case: Case, **options) -> Callable:
    """The public op as a function of the case's arrays, in their order."""
    op = getattr(pallas_kernels, case.op)
    options = {**case.options, **options}
    if case.forward_only:  # and so with zeros as gradients, for an op that has none
        return lambda *inputs: op(**case.arguments(jax.lax.stop_gradient(inputs)), **options)
    return lambda *inputs: op(**case.arguments(inputs), **options)


def on_xla(case: Case, **options) -> Callable:
    return public(case, **options, implementation="xla")


def pull(op: Callable, *inputs):
    """The outputs and the function from their cotangents to the gradients of floating inputs."""
    places = [i for i, a in enumerate(inputs) if jnp.issubdtype(a.dtype, jnp.floating)]

    def of(*some):
        full = list(inputs)
        for i, a in zip(places, some, strict=True):
            full[i] = a
        return op(*full)

    return jax.vjp(of, *(inputs[i] for i in places))


def both(op: Callable, dy, *inputs):
    """The outputs and the gradients."""
    y, back = pull(op, *inputs)
    return y, back(dy)


def compile_op(case: Case, op: Callable, inputs, keep: bool) -> dict[str, jax.stages.Compiled]:
    """Compiles a program for each direction; with keep, backward gets what "saved" returns."""
    # Without it XLA does not find the matmuls of fp8 (float8/linear.py).
    options = {"xla_gpu_enable_triton_gemm": False} if case.gpu == "sm_89" else None
    compiled = lambda f, *args: jax.jit(f).lower(*args).compile(options)
    dy = jax.eval_shape(op, *inputs)

    def written(gradients):  # without shared gradients, which XLA would copy
        named = zip(floating(case), gradients, strict=True)
        return [g for name, g in named if name in writes(case)]

    programs = {"forward": compiled(op, *inputs)}
    if case.forward_only:
        return programs
    if case.flops:
        programs["forward+backward"] = compiled(functools.partial(both, op), dy, *inputs)
    elif keep:
        saved = jax.jit(lambda *a: pull(op, *a)[1]).trace(*inputs)
        programs["saved"] = saved.lower().compile()
        programs["backward"] = compiled(lambda saved, dy: written(saved(dy)), saved.out_info, dy)
    else:
        programs["backward"] = compiled(lambda *a: written(both(op, *a)[1]), dy, *inputs)
    return programs


def decided(case: Case, sizes: dict[str, int]) -> dispatch.Decision:
    """The decision about how the op runs on this device."""
    dispatch.reset()
    jax.eval_shape(public(case), *structs(case, sizes))
    return next(d for d in dispatch.decisions() if d.op == case.op)


def has_kernel(case: Case, sizes: dict[str, int]) -> bool:
    """Whether a kernel of ours runs on this GPU, even if something else does by default."""
    if dispatch.device_lacks("sm_80"):
        return False
    with dispatch.rehearsal():
        try:
            jax.eval_shape(public(case, implementation="mosaic"), *structs(case, sizes))
        except NotImplementedError:
            return False
    return True


def bytes_moved(case: Case, sizes: dict[str, int]) -> dict[str, int]:
    """The bytes that each direction must move: each input and each output once."""
    inputs = dict(zip(case.arrays, structs(case, sizes), strict=True))
    size = {name: a.size * a.dtype.itemsize for name, a in inputs.items()}
    y = jax.eval_shape(on_xla(case), *inputs.values())
    outputs = sum(o.size * o.dtype.itemsize for o in jax.tree.leaves(y))
    read = dict(size)
    if case.op == "encoder":  # reads only the table's rows that occur
        tokens, table, *_ = case.arrays
        rows = inputs[tokens].size  # at most
        if not case.pack:
            rows = np.unique(np.asarray(array(case.arrays[tokens], sizes, 0))).size
        read[table] = size[table] // inputs[table].shape[0] * min(rows, inputs[table].shape[0])
    backward = sum(size[n] for n in case.reads) + outputs + sum(size[n] for n in writes(case))
    forward = sum(read.values()) + outputs
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}


def counted_flops(case: Case, sizes: dict[str, int]) -> dict[str, float | None]:
    """Operations by direction: the case's own count, or XLA's of the jnp form."""
    if case.flops:
        forward = case.flops(sizes)
        return {"forward": forward, "forward+backward": (1 + case.backward) * forward}
    inputs, op = structs(case, sizes), on_xla(case)
    dy = jax.eval_shape(op, *inputs)
    try:
        with jax.default_device("cpu"):  # XLA does not count operations for a GPU
            lowered = {
                "forward": jax.jit(op).lower(*inputs),
                "backward": jax.jit(lambda *a: both(op, *a)[1]).lower(dy, *inputs),
            }
    except RuntimeError:  # JAX_PLATFORMS=cuda has no CPU, so the op is not in the plot
        return {"forward": None, "backward": None}
    return {name: (low.cost_analysis() or {}).get("flops") for name, low in lowered.items()}
