"""Every op and its gradients for two members at a time: `jax.vmap` and `jax.lax.map` (a loop).

In a loop XLA joins a kernel with the slices that it reads and writes, which a kernel that writes in
place must not be: natively it once left zeros.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_interpreted
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_checks import NO_KERNEL, ON_GPU, ON_XLA, kernels_run_here, normal
from small_calls import CASES

import pallas_kernels as ops

# Where kernels are interpreted, the loop of any other op repeats what its other tests show;
# packed attention has the kernels of attention.
IN_PLACE = {"cross_entropy", "linear_cross_entropy", "attention_packed"}
IN_PLACE |= {"decode_attention_new", "vlstm_packed", "vlstm_gated"}
# Their kernels are those of vlstm_gated, attention_packed and mlp.  rms_norm_residual has a
# residual, vlstm_gated the norm with a gate, and fp8_linear the casts to fp8.
ALIKE = {"vlstm_packed", "attention", "mlp_gelu", "mlp_fp8"}
ALIKE |= {"layer_norm_residual", "layer_norm_gate", "swiglu"}
IN_LOOPS = [name for name in CASES if ON_GPU or name in IN_PLACE]


def test_every_op_is_here():
    variants = {"attention_packed", "decode_attention_new"}
    variants |= {"layer_norm_residual", "layer_norm_gate", "rms_norm_residual"}
    variants |= {"mlp_gelu", "mlp_fp8", "vlstm_packed", "vlstm_gated"}
    assert set(CASES) - variants == set(ops.__all__) - NO_KERNEL - ON_XLA


def results(name, implementation, loop):
    """The outputs and gradients of both members."""
    op, shapes, whole, *dtype = CASES[name]
    arrays = [normal(i, shape, *dtype) for i, shape in enumerate(shapes)]

    def of_one(members):
        arrays, whole = members
        y, pull = jax.vjp(lambda *a: op(*a, *whole, implementation=implementation), *arrays)
        waves = lambda y: jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
        return y, pull(jax.tree.map(waves, y))

    run = functools.partial(jax.lax.map, of_one) if loop else jax.vmap(of_one)
    with jax.default_matmul_precision("float32"):  # XLA's default on a GPU is TF32
        found = jax.jit(run)((arrays, list(map(jnp.asarray, whole))))
        return list(map(np.asarray, jax.tree.leaves(found)))


expected_of = functools.cache(functools.partial(results, implementation="xla", loop=False))


@pytest.mark.parametrize(
    ("name", "loop"),
    [slow_interpreted(name, False) if name in ALIKE else (name, False) for name in CASES]
    + [slow(name, True) for name in IN_LOOPS],
    ids=[f"{name}-vmap" for name in CASES] + [f"{name}-map" for name in IN_LOOPS],
)
def test_of_two_members(name, loop):
    if name == "vlstm" and not ON_GPU:
        pytest.skip("the interpreter takes a minute for it")
    expected = expected_of(name)
    with kernels_run_here():
        actual = results(name, "mosaic", loop)
    tolerance = 3e-2 if CASES[name][3:] else 1e-5
    if name == "mlp_fp8" and ON_GPU:  # sums in another order move an element of h by a step of e4m3
        tolerance = 6e-2
    for a, e in zip(actual, expected, strict=True):
        a, e = (np.asarray(x, np.float32) for x in (a, e))
        assert a.shape == e.shape
        assert np.sqrt(np.mean((a - e) ** 2)) <= tolerance * (0.1 + np.sqrt(np.mean(e**2)))


ONE = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", CASES)
def test_in_a_shard_map_that_checks_varying_types(name):
    """JAX's default, for which kernels make room for XLA: a carry of the vLSTM had another type."""
    op, shapes, whole, *dtype = CASES[name]
    arrays = [jax.ShapeDtypeStruct(shape, *(dtype or [jnp.float32])) for shape in shapes]

    def of_a_member(arrays, whole):
        call = lambda *a: op(*a, *(x[0] for x in whole), implementation="xla")
        y, pull = jax.vjp(call, *(x[0] for x in arrays))
        return jax.tree.map(lambda x: x[None], (y, pull(y)))

    run = jax.shard_map(of_a_member, mesh=ONE, in_specs=P("d"), out_specs=P("d"))
    jax.eval_shape(run, arrays, list(map(jnp.asarray, whole)))


@pytest.mark.parametrize("name", ["attention", "fp8_linear", "mlp_fp8", "vlstm", "vlstm_gated"])
def test_replicated_weights_in_a_shard_map_that_checks_varying_types(name):
    """JAX's own error said that a rule of custom_vjp returned another type than its argument's."""
    op, (first, *others), _, dtype = CASES[name]
    of_all = [jax.ShapeDtypeStruct(shape[1:], dtype) for shape in others]

    def run(x, *of_all):
        y, pull = jax.vjp(lambda *a: op(*a, implementation="xla"), x[0], *of_all)
        dx, *gradients = pull(y)
        return dx[None], *gradients

    specs = P("d"), *[P()] * len(of_all)
    run = jax.shard_map(run, mesh=ONE, in_specs=specs, out_specs=specs)
    gradients = jax.eval_shape(run, jax.ShapeDtypeStruct((1, *first[1:]), dtype), *of_all)
    assert [x.shape for x in gradients[1:]] == [x.shape for x in of_all]


