import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vlstm_twins
from cases import slow
from kernel_checks import assert_error_ratio, normal

from pallas_kernels import dispatch, vlstm, vlstm_step
from pallas_kernels.mlstm import reference

ARRAYS = ("q", "k", "v", "i", "f")


def inputs(batch, length, heads, dqk, dv, dtype=jnp.float32, seed=0, i_scale=2.0, f_offset=2.0):
    shape = (batch, length, heads)
    return (
        normal(seed, (*shape, dqk), dtype),
        normal(seed + 1, (*shape, dqk), dtype),
        normal(seed + 2, (*shape, dv), dtype),
        normal(seed + 3, shape, dtype, scale=i_scale),
        normal(seed + 4, shape, dtype, scale=2.0, offset=f_offset),
    )


def a_state(batch, heads, dqk, dv, dtype=jnp.float32, seed=10):
    shapes = (batch, heads, dqk, dv), (batch, heads, dqk), (batch, heads)
    return tuple(normal(seed + j, shape, dtype) for j, shape in enumerate(shapes))


def with_gradients(form, *args, seed=20, **options):
    """Returns the results of form(*args) and gradients for random cotangents, as numpy leaves."""

    @jax.jit
    def run(*args):
        y, pull = jax.vjp(functools.partial(form, **options), *args)
        leaves, tree = jax.tree.flatten(y)
        cotangents = [normal(seed + j, x.shape, x.dtype) for j, x in enumerate(leaves)]
        return y, pull(jax.tree.unflatten(tree, cotangents))

    return jax.tree.map(np.asarray, run(*args))


@functools.partial(jax.jit, static_argnums=0)
def pull_back(form, args, dh):
    """Returns h = form(*args) and the gradients of sum(h dh)."""
    h, pull = jax.vjp(form, *args)
    return h, *pull(dh)


