"""Compares the memory of a resumed run with the memory of a fresh one.

    python tests/resume_memory.py llama3_1b 4
    python tests/resume_memory.py gpt2_124m 32 --train.fp8 all

Trains 6 steps on random tokens and saves after step 3, resumes from there in another process, and
prints the most memory that a device held in the first three steps of each.  The exit status is 1 if
they differ by more than 2%.  The checkpoint of llama3_1b takes 15 GB of disk, and as much memory of
the host while it is saved.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from scripts import Parser, run

ROOT = Path(__file__).resolve().parents[1]
MOST = 0.02


def peaks(out_dir: Path) -> dict[int, float]:
    """{step: GiB at most so far in the process that took it}."""
    from jaxllm.train.metrics import read_metrics

    rows = read_metrics(out_dir / "metrics.jsonl")
    return {r["step"]: r["peak_memory_gib"] for r in rows if "peak_memory_gib" in r}


def random_run(name: str, batch: str, folder: Path, steps: int) -> list[str]:
    """Writes random tokens for so many steps; returns what a run of them needs after --config."""
    from jaxllm.config import load
    from jaxllm.data.shards import ShardWriter

    config = load(name)
    length, vocab = config.train.seq_len, config.model.vocab_size
    for seed, part in enumerate(("train", "val")):  # equal files would be refused
        shard = ShardWriter(folder / f"{part}.bin", vocab)
        count = steps * int(batch) * length + 1
        shard.append(np.random.default_rng(seed).integers(0, vocab, count))
        shard.close()
    words = ["--data.source", "shards", "--data.path", f"{folder}/train.bin"]
    words += ["--data.val_path", f"{folder}/val.bin", "--train.batch_size", batch]
    words += ["--train.grad_accum", "1", "--train.eval_every", "0", "--train.eval_batches", "1"]
    return [*words, "--sample.tokens", "0"]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("config")
    parser.add_argument("batch", type=int)
    arguments, overrides = parser.parse_known_args()
    parser.overrides(overrides)
    name, batch = arguments.config, str(arguments.batch)
    with tempfile.TemporaryDirectory() as folder:
        out_dir = Path(folder) / "run"
        words = random_run(name, batch, Path(folder), 10) + ["--train.steps", "6", *overrides]
        words += ["--train.checkpoint_every", "3", "--out_dir", str(out_dir)]
        train = lambda *first: subprocess.run(
            [sys.executable, "train.py", *first, *words], cwd=ROOT, check=True
        )
        train("--config", name)
        fresh = peaks(out_dir)
        shutil.rmtree(out_dir / "checkpoints" / "6")
        train("--resume")
        resumed = peaks(out_dir)
    if not fresh:
        print("this device does not tell how much memory it holds")
        return 0
    one, other = fresh[3], resumed[6]
    more = other / one - 1
    print(f"{name}, batch {batch}: {one:.3f} GiB fresh, {other:.3f} GiB resumed ({more:+.2%})")
    return int(abs(more) > MOST)


if __name__ == "__main__":
    run(main)
