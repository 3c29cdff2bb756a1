"""Every op and its gradients under JAX's stricter settings: the XLA form and the kernels."""

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from kernel_checks import normal
from small_calls import BF16, CASES

import pallas_kernels as ops

SETTINGS = {
    "jax_enable_x64": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_check_tracer_leaks": True,
    "jax_debug_nans": True,
    "jax_disable_jit": True,
}
# The others concern how a program runs.
OF_TRACING = ["jax_enable_x64", "jax_numpy_rank_promotion", "jax_numpy_dtype_promotion"]
# Without jit each operation is compiled by itself, which takes half of the tests' time.
LONG = "jax_disable_jit", "jax_check_tracer_leaks"
CASES_OF_SETTINGS = [slow((name,)) if name in LONG else (name,) for name in SETTINGS]


@pytest.fixture
def settings(request):
    before = {name: getattr(jax.config, name) for name in request.param}
    for name in request.param:
        jax.config.update(name, SETTINGS[name])
    yield
    for name in request.param:
        jax.config.update(name, before[name])


def with_gradients(name, implementation):
    """(function, arguments) of one member of a case."""
    op, shapes, whole, *dtype = CASES[name]
    arrays = [normal(i, shape[1:], *dtype) for i, shape in enumerate(shapes)]
    whole = [jnp.asarray(x[0], jnp.int32) for x in whole]

    def run(arrays, whole):
        y, pull = jax.vjp(lambda *a: op(*a, *whole, implementation=implementation), *arrays)
        return y, pull(jax.tree.map(jnp.ones_like, y))

    return run, (arrays, whole)


@pytest.mark.parametrize("settings", CASES_OF_SETTINGS, ids=SETTINGS, indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_the_xla_form_runs(settings, name):
    run, arguments = with_gradients(name, "xla")
    if jax.config.jax_disable_jit:
        jax.block_until_ready(run(*arguments))
    elif jax.config.jax_debug_nans:
        jax.block_until_ready(jax.jit(run)(*arguments))
    else:  # these act while JAX traces
        results = jax.eval_shape(run, *arguments)
        assert all(x.dtype.itemsize < 8 for x in jax.tree.leaves(results))


@pytest.mark.parametrize("settings", [OF_TRACING], ids=["all"], indirect=True)
@pytest.mark.parametrize("name", [slow(x) if i % 2 else x for i, x in enumerate(CASES)])
def test_the_kernels_lower(settings, name):
    run, arguments = with_gradients(name, "mosaic")
    jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))