def assert_equal_to(tolerance, actual, expected):
    """Asserts equality to `tolerance` of the largest value, leaf by leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected)
    for (path, a), e in zip(*leaves, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, (path, a.shape, e.shape)
        error = np.abs(a - e).max() / max(np.abs(e).max(), 1e-30)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.2e} > {tolerance:.0e}"


def numpy_loop(q, k, v, i, f, state, gate, normalize):
    """Computes the cell on its true scale, one head and one number at a time, unstabilised."""
    q, k, v, i, f = (np.asarray(x, np.float64) for x in (q, k, v, i, f))
    h = np.empty(v.shape)
    for b, head in np.ndindex(q.shape[0], q.shape[2]):
        c, n, m = (np.asarray(x[b, head], np.float64) for x in state)
        c, n = c * np.exp(m), n * np.exp(m)
        for t in range(q.shape[1]):
            opened = np.exp(i[b, t, head])
            if gate == "sigmoid":
                opened = 1 / (1 + 1 / opened)
            kept = 1 / (1 + np.exp(-f[b, t, head]))
            c = kept * c + opened * np.outer(k[b, t, head], v[b, t, head])
            n = kept * n + opened * k[b, t, head]
            query = q[b, t, head] / np.sqrt(q.shape[-1])
            h[b, t, head] = query @ c
            if normalize:
                h[b, t, head] /= max(abs(query @ n), 1)
    return h


@pytest.mark.parametrize(
    ("gate", "normalize"), [("exp", True), ("sigmoid", True), ("sigmoid", False)]
)
def test_the_recurrent_form_is_the_cell_of_the_paper(gate, normalize):
    with jax.enable_x64(True):
        args, state = inputs(2, 23, 2, 4, 6, jnp.float64), a_state(2, 2, 4, 6, jnp.float64)
        options = dict(gate=gate, normalize=normalize)
        h = vlstm_twins.recurrent(*args, initial_state=state, **options)
        assert_equal_to(1e-12, h, numpy_loop(*args, state, **options))


@pytest.mark.parametrize(("gate", "normalize"), [("exp", True), ("sigmoid", False)])
def test_three_forms_agree_in_float32(gate, normalize):
    args, options = inputs(2, 512, 2, 16, 24), dict(gate=gate, normalize=normalize)
    h = vlstm_twins.recurrent(*args, **options)
    assert_equal_to(1e-4, vlstm(*args, **options), h)
    assert_equal_to(1e-4, jax.jit(functools.partial(vlstm_twins.parallel, **options))(*args), h)


def test_forms_agree_over_8192_positions():
    args = inputs(1, 8192, 1, 8, 16)
    assert_equal_to(1e-4, vlstm(*args), vlstm_twins.recurrent(*args))


@pytest.mark.parametrize(("length", "chunk_size"), [(1, None), (17, 16), (100, None)])
def test_any_length(length, chunk_size):
    with jax.enable_x64(True):
        args, state = inputs(2, length, 3, 8, 4, jnp.float64), a_state(2, 3, 8, 4, jnp.float64)
        options = dict(initial_state=state, return_state=True)
        y = vlstm(*args, chunk_size=chunk_size, **options)
        assert_equal_to(1e-11, y, vlstm_twins.recurrent(*args, **options))


@pytest.mark.parametrize(
    ("gate", "normalize", "eps", "packed"),
    [
        ("exp", True, 0.0, True),
        slow("exp", True, 0.1, False),
        slow("sigmoid", True, 0.0, False),
        ("sigmoid", False, 0.0, False),
    ],
)
def test_gradients_are_those_of_the_recurrent_form(gate, normalize, eps, packed):
    """Checks all gradients, including states and stabilisers (whose max is differentiated)."""
    with jax.enable_x64(True):
        args, state = inputs(2, 29, 2, 6, 5, jnp.float64), a_state(2, 2, 6, 5, jnp.float64)
        options = dict(gate=gate, normalize=normalize, eps=eps, return_state=True)
        if packed:
            ids = np.repeat([[4, 1, 2, 1], [0, 1, 2, 3]], [9, 1, 10, 9], axis=1)
            options["segment_ids"] = jnp.asarray(ids)
        run = lambda form, **o: with_gradients(
            lambda *a: form(*a[:5], initial_state=a[5], **options, **o), *args, state
        )
        assert_equal_to(1e-9, run(reference.chunkwise, chunk_size=8), run(vlstm_twins.recurrent))


def test_gradients_of_the_parallel_form():
    with jax.enable_x64(True):
        args = inputs(2, 29, 2, 6, 5, jnp.float64)
        ids = jnp.arange(29)[None] // jnp.array([[8], [11]])
        run = lambda form: with_gradients(form, *args, segment_ids=ids)
        assert_equal_to(1e-9, run(vlstm_twins.parallel), run(vlstm_twins.recurrent))


@pytest.mark.slow  # as JAX differentiates the recurrent form above
def test_gradients_are_finite_differences():
    with jax.enable_x64(True):
        args, state = inputs(1, 12, 1, 4, 3, jnp.float64), a_state(1, 1, 4, 3, jnp.float64)

        @jax.jit
        def loss(args, state):
            y = vlstm(*args, initial_state=state, return_state=True, chunk_size=5)
            leaves = enumerate(jax.tree.leaves(y))
            return sum(jnp.sum(normal(j, x.shape, x.dtype) * x) for j, x in leaves)

        gradients = jax.jit(jax.grad(loss, (0, 1)))(args, state)
        leaves, tree = jax.tree.flatten((args, state))
        for j, (x, dx) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
            direction = normal(j, x.shape, x.dtype)

            def moved(step, j=j, direction=direction):
                changed = [y + step * direction if j == n else y for n, y in enumerate(leaves)]
                return loss(*jax.tree.unflatten(tree, changed))

            difference = (moved(1e-5) - moved(-1e-5)) / 2e-5
            np.testing.assert_allclose(jnp.sum(dx * direction), difference, rtol=1e-7, atol=1e-8)


def narrow_inputs(dtype, extreme, mean):
    q, k, v, i, f = inputs(2, 150, 2, 16, 32, dtype)
    dh = normal(20, v.shape, dtype)
    if extreme:  # gates past xLSTM's caps in two thirds of the places (with f = +-30 everywhere
        # the true gradient of f is 1e-9 and nothing but rounding would be compared)
        some = jnp.arange(150)[None, :, None] % 3 > 0
        i = jnp.where(some, 15 * jnp.sign(i), i)
        f = jnp.where(some, 30 * jnp.sign(f), f)
        dh = dh * 2**-12  # the largest gradient is 1e6 times the cotangent: keeps it in float16
    return (q + mean, k + mean, v, i, f), dh


def true_results(args, dh):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (args, dh))
        return [np.asarray(x) for x in pull_back(vlstm_twins.recurrent, *wide)]


@pytest.mark.parametrize(
    ("dtype", "extreme"),
    [
        (jnp.bfloat16, False),
        slow(jnp.bfloat16, True),
        slow(jnp.float16, True),
        slow(jnp.float32, False),
    ],
)
def test_error_ratio(dtype, extreme):
    """Compares with float64, relative to the parallel form, which rounds p and dS but no states."""
    args, dh = narrow_inputs(dtype, extreme, mean=1)  # the mean keeps |l| away from 0
    forms = reference.chunkwise, vlstm_twins.parallel
    actual, expected = (pull_back(form, args, dh) for form in forms)
    results = actual, expected, true_results(args, dh)
    for name, a, e, t in zip(("h", *ARRAYS), *results, strict=True):
        assert_error_ratio(a, e, t, name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_with_l_near_0_stay_within_the_rounding(dtype):
    """Such rows amplify every rounding error (5 seeds: up to 2.4 eps), also that of the states, and
    no other form is comparable.  The largest error is therefore compared with the largest value."""
    args, dh = narrow_inputs(dtype, extreme=True, mean=0)
    actual = pull_back(reference.chunkwise, args, dh)
    for name, a, t in zip(("h", *ARRAYS), actual, true_results(args, dh), strict=True):
        error = np.abs(np.asarray(a, np.float64) - t).max() / np.abs(t).max()
        assert error <= 4 * jnp.finfo(dtype).eps, (name, error)


def test_a_sequence_split_inside_a_chunk_is_the_whole():
    cut = 13
    with jax.enable_x64(True):
        args, state = inputs(2, 30, 2, 4, 6, jnp.float64), a_state(2, 2, 4, 6, jnp.float64)
        run = functools.partial(vlstm, return_state=True, chunk_size=8)

        def whole(*args):
            return run(*args[:5], initial_state=args[5])

        def parts(*args):
            h0, state = run(*(x[:, :cut] for x in args[:5]), initial_state=args[5])
            h1, state = run(*(x[:, cut:] for x in args[:5]), initial_state=state)
            return jnp.concatenate([h0, h1], 1), state

        assert_equal_to(
            1e-10, with_gradients(parts, *args, state), with_gradients(whole, *args, state)
        )


def test_segments_are_separate_sequences():
    """Checks values, states and gradients; segments start and end in a chunk, and an id recurs."""
    with jax.enable_x64(True):
        args, state = inputs(1, 30, 2, 4, 6, jnp.float64), a_state(1, 2, 4, 6, jnp.float64)
        cuts = (0, 9, 13, 30)
        ids = jnp.asarray(np.repeat([[7, 3, 7]], np.diff(cuts), axis=1))
        options = dict(return_state=True, chunk_size=8)

        def segment(number):
            return (x[:, cuts[number] : cuts[number + 1]] for x in args)

        h, last_state = vlstm(*args, initial_state=state, segment_ids=ids, **options)
        first = vlstm_twins.recurrent(*segment(0), initial_state=state)
        middle = vlstm_twins.recurrent(*segment(1))
        last, expected_state = vlstm_twins.recurrent(*segment(2), return_state=True)
        assert_equal_to(1e-10, h, jnp.concatenate([first, middle, last], 1))
        assert_equal_to(1e-10, last_state, expected_state)

        def last_of_packed(*args):
            h, after = vlstm(*args[:5], initial_state=args[5], segment_ids=ids, **options)
            return h[:, cuts[2] :], after

        _, (*inside, of_state) = with_gradients(last_of_packed, *args, state)
        alone = functools.partial(vlstm_twins.recurrent, return_state=True)
        assert_equal_to(
            1e-10, [x[:, cuts[2] :] for x in inside], with_gradients(alone, *segment(2))[1]
        )
        assert not any(x[:, : cuts[2]].any() for x in inside)
        assert not any(x.any() for x in of_state)


def test_a_closed_gate_in_one_segment_does_not_blur_the_next():
    q, k, v, i, f = inputs(1, 24, 1, 8, 8)
    ids = jnp.arange(24)[None] // 12
    h = vlstm(q, k, v, i, f.at[:, :12].set(-1e5), segment_ids=ids)[:, 12:]
    assert_equal_to(1e-5, h, vlstm_twins.recurrent(*(x[:, 12:] for x in (q, k, v, i, f))))


@pytest.mark.parametrize("chunk_size", [64, slow(256)])
@pytest.mark.parametrize("closed", ["every 17th", "two thirds"])
def test_closed_forget_gates_do_not_blur_the_open_ones(closed, chunk_size):
    """In float32 the largest error of h and of each gradient is at most 2e-5 of the largest value.

    A difference of running sums of log gates errs by 1e-3 with gates of -1000 at every 17th
    position.  With two thirds of the gates at -30 the forget gates' gradient errs by 8e-4 where
    the stabiliser of a row is held constant.
    """
    q, k, v, i, f = (x.astype(jnp.float32) for x in inputs(1, 512, 2, 16, 32))
    position, at_ends = np.arange(512)[None, :, None], 15 * jnp.sign(i)
    if closed == "every 17th":
        f = jnp.where(position % 17 == 5, -1000, f)
    else:
        f, i = (jnp.where(position % 3 > 0, *pair) for pair in ((-30, f), (at_ends, i)))
    args, dh = (q + 1, k + 1, v, i, f), normal(20, v.shape)
    form = functools.partial(reference.chunkwise, chunk_size=chunk_size)
    for name, a, t in zip(
        ("h", *ARRAYS), pull_back(form, args, dh), true_results(args, dh), strict=True
    ):
        error = np.abs(np.asarray(a, np.float64) - t).max() / np.abs(t).max()
        assert error <= 2e-5, (name, error)


def test_steps_continue_a_sequence():
    args = inputs(2, 20, 2, 8, 16)
    h, state = vlstm(*(x[:, :15] for x in args), return_state=True)
    parts = [h]
    for t in range(15, 20):
        h, state = vlstm_step(*(x[:, t] for x in args), state)
        parts.append(h[:, None])
    expected = vlstm(*args, return_state=True)
    assert_equal_to(1e-5, (jnp.concatenate(parts, 1), state), expected)


def test_the_sigmoid_gate_is_the_exponential_one_fed_its_logarithm():
    q, k, v, i, f = inputs(1, 40, 2, 8, 8)
    expected = vlstm(q, k, v, jax.nn.log_sigmoid(i), f)
    assert_equal_to(1e-6, vlstm(q, k, v, i, f, gate="sigmoid"), expected)


def test_below_the_bound_the_normaliser_is_one_and_has_no_gradient():
    q, k, v, i, f = inputs(1, 40, 2, 8, 8)
    args = (q * 1e-4, k, v, i, f)  # |l| < 1 in every row, and exactly 0 in the first one
    args = (args[0].at[:, 0].set(0), *args[1:])
    linear = functools.partial(vlstm, normalize=False)
    assert_equal_to(1e-5, with_gradients(vlstm, *args), with_gradients(linear, *args))


def test_float16_saturates():
    """Two positions cancel in l, but their sum in the numerator exceeds the largest float16."""
    q, v = np.full((1, 2, 1, 4), 2.0), np.array([60000.0, -60000.0])
    k = np.stack([np.full(4, 2.0), np.full(4, -2.0)])[None, :, None]
    args = q, k, v.reshape(1, 2, 1, 1), np.full((1, 2, 1), 3.0), np.full((1, 2, 1), 30.0)
    h = vlstm(*(jnp.asarray(x, jnp.float16) for x in args))
    assert h[0, :, 0, 0].tolist() == [60000, 65504]
    empty = np.zeros((1, 1, 4, 1)), np.zeros((1, 1, 4)), np.zeros((1, 1))
    assert numpy_loop(*args, empty, "exp", True)[0, 1, 0, 0] > 65504


def test_float16_holds_the_gradient_of_q_k_near_l_0():
    """Times 1 / sqrt(DQK) it is 16,400, without 131,000."""
    ones = jnp.ones((1, 2, 1, 64), jnp.float16)
    sides = jnp.float16([1, -1])[:, None, None]
    q, k, v = ones, ones * jnp.float16([2, -2 + 2**-10])[:, None, None], sides * ones / 4
    args, dh = (q, k, v, *[jnp.full((1, 2, 1), 20.0)] * 2), ones.at[:, 0].set(0) / 64
    actual = pull_back(functools.partial(vlstm, implementation="xla"), args, dh)
    with jax.enable_x64(True):
        wide = [jnp.float64(np.asarray(x)) for x in (*args, dh)]
        expected = pull_back(functools.partial(vlstm, implementation="xla"), wide[:-1], wide[-1])
    assert np.abs(expected[2]).max() > 16_000
    np.testing.assert_allclose(np.float64(actual[2]), expected[2], rtol=2e-3)


def test_an_input_gate_may_be_closed_entirely():
    """i = -inf at some positions equals a sequence whose k is zero there, without any NaN."""
    q, k, v, i, f = inputs(1, 40, 2, 8, 8)
    closed = jnp.arange(40)[None, :, None] % 3 < 2
    closed = closed | (jnp.arange(40) < 16)[None, :, None]  # including a whole chunk
    h, gradients = with_gradients(
        functools.partial(vlstm, chunk_size=8), q, k, v, jnp.where(closed, -jnp.inf, i), f
    )
    without = jnp.where(closed[..., None], 0, k)
    assert_equal_to(1e-5, h, vlstm(q, without, v, jnp.where(closed, -9.0, i), f))
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("given", [False, True])
def test_sums_of_a_single_chunk_are_the_same_in_jit(given):
    """On a CPU XLA's sums of products with constant zeros, the empty state or the gradient of one
    that is not used, were any number up to NaN.
    """
    *args, i, f = inputs(2, 64, 1, 64, 64)

    def loss(v, i):
        state = tuple(map(jnp.zeros_like, a_state(2, 1, 64, 64))) if given else None
        run = lambda i: vlstm(*args[:2], v, i, f, initial_state=state, implementation="xla")
        return jax.vmap(run)(jnp.stack([i, -i])).sum()

    for run in (loss, lambda *both: jax.grad(loss, (0, 1))(*both)):
        assert_equal_to(1e-3, jax.jit(run)(args[2], i), run(args[2], i))


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
def test_without_elements(batch, length):
    args = inputs(batch, length, 1, 2, 2)
    _, gradients = with_gradients(functools.partial(vlstm, chunk_size=2), *args)
    assert [g.shape for g in gradients] == [x.shape for x in args]


def test_memory_of_training_is_linear_in_length():
    def temporary(length):
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(1, length, 1, 16, 16)]
        loss = lambda *a: jnp.sum(vlstm(*a))
        compiled = jax.jit(jax.grad(loss, tuple(range(5)))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 4.4 * temporary(512)


def test_it_runs_on_xla_and_says_why():
    args = inputs(1, 3, 1, 2, 2)
    with pytest.raises(NotImplementedError, match="q is float32, not bfloat16 or float16"):
        vlstm(*args, implementation="mosaic")
    dispatch.reset()
    jax.eval_shape(vlstm, *args)
    assert [d[:2] for d in dispatch.decisions()] == [("vlstm", "xla")]


def test_wrong_arguments_are_named():
    q, k, v, i, f = inputs(1, 3, 1, 2, 2)
    with pytest.raises(ValueError, match=r"f \(1, 2, 1\) do not match"):
        vlstm(q, k, v, i, f[:, :2])
    with pytest.raises(ValueError, match="gate='relu' is not one of exp, sigmoid"):
        vlstm(q, k, v, i, f, gate="relu")
    with pytest.raises(ValueError, match=r"segment_ids have shape \(1, 2\), not \(1, 3\)"):
        vlstm(q, k, v, i, f, segment_ids=jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="chunk_size=0 is not at least 1"):
        vlstm(q, k, v, i, f, chunk_size=0)
    with pytest.raises(ValueError, match="v bfloat16: cast them to one dtype"):
        vlstm(q, k, v.astype(jnp.bfloat16), i, f)
    with pytest.raises(ValueError, match=r"the state .* not \[\(1, 1, 2, 2\), \(1, 1, 2\)"):
        vlstm(q, k, v, i, f, initial_state=a_state(1, 1, 2, 3))
