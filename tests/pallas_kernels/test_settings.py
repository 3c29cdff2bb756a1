"""Every op and its gradients under JAX's stricter settings: the XLA form and the kernels."""

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from kernel_checks import normal
from small_calls import CASES

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
CASES_OF_SETTINGS = [slow((name,)) if name == "jax_disable_jit" else (name,) for name in SETTINGS]


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
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_lower(settings, name):
    run, arguments = with_gradients(name, "mosaic")
    jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
