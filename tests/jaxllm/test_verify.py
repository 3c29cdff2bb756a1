"""A flipped bit in one of two computations of a step is found, and a run deals with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flipped_bits import flip_leaf, problem
from jax import lax
from training_runs import devices_run, losses

import train
from jaxllm.config import Config, Llama3Config, OptimizerConfig, TrainConfig
from jaxllm.models.language_model import LanguageModel
from jaxllm.sharding import make_mesh
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.step import Trainer
from jaxllm.train.verify import Canary

MODEL = Llama3Config(
    vocab_size=250, n_layers=2, n_heads=2, n_kv_heads=1, d_model=64, d_ff=64, max_seq_len=16
)


class Faulty:
    """Flips bits of an activation, by one of `masks` in each of the next executions, then none."""

    def __init__(self):
        self.masks = []

    def mask(self) -> np.uint16:
        return np.uint16(self.masks.pop(0) if self.masks else 0)

    def activation(self, x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x[0, 3, 7], jnp.uint16)
        bits ^= jax.pure_callback(self.mask, jax.ShapeDtypeStruct((), jnp.uint16))
        wrong = x.at[0, 3, 7].set(lax.bitcast_convert_type(bits, x.dtype))
        return x + lax.stop_gradient(wrong - x)


@pytest.fixture(scope="module")
def faulty():
    """(Faulty, trainer, canary): the output of the first half of the model passes through it."""
    faulty, walk = Faulty(), LanguageModel.walk

    def walk_faulty(self, embedded, **options):
        return walk(self, faulty.activation(embedded), **options)

    config = Config(
        model=MODEL,
        train=TrainConfig(steps=9, batch_size=4, seq_len=16),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    trainer = Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "walk", walk_faulty)
        traced = trainer.trace_verified_step()
    return faulty, trainer, Canary(trainer, traced.lower().compile())


def batch():
    tokens = np.random.default_rng(0).integers(0, 250, (4, 17)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].copy()}


def test_a_verified_step_is_the_plain_step(faulty):
    """Up to the rounding of another program; NaN, which skips the update, is no corruption."""
    _, t, canary = faulty
    plain, one, other = t.trace_train_step().lower().compile(), t.init(), t.init()
    for step in (1, 2):
        one, wanted = plain(one, t.put_batch(batch()))
        other, metrics = canary.take(step, other, t.put_batch(batch()))
        assert problem(canary, step) == ""
        for name, value in wanted.items():
            assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5)
    close = lambda a, b: np.allclose(np.float32(a), np.float32(b), rtol=1e-3, atol=1e-5)
    assert all(jax.tree.leaves(jax.tree.map(close, one.params, other.params)))
    broken = other._replace(params=jax.tree.map(lambda p: p * jnp.nan, other.params))
    _, metrics = canary.take(3, t.complete(broken.saved()), t.put_batch(batch()))
    assert (problem(canary, 3), int(metrics["skips"])) == ("", 1)


@pytest.mark.parametrize("mask", [1, 1 << 7, 1 << 15])
def test_a_bit_of_an_activation_is_found_and_the_update_is_not_made(faulty, mask):
    bits, t, canary = faulty
    state = t.init()
    before = jax.tree.map(np.array, state)
    bits.masks[:] = [0, mask]
    state, _ = canary.take(7, state, t.put_batch(batch()))
    said = problem(canary, 7)
    assert said.startswith("step 7 is corrupted: two computations of it differ in the gradient of ")
    assert said.count("\n") == 0
    assert "more arrays on " in said
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, state)))


@pytest.mark.parametrize(
    ("part", "between", "named"),
    [
        # The first computation casts the copies anew.
        (".copies['blocks'][1]", False, "copies.blocks.1.attention.k.weight"),
        (".copies['blocks'][1]", True, "copies.blocks.1.attention.k.weight"),
        (".mu['blocks'][1]", True, "opt_state.1.0.mu.blocks.1.attention.k.weight"),
        (".nu['embedding']", True, "opt_state.1.0.nu.embedding.wte"),
        (".params['norm']", True, "params.norm.weight"),
    ],
)
def test_a_bit_of_the_state_is_found(faulty, monkeypatch, part, between, named):
    """between: the bit flips after the first computation rather than before it."""
    _, t, canary = faulty
    state, program = t.init(), canary.program
    if between:

        def flipping(state, batch, seen):
            second = seen is not canary.unseen
            return program(flip_leaf(state, part) if second else state, batch, seen)

        monkeypatch.setattr(canary, "program", flipping)
    else:
        state = flip_leaf(state, part)
    canary.take(8, state, t.put_batch(batch()))
    assert problem(canary, 8).startswith(
        f"step 8 is corrupted: two computations of it differ in {named}"
    )


def test_a_replica_with_another_bit_is_found_and_named():
    """Even if the bit flipped long ago, which two computations of a step do not show."""
    found = devices_run("flipped_bits.py", 4)
    assert (found["step 1"], found["step 2"]) == ("", "")
    said = found["moment"]
    assert said.startswith(
        "step 3 is corrupted: replicas differ in opt_state.1.0.nu.blocks.0.mlp.down.weight"
    )
    assert said.endswith(" on cpu:0 (cpu) and 1 more device")  # either of the two may be wrong


@pytest.mark.slow  # its parts are shown above
@pytest.mark.usefixtures("same_environment")
def test_a_corrupted_step_rolls_back_once_then_stops_and_the_run_is_the_same(
    tiny, tmp_path, capsys, monkeypatch
):
    more = """--train.steps 6 --train.checkpoint_every 3 --train.eval_every 0 --sample.tokens 0
        --model.n_layers 1 --train.verify_every 2 --train.on_corruption rollback
        --profile.steps 3:6""".split()
    assert train.main(["--config", str(tiny), "--out_dir", str(tmp_path / "plain"), *more]) == 0
    take, out_dir = Canary.take, tmp_path / "verified"

    def corrupted(self, number, state, batch):
        state, metrics = take(self, number, state, batch)
        if number == 4:
            self.last = (number, self.last[1], self.last[2] + 1)
        return state, metrics

    with monkeypatch.context() as patch:
        patch.setattr(Canary, "take", corrupted)
        capsys.readouterr()
        assert train.main(["--config", str(tiny), "--out_dir", str(out_dir), *more]) == 1
    out, err = capsys.readouterr()
    assert out.count("step 4 is corrupted: two computations of it differ in step and") == 1
    assert out.count("; going on from the newest checkpoint\n") == 1
    assert f"resume   from the checkpoint of step 3 in {out_dir}" in out
    assert err.startswith("error: step 4 is corrupted: ")
    assert err.endswith("; continue with --resume, on other devices if it happens again\n")
    assert Checkpoints(out_dir / "checkpoints", 1).newest() == 3
    assert train.main(["--resume", "--out_dir", str(out_dir)]) == 0
    assert losses(out_dir) == losses(tmp_path / "plain")
    assert list(losses(out_dir)) == [1, 2, 3, 4, 5, 6]