FORBIDDEN = {
    "infinities": lambda: jax.debug_infs(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.parametrize("forbidden", FORBIDDEN)
@pytest.mark.parametrize("name", ["attention", "rope", "cross_entropy", "encoder", "vlstm_gated"])
def test_formulas_may_use_infinities_and_constants_without_jit(name, forbidden):
    """JAX stopped at a masked logit, or at a number that is a constant of the formula."""
    op, shapes, whole, *dtype = CASES[name]
    arrays = [normal(i, shape[1:], *dtype) for i, shape in enumerate(shapes)]
    whole = [jnp.asarray(x[0], jnp.int32) for x in whole]
    if name == "rope":
        op, arrays = ops.rope, [*arrays, jnp.arange(9)]
    with FORBIDDEN[forbidden]():
        y, pull = jax.vjp(lambda *a: op(*a, *whole, implementation="xla"), *arrays)
        jax.block_until_ready((y, pull(y) if forbidden == "infinities" and name != "rope" else ()))


# Calls whose gradients promote ranks or dtypes, which no case of small_calls does.
IDS = jnp.arange(64) // 9
F32 = jnp.float32
PROMOTED = {  # op(*arrays, implementation=), the arrays' shapes and dtypes
    "layer_norm": (
        lambda x, w, b, residual, **o: ops.layer_norm(x, w, b, residual=residual, **o),
        [((3, 64), BF16), ((64,), F32), ((64,), F32), ((3, 64), F32)],
    ),
    "mlp": (
        lambda x, up, down, bias, **o: ops.mlp(x, up, down, bias=bias, **o),
        [((128, 64), BF16), ((64, 128), BF16), ((128, 64), BF16), ((128,), F32)],
    ),
    "attention": (
        lambda q, k, **o: ops.attention(q, k, k, segment_ids=IDS[None], return_lse=True, **o),
        [((1, 64, 2, 64), BF16), ((1, 64, 1, 64), BF16)],
    ),
    "linear_cross_entropy": (
        lambda x, w, **o: ops.linear_cross_entropy(x, w, IDS, softcap=30.0, **o),
        [((64, 64), BF16), ((8, 64), F32)],
    ),
    "linear_cross_entropy, fp8": (
        lambda x, w, **o: ops.linear_cross_entropy(x, w, IDS, fp8=True, **o),
        [((64, 64), BF16), ((8, 64), BF16)],
    ),
    "quantized_linear": (
        lambda x, bias, **o: ops.quantized_linear(x, ops.quantize(normal(9, (128, 64))), bias, **o),
        [((3, 128), BF16), ((64,), F32)],
    ),
    "quantized_linear, plain": (
        lambda x, bias, **o: ops.quantized_linear(
            x, ops.quantize(normal(9, (128, 64)), bits=8, group=None).plain(), bias
        ),
        [((3, 128), BF16), ((64,), F32)],
    ),
    "vlstm": (
        lambda q, i, *state, **o: ops.vlstm(
            q, q, q, i, i, segment_ids=IDS[None], initial_state=state, return_state=True, **o
        ),
        [((1, 64, 2, 64), BF16), ((1, 64, 2), F32)]
        + [((1, 2, 64, 64), F32), ((1, 2, 64), F32), ((1, 2), F32)],
    ),
}


@pytest.mark.parametrize("settings", [OF_TRACING[1:]], ids=["all"], indirect=True)
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("name", PROMOTED)
def test_gradients_promote_as_the_op_does(settings, name, implementation):
    op, arrays = PROMOTED[name]
    arrays = [jax.ShapeDtypeStruct(*a) for a in arrays]

    def run(wrap, *arrays):
        y, pull = jax.vjp(wrap(lambda *a: op(*a, implementation=implementation)), *arrays)
        return pull(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), y))

    for wrap in (lambda f: f, jax.jit):  # JAX differentiates what is jitted after the op returned
        gradients = jax.eval_shape(lambda *a, wrap=wrap: run(wrap, *a), *arrays)
        assert [x.dtype for x in gradients] == [x.dtype for x in arrays]


FORMULAS_WITH_NAN = [
    "cross_entropy",
    "linear_cross_entropy",
    "fp8_linear",
    "mlp_fp8",
    "quantized_linear",
]


@pytest.mark.parametrize("name", FORMULAS_WITH_NAN)
def test_only_a_nan_of_the_caller_stops_a_search_for_nan_without_jit(name):
    """JAX stopped at the NaN that a formula had as a constant, for values that are not finite."""
    with jax.debug_nans(True), jax.disable_jit():
        run, arguments = with_gradients(name, "xla")
        jax.block_until_ready(run(*arguments))
        (x, *others), whole = arguments
        with pytest.raises(FloatingPointError, match="nan"):
            run((x.at[(0,) * x.ndim].set(jnp.nan), *others), whole)


@pytest.mark.parametrize("op", [ops.layer_norm, ops.rms_norm])
def test_a_norm_of_no_columns_stops_no_search_for_nan(op):
    """The mean of no numbers is NaN, though no result has it."""
    with jax.debug_nans(True):
        y, pull = jax.vjp(op, jnp.ones((2, 0)), jnp.ones(0))
        assert [x.shape for x in (y, *pull(y))] == [(2, 0), (2, 0), (0,)]
