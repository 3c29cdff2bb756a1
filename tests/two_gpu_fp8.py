"""Tokens/s of whole steps on one GPU and on all of a host with mesh.fsdp, in bf16 and in fp8.

    python tests/two_gpu_fp8.py llama3_1b 4 2048       (configuration, rows a GPU, tokens a row)
    python tests/two_gpu_fp8.py llama3_8b 1 4096 --together --fp8 none --steps 20 --model.remat mlp

A line of JSON for each mesh and precision, to the screen and to $OUT/two_gpu_fp8.jsonl: tokens/s a
GPU, memory, losses, and whether a second run of the same steps has the same bits.  --together: on
all GPUs only, for a model that one does not hold.  Further words override settings of the
configuration, those of the mesh on all GPUs only (`--mesh.data 2 --mesh.fsdp 1`).  About 4 minutes
on two H100s, and 3 for the 8B; `--dry` checks on eight CPU devices that it runs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # the 8B's step needs 65 GiB
from jaxllm.train.process import set_xla_flags  # noqa: E402

set_xla_flags(deterministic=True)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from late_steps import take  # noqa: E402
from scripts import Parser, needs_gpu, run  # noqa: E402

from jaxllm.config import load  # noqa: E402
from jaxllm.sharding import make_mesh  # noqa: E402
from jaxllm.train import programs  # noqa: E402
from jaxllm.train.metrics import peak_memory  # noqa: E402
from jaxllm.train.process import no_long_pauses  # noqa: E402
from jaxllm.train.step import Trainer  # noqa: E402

SMALL = {"n_layers": 1, "d_model": 128, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128}
SMALL |= {"vocab_size": 256, "max_seq_len": 64, "kernels": "xla"}


def measure(a: argparse.Namespace, gpus: int, fp8: str, more: dict[str, str]) -> dict:
    rows, width = a.rows, a.width
    mesh = {"mesh.data": "1", "mesh.fsdp": str(gpus)}
    if gpus == 1:
        more = {key: value for key, value in more.items() if not key.startswith("mesh.")}
    overrides = mesh | more | {"train.fp8": fp8}
    overrides |= {"train.batch_size": str(gpus * rows), "train.seq_len": str(width)}
    overrides |= {"train.grad_accum": "1"}
    if DRY:
        overrides |= {f"model.{key}": str(value) for key, value in SMALL.items()}
    config = load(a.config, overrides)
    trainer = Trainer(config, make_mesh(config.mesh, jax.devices()[:gpus]))
    traced = trainer.trace_train_step()
    with tempfile.TemporaryDirectory() as folder:
        timings = None if DRY else Path(folder) / "timings.txt"
        program = programs.compile_autotuned(traced.lower, timings)
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.model.vocab_size, (gpus * rows, width + 1), dtype=np.int32)
    batch = trainer.put_batch({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    with no_long_pauses():
        first, seconds = take(program, trainer.init(), [batch] * (4 if DRY else a.steps))[1:]
        again = take(program, trainer.init(), [batch] * 4)[1]
    losses = [values["loss"] for values in first]
    return {
        "device": jax.devices()[0].device_kind,
        "GPUs": gpus,
        "fp8": fp8,
        "tokens/s a GPU": round(rows * width / statistics.median(seconds[2:])),
        "GiB": peak_memory(),
        "losses": [losses[i] for i in (0, 1, 3, -1)],
        "same bits": losses[:4] == [values["loss"] for values in again],
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("config")
    parser.add_argument("rows", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--fp8", nargs="*", default=["none", "all"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dry", action="store_true")
    a, rest = parser.parse_known_args()
    overrides = parser.overrides(rest)
    if not DRY:
        needs_gpu()
    out = Path(os.environ.get("OUT", tempfile.gettempdir())) / "two_gpu_fp8.jsonl"
    every = 2 if DRY else jax.device_count()
    for gpus in (every,) if a.together else (1, every):
        for fp8 in a.fp8:
            line = json.dumps(measure(a, gpus, fp8, overrides))
            print(line, flush=True)
            with out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    run(main)