@pytest.mark.parametrize("name", ["fp8_linear", "mlp_fp8"])
def test_fp8_in_a_shard_map_that_splits_arrays_over_some_of_its_axes(name):
    """JAX found no maximum over an axis along which all devices have the same."""
    op, shapes, _, dtype = CASES[name]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    mesh = AbstractMesh((2, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    run = lambda *arrays: jax.vjp(lambda *a: op(*a, implementation="xla"), *arrays)[1](arrays[0])
    of_members = lambda *all: jax.tree.map(lambda x: x[None], run(*(x[0] for x in all)))
    of_all = jax.shard_map(of_members, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert [x.shape for x in jax.eval_shape(of_all, *arrays)] == [x.shape for x in arrays]


def test_a_total_in_a_shard_map_that_checks_varying_types():
    """The gradient is total + dW, of which only dW is summed over the devices."""
    x, w, total = (normal(i, (64, 64)) for i in range(3))

    def run(x, w, total):
        _, pull = jax.vjp(lambda t: ops.fp8_linear(x, w, total=t), total)
        return pull(jnp.ones_like(x))

    run = jax.shard_map(run, mesh=ONE, in_specs=(P("d"), P(), P()), out_specs=P())
    (call,) = jax.make_jaxpr(run)(x, w, total).eqns
    assert call.params["jaxpr"].eqns[-1].primitive.name == "add"  # after the sum over the devices


def quantized(x, **options):
    return ops.quantized_linear(x, ops.quantize(normal(9, (64, 32)), group=64), **options)


HEADS, GATES = (4, 16, 2, 16), (4, 16, 2)
EXPLICIT = {  # op(*arrays, implementation=), shapes of arrays split by batch, of whole ones, of ids
    "norm": (ops.layer_norm, [(4, 16, 64)], [(64,), (64,)], []),
    "mlp": (ops.mlp, [(4, 16, 64)], [(64, 32), (32, 64)], []),
    "fp8_linear": (ops.fp8_linear, [(4, 16, 64)], [(64, 32), (32,)], []),
    "quantized_linear": (quantized, [(4, 16, 64)], [], []),
    "rope": (lambda q, ids, **o: ops.rope(q, q, ids, **o), [HEADS], [], [(4, 16)]),
    "loss": (ops.linear_cross_entropy, [(4, 16, 64)], [(50, 64)], [(4, 16)]),
    "encoder": (
        lambda wte, wpe, ids, **o: ops.encoder(ids, wte, wpe, **o),
        [],
        [(50, 64), (16, 64)],
        [(4, 16)],
    ),
    "attention": (
        lambda q, ids, **o: ops.attention(q, q, q, segment_ids=ids.astype("uint32"), **o),
        [HEADS],
        [],
        [(4, 16)],
    ),
    "decode_attention": (  # without a gradient
        lambda q, new, ids, **o: ops.decode_attention(
            *jax.lax.stop_gradient((new, q, q)), ids, new=(new, new), theta=1e4, **o
        )[0],
        [HEADS, (4, 1, 2, 16)],
        [],
        [(4,)],
    ),
    "vlstm": (lambda q, i, **o: ops.vlstm(q, q, q, i, i, **o), [HEADS, GATES], [], []),
}


WHOLE = {"attention", "decode_attention", "vlstm"}  # ops that need whole sequences
SPLIT = [(name, "batch", in_mesh) for name in EXPLICIT for in_mesh in (False, True)]
SPLIT += [(name, "time", False) for name in EXPLICIT if name not in WHOLE]


@pytest.mark.parametrize(("name", "axis", "in_mesh"), SPLIT)
def test_on_a_mesh_with_explicit_axes(name, axis, in_mesh):
    """JAX's default mesh, where it refuses a gather or a matmul that could lie in several ways, and
    a reshape that joins an axis that is split with the one before.
    """
    op, split, whole, ids = EXPLICIT[name]
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    of = lambda dtype, *spec: (
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    )
    spec = ("d",) if axis == "batch" else (None, "d")
    floats = [*map(of(jnp.float32, *spec), split), *map(of(jnp.float32), whole)]
    ids = list(map(of(jnp.int32, *spec), ids))

    def run(floats, ids):
        y, pull = jax.vjp(lambda *a: op(*a, *ids, implementation="xla"), *floats)
        return pull(y)

    with jax.sharding.use_abstract_mesh(mesh) if in_mesh else contextlib.nullcontext():
        gradients = jax.eval_shape(run, floats, ids)
    places = [x.sharding.spec.index("d") if "d" in x.sharding.spec else None for x in gradients]
    assert places == [len(spec) - 1] * len(split) + [None] * len(whole)


@pytest.mark.parametrize("spec", [("d", None), (None, "d")])
@pytest.mark.parametrize("options", [{}, dict(bits=2, group=32), dict(format="2:4")], ids=str)
def test_a_weight_on_a_mesh_with_explicit_axes_is_packed(options, spec):
    """JAX refused a reshape, or found no axis d in a mesh without axes."""
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    w = jax.ShapeDtypeStruct((256, 64), "float32", sharding=NamedSharding(mesh, P(*spec)))
    weight = jax.eval_shape(functools.partial(ops.quantize, **options), w)
    assert not any(a.sharding.spec[0] for a in jax.tree.leaves(weight))
