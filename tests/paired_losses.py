"""Compares the losses of our kernels with those of XLA's forms in paired runs of GPT-2 124M.

    jaxllm data train-tokenizer --source stdlib --vocab_size 16384 --out tok.json
    jaxllm data prepare --source stdlib --tokenizer tok.json --out shards \\
        --val_fraction 0.03
    python tests/paired_losses.py run auto shards losses.jsonl --seeds 0 16
    python tests/paired_losses.py run xla shards losses.jsonl --seeds 0 16
    python tests/paired_losses.py draw losses.jsonl --out docs/losses.png

The seed alone determines a run's parameters and the order of its data.  16 pairs of 500 steps at
batch 8 take four minutes on two H200, with two processes on each GPU: one for each implementation,
with half of the seeds.
"""

import json
import statistics
from pathlib import Path

import numpy as np
from scripts import Parser
from scripts import run as run_script

from jaxllm.errors import InputError

BATCH, EVAL_BATCHES = 8, 16


def shard(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint16)[512:]  # skips a header of 256 int32


def batch_of(data: np.ndarray, starts, length: int) -> dict[str, np.ndarray]:
    rows = np.stack([data[s : s + length + 1] for s in starts]).astype(np.int32)
    return {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}


def run(kernels: str, shards: Path, out: Path, seeds: range, steps: int) -> None:
    from jaxllm.train.process import set_xla_flags

    set_xla_flags(deterministic=True)
    from jaxllm import sharding
    from jaxllm.config import Config, load
    from jaxllm.train.step import Trainer

    found = [next(shards.glob(f"{part}_*.bin"), None) for part in ("train", "val")]
    if None in found:
        raise InputError(
            f"{shards} has no train_*.bin and val_*.bin; jaxllm data prepare makes them"
        )
    train, val = map(shard, found)

    def trainer(seed: int) -> Trainer:
        values = load("gpt2_124m").model_dump()
        values["model"]["kernels"] = kernels
        values["train"] |= {"steps": steps, "batch_size": BATCH, "grad_accum": 1, "seed": seed}
        values["optimizer"]["warmup_steps"] = steps // 10
        config = Config.model_validate(values)
        return Trainer(config, sharding.make_mesh(config.mesh))

    length, program = trainer(0).config.train.seq_len, None
    held_out = np.arange(EVAL_BATCHES * BATCH).reshape(-1, BATCH) * length
    for seed in seeds:
        now = trainer(seed)
        if program is None:  # the program does not depend on the seed
            program, evaluate = now.trace_train_step().lower().compile(), now.eval_step()
        state, losses = now.init(), []
        windows = np.random.default_rng(seed).permutation((len(train) - 1) // length) * length
        for step in range(steps):
            starts = np.take(windows, range(step * BATCH, (step + 1) * BATCH), mode="wrap")
            state, metrics = program(state, now.put_batch(batch_of(train, starts, length)))
            losses.append(metrics["loss"])
        sums = [
            evaluate(state.params, now.put_batch(batch_of(val, starts, length)))
            for starts in held_out
        ]
        loss, count = (sum(float(x) for x in xs) for xs in zip(*sums, strict=True))
        row = {"kernels": kernels, "seed": seed, "steps": steps, "val": loss / count}
        row["train"] = [round(float(x), 5) for x in losses[9::10]]
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{kernels} seed {seed}: validation loss {row['val']:.4f}", flush=True)


def mean_and_error(differences) -> tuple[float, float]:
    """The mean and its standard error."""
    return statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5


def draw(files: list[Path], out: Path) -> None:
    from matplotlib.figure import Figure

    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    by = {(row["kernels"], row["seed"]): row for row in rows}
    seeds = sorted(seed for kernels, seed in by if kernels == "auto" and ("xla", seed) in by)
    pairs = [(by["auto", seed], by["xla", seed]) for seed in seeds]
    val = [a["val"] - x["val"] for a, x in pairs]
    train = np.array([np.subtract(a["train"], x["train"]) for a, x in pairs])
    mean, error = mean_and_error(val)
    print(f"validation, auto - xla: {mean:+.4f}, standard error {error:.4f}, {len(val)} seeds")
    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    steps = 10 * np.arange(1, train.shape[1] + 1)
    middle = train.mean(0)
    band = 2 * train.std(0, ddof=1) / len(train) ** 0.5
    left.fill_between(steps, middle - band, middle + band, color="#4477aa", alpha=0.3, lw=0)
    left.plot(steps, middle, color="#4477aa", lw=1)
    left.set(xlabel="step", ylabel="auto - xla", title="training loss, mean ± 2 standard errors")
    right.plot(np.zeros(len(val)), val, "o", color="#4477aa", alpha=0.4)
    right.errorbar([0.5], [mean], [2 * error], fmt="o", color="#aa3377", capsize=4)
    right.set(title=f"validation, step {pairs[0][0]['steps']}", xlim=(-0.5, 1), xticks=[0, 0.5])
    right.set_xticklabels(["seeds", "mean"])
    for axes in (left, right):
        axes.axhline(0, color="black", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


def main() -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("kernels", choices=("auto", "mosaic", "xla"))
    one.add_argument("shards", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--seeds", nargs=2, type=int, default=(0, 16), metavar=("FIRST", "END"))
    one.add_argument("--steps", type=int, default=500)
    two = commands.add_parser("draw")
    two.add_argument("files", nargs="+", type=Path)
    two.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    if a.command == "run":
        run(a.kernels, a.shards, a.out, range(*a.seeds), a.steps)
    else:
        draw(a.files, a.out)
    return 0


if __name__ == "__main__":
    run_script(main)
