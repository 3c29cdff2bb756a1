"""Measures what train.verify_every costs: the time of steps that are computed twice.

    python tests/verify_cost.py gpt2_124m 32
    python tests/verify_cost.py llama3_1b 4

Trains on random tokens, verifies every tenth step, and prints the median times of both kinds of
steps and what verifying every 200th step costs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from resume_memory import ROOT, random_run

EVERY, STEPS, FIRST = 10, 200, 50  # the steps before FIRST warm up
ASKED = 200


def main() -> None:
    from jaxllm.train.metrics import read_metrics

    name, batch, overrides = sys.argv[1], sys.argv[2], sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        words = random_run(name, batch, Path(folder), 20) + ["--train.steps", str(STEPS)]
        words += ["--train.checkpoint_every", "0", "--out_dir", f"{folder}/run", *overrides]
        words += ["--train.verify_every", str(EVERY)]
        subprocess.run([sys.executable, "train.py", "--config", name, *words], cwd=ROOT, check=True)
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    times = {r["step"]: r["step_ms"] for r in rows if r.get("step_ms") and r["step"] > FIRST}
    once = median(ms for step, ms in times.items() if step % EVERY)
    twice = median(ms for step, ms in times.items() if not step % EVERY)
    print(
        f"{name}, batch {batch}: {once:.2f} ms a step, {twice:.2f} ms a verified one; every"
        f" {ASKED} steps costs {(twice - once) / once / ASKED:.2%}"
    )


if __name__ == "__main__":
    main()
