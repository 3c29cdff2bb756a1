"""Pruning: the masks are what the page says, pruned weights have no effect, and a sweep runs."""

import json
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import tiny

from jaxllm.config import load
from learn import ladder as ladders
from learn import pruning


def test_the_rules_keep_the_largest_weights():
    w = jnp.asarray([[1.0, -8.0], [-2.0, 7.0], [3.0, -6.0], [-4.0, 5.0]])
    assert pruning.two_of_four(w).tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert pruning.largest(0.25)(w).tolist() == [[0, 1], [0, 1], [0, 0], [0, 0]]


@pytest.fixture(scope="module")
def sweep():
    """Two tiny models, with text whose next token is the last one plus 1."""
    config = load("gpt2_small", {"train.steps": "25", "optimizer.warmup_steps": "1"})
    config = config.model_copy(update={"model": tiny("gpt2", n_layers=1)})
    tokens = np.random.default_rng(0).integers(100, size=(27, 4, 1)) + np.arange(9)
    batches = {"tokens": tokens[..., :-1] % 100, "labels": tokens[..., 1:] % 100}
    train, val = ({k: v[part] for k, v in batches.items()} for part in (np.s_[:25], np.s_[25:]))
    return pruning.Sweep(config, 1, train, val)


def test_only_the_matrices_of_the_blocks_are_pruned(sweep):
    masks = pruning.prune(sweep.fresh.params, pruning.largest(0.5))
    assert len(masks) == 6  # q, k, v, out, up, down
    assert all("blocks" in path and "weight" in path for path in masks)
    for mask in masks.values():
        np.testing.assert_array_equal(mask.mean((1, 2)), 0.5)


def test_a_pruned_weight_has_no_effect_and_no_gradient(sweep):
    params = sweep.fresh.params
    masks = pruning.prune(params, pruning.two_of_four)
    trained = sweep.train(sweep.fresh, masks, 0, 1)  # one step
    moments = optax.tree.get(trained.opt_state, "mu")
    leaves = jax.tree_util.tree_flatten_with_path(moments)[0]
    found = {jax.tree_util.keystr(path): moment for path, moment in leaves}
    for path, mask in masks.items():
        assert not found[path][~mask].any()
        assert found[path][mask].any()
    whole = jax.tree.map(jnp.ones_like, masks)
    losses = [sweep.loss(*x) for x in ((params, masks), (pruning.masked(params, masks), whole))]
    np.testing.assert_array_equal(*losses)
    assert (losses[0] != sweep.loss(params, whole)).all()


def test_a_sweep_prunes_in_rounds_rewinds_and_draws(sweep, monkeypatch, tmp_path):
    trained = []  # (stretches, weights kept) of every call
    original = pruning.Sweep.train

    def train(self, state, masks, first, last):
        kept = [float(np.mean([m[i].mean() for m in masks.values()])) for i in range(2)]
        trained.append((first, last, kept))
        return original(self, state, masks, first, last)

    monkeypatch.setattr(pruning, "KEPT", (0.5, 0.25))
    monkeypatch.setattr(pruning.Sweep, "train", train)
    rows = sweep.run()
    shares = [1, 0.5, 0.25, 0.5]
    assert [(row["pattern"], row["kept"]) for row in rows] == list(
        zip(["dense", "largest", "largest", "2:4"], shares, strict=True)
    )
    assert trained == [(a, b, [kept] * 2) for kept in shares for a, b in ((0, 1), (1, 25))]
    first = sweep.loss(sweep.fresh.params, pruning.prune(sweep.fresh.params, pruning.two_of_four))
    assert all(row[way] for row in rows for way in pruning.WAYS)
    assert all(row[way][0] < min(first) for row in rows for way in ("rewound", "random"))
    assert rows[0]["rewound"] == rows[0]["not trained"]
    result = {"config": "tiny", "steps": 25, "device": "cpu", "rows": rows}
    pruning.draw(result, tmp_path / "a.svg")
    pruning.draw(result, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    ET.parse(tmp_path / "a.svg")


def test_bad_files_are_refused_before_the_training(monkeypatch, tmp_path):
    monkeypatch.setattr(pruning, "read_data", lambda config: None)
    (taken := tmp_path / "taken").write_text("")
    for words in (["--quick", "--out", str(taken)], ["--draw", str(taken)], ["--draw", "no.json"]):
        with pytest.raises(SystemExit, match=r"(\[Errno \d\d?\] .*'(.*taken|no.json)'|Expect)"):
            pruning.main(words)


def test_bad_arguments_are_one_line():
    for words, why in (
        (["--train.steps", "24"], "error: train.steps=24 is below 25: raise it"),
        (["--seeds", "0"], "error: --seeds 0 is below 1: raise it"),
        (["--draw", str(ladders.HERE / "results.json")], "has no rows: name a pruning.json"),
        (["--train.steps"], "error: --train.steps is not a list of --section.key VALUE"),
        (["--train.step", "9"], "error: unknown key train.step; did you mean train.steps?"),
    ):
        with pytest.raises(SystemExit, match=re.escape(why)):
            pruning.main(words)


def test_the_page_states_what_was_measured():
    page = (ladders.HERE / "pruning.md").read_text()
    result = json.loads((ladders.HERE / "pruning.json").read_text())
    table = re.findall(r"^\| (\S+) \| (\d\S*) \| (\d\S*) \| (\d\S*) \|$", page, re.M)
    assert len(table) == len(result["rows"]) == len(pruning.KEPT) + 2
    for row, (name, *stated) in zip(result["rows"], table, strict=True):
        names = {"dense": "all", "2:4": "2:4", "largest": f"{100 * row['kept']:.3g}%"}
        assert name == names[row["pattern"]]
        assert stated == [f"{np.mean(row[way]):.2f}" for way in pruning.WAYS]
    assert f"{result['seconds']:.0f} s" in page
