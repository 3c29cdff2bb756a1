"""Prunes a small model and trains what is left, as pruning.md explains.

    python -m learn.pruning --train.steps 1000           the sweep of pruning.md, for a GPU
    python -m learn.pruning --quick                      a tiny one, in a minute on a CPU
    python -m learn.pruning --config vlstm_small         another model
    python -m learn.pruning --draw learn/pruning.json    draws the picture again

Writes pruning.json and pruning.svg to --out (default: benchmarks/learn).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from jaxllm.config import IGNORE, Config, load
from jaxllm.data import open_dataset
from jaxllm.errors import InputError
from jaxllm.models import create
from jaxllm.train.optim import make_optimizer
from jaxllm.train.process import set_xla_flags

KEPT = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)  # of the weights, round by round
STRETCHES = 25  # of a run; the checkpoint to which we rewind lies after the first
QUICK = {
    "model.n_layers": "1",
    "model.d_model": "64",
    "train.steps": "25",
    "train.batch_size": "4",
    "train.seq_len": "64",
    "train.eval_batches": "2",
    "optimizer.warmup_steps": "2",
}
WAYS = {"rewound": "#2a9d8f", "random": "#c8553d", "not trained": "#9aa5b1"}
Masks = dict[str, jax.Array]  # by the path of a matrix: True where a weight stays


class State(NamedTuple):
    """What a training step changes.  All arrays have a first axis: several models train at once."""

    params: nnx.State
    opt_state: optax.OptState


def largest(share: float) -> Callable:
    """The rule that keeps this share of a matrix, the weights of largest magnitude."""

    def keep(w):
        size = jnp.abs(w)
        return size >= jnp.sort(size.ravel())[-max(round(share * w.size), 1)]

    return keep


def two_of_four(w):
    """Keeps the two largest of four consecutive inputs of each output, as hardware wants them."""
    fours = jnp.abs(w).reshape(-1, 4, w.shape[1])
    rank = jnp.argsort(jnp.argsort(-fours, axis=1), axis=1)
    return (rank < 2).reshape(w.shape)


def prune(params: nnx.State, rule: Callable) -> Masks:
    """Applies a rule to each matrix of the blocks; embeddings, vectors and gates stay whole."""
    masks = {}
    for path, w in tree_flatten_with_path(params)[0]:
        if path[0].key == "blocks" and w.ndim == 3 and min(w.shape[1:]) >= 16:
            masks[keystr(path)] = jax.vmap(rule)(w)
    return masks


def masked(params: nnx.State, masks: Masks) -> nnx.State:
    """The parameters with zeros where the masks are False."""
    return tree_map_with_path(lambda path, w: w * masks.get(keystr(path), 1), params)


class Sweep:
    """The models, their data and two compiled functions, `train` and `loss`."""

    def __init__(self, config: Config, seeds: int, batches: dict, held_out: dict):
        """batches, held_out: tokens and labels (steps, B, T), for all models the same."""
        self.steps = config.train.steps // STRETCHES * STRETCHES
        self.early, self.seeds = self.steps // STRETCHES, seeds
        self.optimizer = make_optimizer(config.optimizer, self.steps)
        split = [nnx.split(create(config.model, seed=i), nnx.Param) for i in range(2 * seeds)]
        self.graph = split[0][0]
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[params for _, params in split])
        self.fresh = State(params, jax.vmap(self.optimizer.init)(params))
        stretch = lambda x: jnp.asarray(x[: self.steps]).reshape(STRETCHES, -1, *x.shape[1:])
        self.batches, self.held_out = jax.tree.map(stretch, batches), held_out
        self._advance = jax.jit(jax.vmap(self._stretch, in_axes=(0, 0, None)))
        self.loss = jax.jit(jax.vmap(self._held_out_loss))

    def _loss(self, params, masks, batch, labels):
        """The loss of a batch, divided by a number of labels."""
        model = nnx.merge(self.graph, masked(params, masks))
        return model.loss(**batch, scale=1 / labels)

    def _stretch(self, state: State, masks: Masks, batches: dict) -> State:
        """Training steps on some batches, of one model."""

        def step(state, batch):
            # The loss sees only what is left, so other weights get no gradient and have no effect.
            grads = jax.grad(self._loss)(state.params, masks, batch, batch["labels"].size)
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            return State(optax.apply_updates(state.params, updates), opt_state), None

        return jax.lax.scan(step, state, batches)[0]

    def _held_out_loss(self, params, masks):
        labels = (self.held_out["labels"] != IGNORE).sum()
        return jax.lax.map(lambda b: self._loss(params, masks, b, labels), self.held_out).sum()

    def train(self, state: State, masks: Masks, first: int, last: int) -> State:
        """Trains with these masks through the stretches first ... last - 1."""
        for i in range(first, last):
            state = self._advance(state, masks, {name: x[i] for name, x in self.batches.items()})
        return state

    def run(self) -> list[dict]:
        """Trains, prunes, rewinds; one row of losses for each mask, one loss for each seed.

        The first half of the models are those that are pruned and rewound; the second half begin
        from other weights, and get their masks from the first half.
        """
        n = self.seeds
        halves = lambda a, b: jax.tree.map(lambda x, y: jnp.concatenate([x[:n], y[n:]]), a, b)
        # Models n ... 2n-1 take the masks of models 0 ... n-1.
        shared = lambda masks: {key: jnp.concatenate([m[:n]] * 2) for key, m in masks.items()}
        whole = prune(self.fresh.params, lambda w: jnp.ones(w.shape, bool))
        checkpoint = self.train(self.fresh, whole, 0, 1)
        dense = self.train(checkpoint, whole, 1, STRETCHES)
        rows, trained, masks = [], dense, whole

        def note(pattern, kept, masks, trained, untrained):
            both = self.loss(trained.params, masks).tolist()
            after = self.loss(dense.params, untrained).tolist()[:n]
            row = {"pattern": pattern, "kept": kept}
            rows.append(row | dict(zip(WAYS, (both[:n], both[n:], after), strict=True)))
            text = ", ".join(f"{way} {np.mean(rows[-1][way]):.3f}" for way in WAYS)
            print(f"{pattern}, {kept:.2%} of the weights: {text}", flush=True)

        def retrain(masks):
            other = self.train(self.fresh, masks, 0, 1)
            return self.train(halves(checkpoint, other), masks, 1, STRETCHES)

        note("dense", 1.0, whole, dense, whole)
        for kept in KEPT:
            masks = shared(prune(masked(trained.params, masks), largest(kept)))
            trained = retrain(masks)
            note("largest", kept, masks, trained, prune(dense.params, largest(kept)))
        masks = shared(prune(dense.params, two_of_four))
        note("2:4", 0.5, masks, retrain(masks), masks)
        return rows


def read_data(config: Config) -> tuple[dict, dict]:
    """Batches for all steps, and batches for the validation loss: tokens and labels (n, B, T)."""
    train = config.train
    data = open_dataset(config)
    stack = lambda rows: jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    endless = data.train_batches(train.batch_size, 0, 1)
    batches = stack([next(endless) for _ in range(train.steps)])
    endless.close()
    return batches, stack(list(data.val_batches(train.batch_size, 0, 1, train.eval_batches)))


def draw(result: dict, path: Path) -> None:
    """Plots the loss over the share of weights that are kept: mean, and range over the seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    unstructured = [row for row in result["rows"] if row["pattern"] != "2:4"]
    two = [row for row in result["rows"] if row["pattern"] == "2:4"]
    kept = [100 * row["kept"] for row in unstructured]
    for way, colour in WAYS.items():
        losses = np.array([row[way] for row in unstructured])
        axes.plot(kept, losses.mean(1), "o-", color=colour, label=way)
        axes.fill_between(kept, losses.min(1), losses.max(1), color=colour, alpha=0.25, lw=0)
        axes.plot(50, np.mean(two[0][way]), "D", color=colour, mec="black", label=f"{way}, 2:4")
    axes.set_xscale("log", base=2)
    axes.set_xticks(kept, [f"{share:.3g}%" for share in kept])
    axes.invert_xaxis()
    dense = np.mean(unstructured[0]["rewound"])
    axes.set_ylim(dense - 0.5, dense + 1)  # without training the loss soon leaves the picture
    axes.axhline(dense, color="black", lw=0.6, ls=":")
    axes.set(
        xlabel="weights kept in the matrices of the blocks",
        ylabel="validation loss, nats per token",
        title=f"{result['config']}, {result['steps']} steps, {result['device']}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "pruning"}):  # the same picture gives the same file
        figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m learn.pruning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="gpt2_small", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="models; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one seed")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw stored results")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/learn"), metavar="DIR")
    arguments, more = parser.parse_known_args(argv)
    try:
        if arguments.draw:
            result = json.loads(arguments.draw.read_text())
            if "rows" not in result:
                raise InputError(f"{arguments.draw} has no rows: name a pruning.json")
            draw(result, arguments.draw.with_suffix(".svg"))
            return 0
        if arguments.seeds < 1:
            raise InputError(f"--seeds {arguments.seeds} is below 1: raise it")
        overrides = overrides_of(more)
        config = load(arguments.config, (QUICK if arguments.quick else {}) | overrides)
        if config.train.steps < STRETCHES:
            raise InputError(f"train.steps={config.train.steps} is below {STRETCHES}: raise it")
        set_xla_flags(config.train.deterministic)
        data = read_data(config)
        arguments.out.mkdir(parents=True, exist_ok=True)  # before the training, which it would lose
    except (InputError, OSError, json.JSONDecodeError) as error:
        raise SystemExit(f"error: {error}") from error
    start = time.perf_counter()
    sweep = Sweep(config, 1 if arguments.quick else arguments.seeds, *data)
    rows = sweep.run()
    result = {
        "config": arguments.config,
        "steps": sweep.steps,
        "early": sweep.early,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }
    (arguments.out / "pruning.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, arguments.out / "pruning.svg")
    print(f"wrote {arguments.out}/pruning.json and pruning.svg after {result['seconds']} s")
    return 0


def overrides_of(words: list[str]) -> dict[str, str]:
    """{"train.steps": "9"} of --train.steps 9."""
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise InputError(f"{' '.join(words)} is not a list of --section.key VALUE")
    return dict(zip([word[2:] for word in words[::2]], words[1::2], strict=True))


if __name__ == "__main__":
    sys.exit(main())
