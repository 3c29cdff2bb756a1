"""Says in one line, with the name of the op, why a traced call of a kernel cannot run.

Only after an op has returned does JAX know whether it runs on a CPU, over several devices or under
a second derivative, and JAX's errors then name neither the op nor a way out.  So the arrays of a
kernel pass through a primitive that does nothing, but raises in these three cases.
"""

import logging
import math

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_NO_GPU = (
    "its kernel needs an NVIDIA GPU, and this call runs on the CPU; pass implementation=None or"
    ' "xla" (jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)) lowers the kernel here)'
)
_NO_DERIVATIVE = (
    "its kernels compute no jvp and no second gradient (jvp, jacfwd, hessian, grad of grad), and"
    ' kernels of generation no gradient; pass implementation="xla" (there attention, vlstm,'
    " quantized_linear and fp8 have a hessian, but no jvp or jacfwd either)"
)
_SHARDED = (
    "its kernel would get whole arrays on each of {} devices; call it inside"
    " jax.shard_map(..., check_vma=False)"
)


def sharded(arrays) -> str | None:
    """Why kernels cannot take these arrays outside `shard_map`, as far as known, or None."""
    leaves = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    for x in leaves:
        of = jax.typeof(x).sharding
        by_type = any(axis is not None for axis in of.spec)
        devices = of.mesh.size if by_type else 1 if traced else x.sharding.num_devices
        if devices > 1:
            return _SHARDED.format(devices)
    return None


def guarded(op: str, arrays, *, asked: bool | None = None, interpreted=True, differentiable=False):
    """`arrays`, a tree, tied to the checks of `op` (or of one kernel, which has no derivative).

    asked: raise, not warn, if several devices run the whole call; None: do neither.
    interpreted: the kernel runs on the CPU, too.
    """
    leaves, tree = jax.tree.flatten(arrays)
    # References, which kernels change in place, are not values.
    of = [isinstance(x, jax.Array) and not hasattr(jax.typeof(x), "inner_aval") for x in leaves]
    if values := [x for x, is_value in zip(leaves, of, strict=True) if is_value]:
        how = dict(op=op, asked=asked, interpreted=interpreted, differentiable=differentiable)
        tied = iter(_values_p.bind(*values, **how))
        leaves = [next(tied) if is_value else x for x, is_value in zip(leaves, of, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def _same(*arrays, **how):
    return list(arrays)


def _run(*arrays, op, interpreted, **how):
    if not interpreted and jax.default_backend() == "cpu":
        raise NotImplementedError(f"{op}: {_NO_GPU}")
    return arrays


def _lower(context, *arrays, op, asked, interpreted, differentiable):
    module = context.module_context
    if not interpreted and "cpu" in (context.platforms or module.platforms):
        raise NotImplementedError(f"{op}: {_NO_GPU}")
    devices = getattr(module.axis_context, "num_devices", 1)
    if mesh := getattr(module.axis_context, "mesh", None):  # of a shard_map
        manual = module.axis_context.manual_axes
        devices = math.prod(n for axis, n in mesh.shape.items() if axis not in manual)
    if devices > 1 and asked is not None:
        why = f"{op}: {_SHARDED.format(devices)}"
        if asked:
            raise NotImplementedError(why)
        logging.getLogger("pallas_kernels").warning(why)
    return arrays


def _jvp(primals, tangents, *, op, differentiable, **how):
    if not differentiable:
        raise NotImplementedError(f"{op}: {_NO_DERIVATIVE}")
    tied = iter(_tangents_p.bind(*(t for t in tangents if not isinstance(t, ad.Zero)), op=op))
    tangents = [t if isinstance(t, ad.Zero) else next(tied) for t in tangents]
    return _values_p.bind(*primals, op=op, differentiable=False, **how), tangents


def _forward_mode(*_, op, **how):  # reverse mode transposes the tangents and computes none
    raise NotImplementedError(f"{op}: {_NO_DERIVATIVE}")


_values_p, _tangents_p = Primitive("kernel_guard"), Primitive("kernel_guard_tangents")
_values_p.multiple_results = _tangents_p.multiple_results = True
_values_p.def_abstract_eval(_same)
_values_p.def_impl(_run)
mlir.register_lowering(_values_p, _lower)
batching.primitive_batchers[_values_p] = lambda xs, axes, **how: (_values_p.bind(*xs, **how), axes)
ad.primitive_jvps[_values_p] = _jvp
_tangents_p.def_abstract_eval(_same)
_tangents_p.def_impl(_forward_mode)
mlir.register_lowering(_tangents_p, _forward_mode)
batching.primitive_batchers[_tangents_p] = ad.primitive_jvps[_tangents_p] = _forward_mode
ad.primitive_transposes[_tangents_p] = lambda cotangents, *_, op: cotangents
