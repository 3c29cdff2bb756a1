"""What PyTorch does between the kernels: every step of a program has a form, which equals JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch_plans import make_anew  # noqa: E402

import pallas_kernels as jk  # noqa: E402
from pallas_kernels.torch import plan, program, run, trace  # noqa: E402


def of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


# The vLSTM splits few long sequences into spans, and joins the spans' states.  Ids that int32 does
# not hold are ranked; fp8 codes lie four to a word.
LONG, GATE = [of(4, 2048, 8, width) for width in (64, 64, 128)], of(4, 2048, 8, dtype="float32")
CALLS = {
    "long": (jk.vlstm, [*LONG, GATE, GATE], {"reduce_prod", "dot_general"}),
    "attention": (
        lambda q, ids, **o: jk.attention(q, q, q, segment_ids=ids, **o),
        [of(2, 70, 2, 64), of(2, 70, dtype="uint32")],
        {"cumsum"},
    ),
    "vlstm": (
        lambda q, i, ids, **o: jk.vlstm(q, q, q, i, i, segment_ids=ids, **o),
        [of(1, 70, 2, 64), of(1, 70, 2, dtype="float32"), of(1, 70, dtype="uint32")],
        {"cumsum"},
    ),
    "mlp": (
        lambda x, w, **o: jk.mlp(x, w, w, gate=w, precision="fp8", **o),
        [of(64, 64)] * 2,
        {"bitcast_convert_type"},
    ),
    "linear_cross_entropy": (
        functools.partial(jk.linear_cross_entropy, fp8=True),
        [of(64, 64), of(128, 64), of(64, dtype="int32")],
        {"bitcast_convert_type"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_step_has_a_form(name, monkeypatch):
    make_anew(monkeypatch)
    op, arrays, some = CALLS[name]
    wrt = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
    passes = trace.trace(functools.partial(op, implementation="mosaic"), arrays, wrt).passes
    steps = [unit.what for x in passes for unit in plan.plan(x).units]
    names = {step.primitive for step in steps if isinstance(step, program.ProgramStep)}
    assert names & some
    assert names <= set(run._OPERATORS)


def test_a_long_chain_of_steps_is_cut(monkeypatch):
    """Such as the sums of dW of 250 chunks: it left Python's recursion limit."""
    make_anew(monkeypatch)
    chain = lambda x: functools.reduce(lambda y, n: jnp.tanh(y) + n, range(500), x)
    (one,) = trace.trace(chain, [of(4, dtype="float32")]).passes
    assert len(plan.plan(one).units) == 10


def test_products_of_batches_and_over_axes():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 5, 2), (2, 5, 3, 6)))
    numbers = (((2,), (1,)), ((0, 3), (2, 0)))
    want = jax.lax.dot_general(x, y, numbers, precision="highest")
    got = run._dot_general(
        torch.from_numpy(x), torch.from_numpy(y), out=torch.float32, sums=numbers[0],
        batch=numbers[1],
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    back = run._OPERATORS["cumsum"](torch.from_numpy(x), axis=1, reverse=True)
    np.testing.assert_allclose(back, jax.lax.cumsum(x, 1, reverse=True), rtol=1e-5)
    product = run._OPERATORS["reduce_prod"](torch.from_numpy(x), axes=(1, 3))
    np.testing.assert_allclose(product, x.prod((1, 3)), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "bool"])
def test_a_stable_sort_by_two_keys(dtype):
    rng = np.random.default_rng(0)
    first, second = (rng.integers(-2, 3, (3, 40, 2)).astype(dtype) for _ in range(2))
    place = np.arange(240, dtype=np.int32).reshape(first.shape)
    arrays = first, second, place
    want = jax.lax.sort(arrays, dimension=1, num_keys=2)
    got = run._sort(*map(torch.from_numpy, arrays), dimension=1, num_keys=2)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g.numpy(), w, strict=True)
