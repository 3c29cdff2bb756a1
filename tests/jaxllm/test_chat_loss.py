"""What a model learns from conversations in rows: their loss and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversations import T, opened, pair, rows_of, settings, write
from flax import nnx
from tiny_models import tiny

from jaxllm.config import IGNORE, Config, DataConfig, OptimizerConfig, TrainConfig
from jaxllm.models import language_model
from jaxllm.sharding import make_mesh
from jaxllm.train.step import Trainer


@pytest.fixture
def config(tmp_path):
    return settings(tmp_path)


def trainer_of(config, **train):
    whole = Config(
        model=tiny("llama3", vocab_size=400, n_layers=2, max_seq_len=T),
        data=DataConfig(**config),
        train=TrainConfig(**dict(steps=2, batch_size=8, seq_len=T) | train),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=0.0, b1=0.5),
    )
    return Trainer(whole, make_mesh(whole.mesh, jax.devices()[:1]))


def large(params):
    """Weights with which tokens depend visibly on what they see."""
    return jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, params)


def test_conversations_in_a_row_do_not_see_each_other(config):
    trainer, data = trainer_of(config), opened(config)
    params = large(trainer.init().params)
    row = max(rows_of(data), key=lambda row: row["segment_ids"].max())
    logits = jax.jit(lambda tokens, **more: nnx.merge(trainer.graph, params)(tokens, **more))
    more = {name: row[name][None] for name in ("segment_ids", "positions")}
    packed = logits(row["tokens"][None], **more)[0]
    for segment in range(row["segment_ids"].max() + 1):
        at = np.flatnonzero(row["segment_ids"] == segment)
        alone = np.zeros(T, np.int32)
        alone[: len(at)] = row["tokens"][at]
        np.testing.assert_allclose(
            packed[at], logits(alone[None])[0, : len(at)], rtol=1e-5, atol=1e-5
        )
    assert segment > 1
    mixed = logits(row["tokens"][None])[0]  # the check can fail
    assert np.abs(mixed - packed).max() > 1e-2


def test_a_token_without_loss_matters_only_to_what_attends_to_it(config, tmp_path):
    """Only the answers that come after it, in its own conversation."""
    asks = [{"messages": [*pair("cat", "dog ran"), *pair("the quick brown fox sat", "")[:1]]}] * 2
    path = str(write(tmp_path / "b.jsonl", [*asks, {"messages": pair("quick", "brown lazy")}] * 2))
    trainer, data = trainer_of(config), opened(config, seq_len=96, path=path)
    params = large(trainer.init().params)
    row = next(row for row in rows_of(data) if row["segment_ids"].max() > 1)

    @jax.jit
    @jax.value_and_grad
    def loss(params, row):
        return nnx.merge(trainer.graph, params).loss(**{k: v[None] for k, v in row.items()})

    def changed(place, **other):
        tokens = row["tokens"].copy()
        tokens[place] = 7
        return loss(params, row | {"tokens": jnp.asarray(tokens)} | other)

    right, grads = loss(params, row)
    last = np.flatnonzero(row["labels"][row["segment_ids"] == 0] != IGNORE).max()
    size = int((row["segment_ids"] == 0).sum())
    assert last + 2 < size  # a question without an answer ends the conversation
    for place in (last + 2, size - 1, len(row["tokens"]) - 1):  # the last one fills the row
        again, same = changed(place)
        assert float(again) == float(right)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(same), strict=True):
            # On a GPU the encoder sums its gradient in the order of the sorted ids.
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    # A question before an answer: the loss of the same conversation changes, no other's.
    assert float(changed(1)[0]) != float(right)
    others = np.where(row["segment_ids"] == 0, IGNORE, row["labels"])
    assert float(changed(1, labels=others)[0]) == float(loss(params, row | {"labels": others})[0])


def test_the_loss_is_the_mean_over_all_tokens_with_loss(config, tmp_path):
    """Also if the parts of a batch have very different numbers of them."""
    few = [{"messages": pair("cat " * 10 + str(i), "dog")} for i in range(40)]
    many = [{"messages": pair(str(i), "ran " * 16)} for i in range(40)]
    path = str(write(tmp_path / "b.jsonl", few + many))
    assert IGNORE == language_model.IGNORE
    whole, parts = (trainer_of(config | {"path": path}, grad_accum=n) for n in (1, 4))
    rows = sorted(rows_of(opened(config, path=path)), key=lambda r: (r["labels"] != IGNORE).sum())
    rows = (rows[:2] + rows[-2:]) * 2  # part i of 4 has rows i and i + 4: few or many labels
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    counts = (batch["labels"] != IGNORE).sum(1)
    assert counts.max() > 3 * counts.min()
    params = large(whole.init().params)
    graph = whole.graph

    @jax.jit
    def mean(params, batch):
        with_loss = (batch["labels"] != IGNORE).sum()
        return nnx.merge(graph, params).loss(**batch) / with_loss

    right, gradient = jax.value_and_grad(mean)(params, batch)
    rows = [float(mean(params, {k: v[i : i + 1] for k, v in batch.items()})) for i in range(8)]
    assert abs(np.mean(rows) - right) > 1e-2  # a mean of means would be another number
    expected = jax.tree.leaves(gradient)
    for trainer in (whole, parts):
        loss, grads = jax.jit(trainer._gradients)(
            trainer.init(jax.tree.map(jnp.copy, params)), trainer.put_batch(batch)
        )
        assert float(loss) == pytest.approx(float(right), rel=1e-6)
        for mine, theirs in zip(jax.tree.leaves(grads), expected, strict=True):
            allowed = 1e-5 * np.abs(theirs).max()
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=allowed + 1e-9)
