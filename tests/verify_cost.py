"""Measures what train.verify_every costs: tokens/s of a run with it and of one without it.

    python tests/verify_cost.py gpt2_124m 32
    python tests/verify_cost.py llama3_1b 4 --every 200 --steps 500

Trains on random tokens, without and with, twice each and in turn, and prints the mean tokens/s
between step 100 and the last step.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from resume_memory import ROOT, random_run

FIRST = 100  # steps before it warm up


def speed(name: str, batch: str, steps: int, every: int) -> float:
    """Tokens/s of the steps after FIRST."""
    from jaxllm.train.metrics import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        words = random_run(name, batch, Path(folder), 20) + ["--train.steps", str(steps)]
        words += ["--train.checkpoint_every", "0", "--out_dir", f"{folder}/run"]
        words += ["--train.verify_every", str(every), "--train.log_every", str(FIRST)]
        subprocess.run([sys.executable, "train.py", "--config", name, *words], cwd=ROOT, check=True)
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    rows = {r["step"]: r for r in rows if "tokens" in r}
    seconds = rows[steps]["seconds"] - rows[FIRST]["seconds"]
    return (rows[steps]["tokens"] - rows[FIRST]["tokens"]) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("batch")
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    without, verified = [], []
    for _ in range(2):
        without.append(speed(args.config, args.batch, args.steps, 0))
        verified.append(speed(args.config, args.batch, args.steps, args.every))
    cost = 1 - max(verified) / max(without)
    print(f"{args.config}: {without} tokens/s without, {verified} with: costs {cost:.2%}")


if __name__ == "__main__":
    main()
