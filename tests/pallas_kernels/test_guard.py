"""What a traced call of a kernel cannot do ends in one line that names the op and the way out."""

import jax
import jax.numpy as jnp
import kernel_checks
import pytest
import small_calls
from cases import slow
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels import dispatch, rms_norm

P = PartitionSpec
X, W = jnp.ones((16, 256)), jnp.ones(256)


def norm(x, implementation="mosaic"):
    return rms_norm(x, W, implementation=implementation)


def loss(x):
    return norm(x).sum()


def of_a_cotangent(c):
    """A gradient whose derivative by c passes through the backward kernel alone."""
    return jax.grad(lambda x: (norm(x) * c).sum())(X).sum()


@jax.custom_vjp
def only_backward(x):
    """The kernel is in its backward pass."""
    return x


only_backward.defvjp(lambda x: (x, x), lambda x, dy: (norm(x) * dy,))

CALLS = {
    "call": norm,
    "grad": jax.grad(loss),
    "vmap": lambda x: jax.vmap(norm)(x[None]),
    "remat": jax.grad(jax.checkpoint(loss)),
    "scan": lambda x: jax.lax.scan(lambda x, _: (norm(x), None), x, None, length=2),
    "backward of the user's": jax.grad(lambda x: only_backward(x).sum()),
    "grad of a jitted": jax.grad(jax.jit(loss)),
}
DERIVATIVES = {
    "jvp": lambda jit: lambda x: jax.jvp(jit(norm), (x,), (x,)),
    "jacfwd": lambda jit: jax.jacfwd(jit(norm)),
    "hessian": lambda jit: jax.hessian(jit(loss)),
    "grad of grad": lambda jit: jax.grad(lambda x: jax.grad(jit(loss))(x).sum()),
    "cotangent": lambda jit: lambda x: jax.grad(of_a_cotangent)(x[0, 0]),
}


def lowered(f, *arrays) -> str:
    return jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.quick
@pytest.mark.skipif(kernel_checks.ON_GPU, reason="about a process without a GPU")
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_kernel_on_a_cpu_is_refused_in_our_words(call, jit):
    with pytest.raises(NotImplementedError) as refusal:
        jit(call)(X)
    line = str(refusal.value).splitlines()[0]
    assert line.startswith("rms_norm: its kernel needs an NVIDIA GPU")
    assert 'pass implementation=None or "xla"' in line
    assert "rms_norm" in lowered(call, X)  # for a GPU it is no error


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="about a process without a GPU")
def test_an_interpreted_or_rehearsed_kernel_is_not_refused():
    with dispatch.rehearsal():
        jax.jit(norm).trace(X)
    with kernel_checks.kernels_run_here():
        jax.jit(jax.grad(loss))(X)
        jax.grad(loss)(X)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_derivative_that_no_kernel_computes_is_refused_in_our_words(derivative, jit):
    said = r'rms_norm\w*: its kernels compute no jvp and no second .* pass implementation="xla"'
    for outer in (jax.jit, lambda f: f):
        with pytest.raises(NotImplementedError, match=said):
            lowered(outer(derivative(jit)), X)


REVERSE_ONLY = "attention fp8_linear mlp_fp8 quantized_linear vlstm".split()


OFTEN = "rms_norm", "mlp", "quantized_linear", "vlstm"  # the others take longest


@pytest.mark.parametrize(
    "name",
    [*OFTEN, *(slow(x) for x in ("linear_cross_entropy", *REVERSE_ONLY) if x not in OFTEN)],
)
def test_xla_has_a_hessian_and_mostly_a_jvp(name):
    op, shapes, integers, *dtype = small_calls.CASES[name]
    arrays = [kernel_checks.normal(i, s[1:], *dtype) for i, s in enumerate(shapes)]
    given = [x[0] for x in integers]
    f = lambda *x: op(*x, *given, implementation="xla").astype(jnp.float32).sum()
    first = lambda x: jax.grad(f)(x, *arrays[1:]).astype(jnp.float32).sum()
    assert jnp.isfinite(jax.grad(first)(arrays[0])).all()
    assert jnp.isfinite(jax.jvp(first, arrays[:1], arrays[:1])[1])  # as jax.hessian
    if name in REVERSE_ONLY:
        with pytest.raises(TypeError, match="forward-mode autodiff"):
            jax.jvp(f, arrays, arrays)
    else:
        assert jnp.isfinite(jax.jvp(f, arrays, arrays)[1])


def sharded(*axes: str, type=AxisType.Auto) -> tuple[AbstractMesh, jax.ShapeDtypeStruct]:
    """A mesh of two devices along each axis, and X divided along the first one."""
    mesh = AbstractMesh((2,) * len(axes), axes, axis_types=(type,) * len(axes))
    return mesh, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P(axes[0])))


def each(f, mesh, **options):
    specs = dict(in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return jax.shard_map(f, mesh=mesh, **specs, **options)


@pytest.mark.parametrize("call", [norm, jax.grad(loss)], ids=["call", "grad"])
def test_a_kernel_over_several_devices_names_shard_map(call, caplog):
    mesh, x = sharded("data")
    with pytest.raises(NotImplementedError, match="rms_norm: .* of 2 devices; call it inside"):
        lowered(call, x)
    assert "rms_norm" in lowered(each(call, mesh), x)
    mesh, x = sharded("data", "tensor")
    with pytest.raises(NotImplementedError, match="rms_norm: .* of 2 devices; call it inside"):
        lowered(each(call, mesh, axis_names={"data"}), x)
    assert "rms_norm" in lowered(each(call, mesh), x)
    with dispatch.rehearsal():  # nobody asked for the kernel: slow, but right
        assert "rms_norm" in lowered(lambda x: norm(x, None), x)
    (record,) = (r for r in caplog.records if "4 devices" in r.getMessage())
    assert "call it inside jax.shard_map" in record.getMessage()


def test_an_array_sharded_by_its_type_names_shard_map(caplog):
    mesh, x = sharded("data", type=AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(NotImplementedError, match=r"rms_norm has no .* jax.shard_map\(\.\.\."):
            jax.eval_shape(norm, x)
        with dispatch.rehearsal():
            jax.eval_shape(lambda x: norm(x, None), x)
            assert dispatch.decisions()[-1].runs == "xla"
