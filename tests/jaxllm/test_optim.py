import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import devices_run

from jaxllm.config import OptimizerConfig
from jaxllm.train.optim import global_norm, learning_rate, make_optimizer, muon

RULES = "adamw", "muon"


def rates(steps, **values):
    schedule = learning_rate(OptimizerConfig(learning_rate=1.0, **values), steps)
    return np.array([float(schedule(s)) for s in range(steps + 1)])


def test_warmup_rises_as_step_plus_one_over_warmup():
    got = rates(20, warmup_steps=5)
    np.testing.assert_allclose(got[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)


def test_cosine_runs_over_the_steps_after_the_warmup():
    got = rates(20, warmup_steps=4, final_fraction=0.1)
    t = np.arange(17) / 16
    np.testing.assert_allclose(got[4:], 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * t)), rtol=1e-5)


def test_linear_ends_at_the_final_fraction():
    got = rates(10, schedule="linear", final_fraction=0.2)
    np.testing.assert_allclose(got, 1 - 0.8 * np.arange(11) / 10, rtol=1e-5)


def test_constant_does_not_decay():
    np.testing.assert_allclose(rates(10, schedule="constant", warmup_steps=2)[1:], 1)


def test_wsd_is_stable_and_falls_at_the_end():
    got = rates(10, schedule="wsd", warmup_steps=2, decay_fraction=0.4, final_fraction=0.0)
    np.testing.assert_allclose(got[1:7], 1)
    np.testing.assert_allclose(got[7:], [0.75, 0.5, 0.25, 0.0], atol=1e-6)
    # A warm-up that leaves less room for the fall makes it steeper.
    got = rates(10, schedule="wsd", warmup_steps=8, decay_fraction=0.4, final_fraction=0.0)
    np.testing.assert_allclose(got[7:], [1, 1, 0.5, 0.0], atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_fewer_steps_than_warmup_never_passes_the_peak(schedule):
    got = rates(3, schedule=schedule, warmup_steps=30)
    np.testing.assert_allclose(got[:3], [1 / 30, 2 / 30, 3 / 30], rtol=1e-5)


def test_only_matrices_decay():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(config, 10)
    params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(3)}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.05, rtol=1e-6)
    np.testing.assert_allclose(updates["vector"], 0)


def test_the_gradient_is_clipped_to_the_global_norm():
    params = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(3)}
    grads = jax.tree.map(lambda p: 100 * jnp.ones_like(p), params)

    def moments(clip_norm):
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, clip_norm=clip_norm), 10)
        _, state = optimizer.update(grads, optimizer.init(params), params)
        return optax.tree.get(state, "mu")

    assert float(optax.tree.norm(moments(1.0))) == pytest.approx(0.1, rel=1e-5)  # (1 - b1)
    assert float(optax.tree.norm(moments(0.0))) == pytest.approx(10 * np.sqrt(7), rel=1e-5)


def test_the_global_norm_counts_every_number_once():
    shapes = [(), (5,), (3, 4), (2, 3, 4)]
    tree = [jnp.arange(1.0, 1 + np.prod(shape)).reshape(shape) for shape in shapes]
    for norm in (global_norm(tree), jax.jit(global_norm)(tree)):
        assert float(norm) == pytest.approx(float(optax.tree.norm(tree)), rel=1e-6)


@jax.default_matmul_precision("highest")  # not TF32
def test_muon_is_that_of_optax():
    """In float32.  In bf16, as the trainer has it, small singular values' errors grow 480-fold."""
    config = OptimizerConfig(
        name="muon", learning_rate=1e-3, muon_learning_rate=0.05, schedule="constant"
    )
    shapes = {"wide": (12, 20), "tall": (20, 12), "like": (12, 20), "square": (9, 9)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = lambda key, shape: jax.random.normal(key, shape)
    params = {name: draw(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)}
    reference = optax.contrib.muon(0.05, weight_decay=config.weight_decay)
    exact, rounded = (muon(config, 10, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    states = [rule.init(params) for rule in (reference, exact, rounded)]
    for i in range(3):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 1)), params)
        wanted, states[0] = reference.update(grads, states[0], params)
        got, states[1] = exact.update(grads, states[1], params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, wanted)
        got, states[2] = rounded.update(grads, states[2], params)
        near = lambda a, b: np.linalg.norm(a - b) < 0.15 * np.linalg.norm(b)
        assert all(jax.tree.leaves(jax.tree.map(near, got, wanted)))
        params = optax.apply_updates(params, wanted)


def test_muon_is_for_the_blocks_matrices():
    values = dict(learning_rate=1e-3, clip_norm=0, schedule="constant")
    rules = {name: make_optimizer(OptimizerConfig(name=name, **values), 9) for name in RULES}
    ones = jnp.ones((3, 5))
    params = {"wte": ones, "blocks": {"0": {"w": ones, "bias": ones[0]}}, "norm": ones[0]}
    grads = jax.tree.map(jnp.sin, params)
    updates = {
        name: rule.update(grads, rule.init(params), params)[0] for name, rule in rules.items()
    }
    same = jax.tree.map(np.array_equal, updates["adamw"], updates["muon"])
    assert same == {"wte": True, "blocks": {"0": {"w": False, "bias": True}}, "norm": True}


@pytest.fixture(scope="module")
def devices():
    return devices_run("muon_devices.py", 4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "fsdp, tensor", "split"])
def test_muon_on_several_devices_is_that_of_one(devices, mesh):
    found = devices[mesh]
    np.testing.assert_allclose(found["losses"], devices["one"]["losses"], rtol=1e-4)
    assert len(found["errors"]) == 17
    # Three steps in bf16.  The parts of a matrix, each orthogonalized on its own, would be far off.
    assert max(found["errors"].values()) < 0.05


@pytest.mark.slow
def test_muon_resumes_bit_for_bit(devices):
    assert devices["resumed"] == {"one": True, "fsdp": True}
