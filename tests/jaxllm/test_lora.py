"""model.lora: gradients, dropout, several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from lora_models import TARGETS, batch_of, loss_in_float64, plain_arrays, state_of, trainer_of
from tiny_models import tiny
from training_runs import devices_run

from jaxllm import models
from jaxllm.config import Lora
from jaxllm.layers.adapter import Adapter
from jaxllm.train.estimate import equations
from jaxllm.weights.places import named_params

pytestmark = pytest.mark.usefixtures("no_tf32")


def gradients(trainer, state, batch):
    """(loss, {dotted path: gradient}) as the train step computes them."""
    loss, grads = jax.jit(trainer._gradients)(state, trainer.put_batch(batch))
    return float(loss), {n: np.asarray(g[...], np.float64) for n, g in named_params(grads).items()}


@pytest.mark.parametrize(
    ("targets", "model", "limit"),
    [
        ("v_proj", {}, 1e-5),
        *(slow(target, {}, 1e-5) for target in TARGETS if target != "v_proj"),
        slow("all", dict(remat="block"), 1e-5),
        slow("all", dict(quantize="int8"), 1e-5),
        ("q_proj,k_proj,gate_proj,down_proj", dict(quantize="int4", remat="mlp"), 1e-5),
        # bf16 rounds each activation by up to 2^-9, some twenty times in a row.
        slow("all", dict(compute_dtype="bfloat16", quantize="int4"), 0.06),
        slow("all", dict(compute_dtype="bfloat16"), 0.06),
    ],
)
def test_gradients_are_those_of_float64(targets, model, limit):
    rank = 99 if targets == "v_proj" else 4  # may exceed the matrix's widths, as in peft
    trainer = trainer_of(dict(rank=rank, alpha=2.0, targets=targets, rslora=True), **model)
    state, batch = state_of(trainer), batch_of()
    loss, found = gradients(trainer, state, batch)
    config = trainer.config.model
    with jax.enable_x64(True):
        arrays = {name: jnp.float64(x) for name, x in plain_arrays(state).items()}
        adapters = {name: arrays.pop(name) for name in found}
        both = jax.value_and_grad(lambda a: loss_in_float64(arrays | a, batch, config))
        expected, wanted = jax.device_get(both(adapters))
    assert len(found) == 2 * config.n_layers * (7 if targets == "all" else len(targets.split(",")))
    np.testing.assert_allclose(loss, expected, rtol=limit)
    for name, g in found.items():
        error = np.linalg.norm(g - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < limit, (name, error)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_base_has_no_gradient_and_no_float32_copy(quantize):
    model = dict(quantize=quantize, compute_dtype="bfloat16", remat="mlp")
    trainer = trainer_of(dict(rank=4), train=dict(seq_len=13), **model)
    shapes = {p.shape for p in jax.tree.leaves(trainer.abstract_base_params) if p.ndim == 2}
    shapes |= {shape[::-1] for shape in shapes}
    products = [
        v.aval.shape
        for equation in equations(trainer.trace_train_step().jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
        for v in equation.outvars
    ]
    assert products
    assert not shapes & set(products)
    state = trainer.abstract_state()
    matrices = [p for p in jax.tree.leaves(state.base) if p.ndim >= 2]
    assert {str(p.dtype) for p in matrices} <= {"bfloat16", "int32"}
    held = sum(p.size for p in jax.tree.leaves(state.saved()))
    assert held < 3 * trainer.n_trained + 200  # adapters, two moments, the watch


def test_an_adapter_begins_as_peft_has_it():
    adapter = Adapter((400, 30), (None, None), Lora(rank=8, alpha=16.0), rngs=nnx.Rngs(0))
    a = np.asarray(adapter.a[...])
    assert a.shape == (400, 8)
    assert not np.any(adapter.b[...])
    bound = 1 / np.sqrt(400)  # Kaiming's with a = sqrt(5)
    assert 0.99 * bound < np.abs(a).max() <= bound
    np.testing.assert_allclose(a.std(), bound / np.sqrt(3), rtol=0.05)
    assert adapter.scale == 2
    assert Lora(rank=16, alpha=8.0, rslora=True).scale == 2


def test_dropout_is_anew_each_step_and_the_same_in_recomputation():
    lora = dict(rank=4, dropout=0.5)
    trainer = trainer_of(lora)
    state, batch = state_of(trainer), batch_of()
    loss, found = gradients(trainer, state, batch)
    next_loss, _ = gradients(trainer, state._replace(step=state.step + 1), batch)
    assert loss != next_loss
    again, recomputed = gradients(trainer_of(lora, remat="block"), state, batch)
    np.testing.assert_allclose(loss, again, rtol=1e-6)
    for name, g in found.items():
        np.testing.assert_allclose(g, recomputed[name], rtol=1e-4, atol=1e-6)
    whole = state.whole
    total, count = trainer.eval_step()(whole, trainer.put_batch(batch))
    plain, _ = gradients(trainer_of(dict(rank=4)), state, batch)
    np.testing.assert_allclose(total / count, plain, rtol=1e-6)


@pytest.mark.parametrize("kind", ["threefry2x32", slow("rbg")])
def test_dropout_takes_the_keys_of_every_generator(kind):
    models._abstract.cache_clear()  # its keys are of the generator of the first call
    with jax.default_prng_impl(kind):
        trainer = trainer_of(dict(rank=4, dropout=0.5))
        shapes = [x.shape for x in jax.tree.leaves(trainer.abstract_keys)]
        drawn = jax.eval_shape(trainer.dropout_keys, jnp.int32(0), 0)
        assert shapes == [x.shape for x in jax.tree.leaves(drawn)]
        gradients(trainer, state_of(trainer), batch_of())


def test_dropout_keeps_the_mean():
    adapter = Adapter((64, 30), (None, None), Lora(rank=8, dropout=0.3), rngs=nnx.Rngs(0))
    x = jnp.ones((1000, 64))
    kept = np.asarray(adapter.narrow(x)).mean(0)
    np.testing.assert_allclose(kept, adapter.a[...].sum(0), atol=0.05)


@pytest.mark.slow
def test_several_devices_compute_what_one_does():
    found = devices_run("lora_devices.py", 4)
    for name, result in found.items():
        one = found[", ".join(["one", *name.split(", ")[1:]])]
        np.testing.assert_allclose(result["losses"], one["losses"], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            result["adapters"], one["adapters"], rtol=0, atol=1e-4, err_msg=name
        )


def test_targets_are_text_or_a_list():
    assert Lora(targets="q_proj,all").adapts("v_proj")
    assert Lora(targets=["q_proj", "o_proj"]) == Lora(targets="q_proj,o_proj")
    assert tiny("llama3", lora=dict(targets=" q_proj, v_proj")).lora.adapts("v_proj")
