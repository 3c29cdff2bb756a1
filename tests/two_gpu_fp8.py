"""Tokens/s of whole steps on one GPU and on all of a host with mesh.fsdp, in bf16 and in fp8.

    python tests/two_gpu_fp8.py llama3_1b 4 2048       (configuration, rows a GPU, tokens a row)

A line of JSON for each mesh and precision, to the screen and to $OUT/two_gpu_fp8.jsonl: tokens/s a
GPU, memory, losses, and whether a second run of the same steps has the same bits.  About 4 minutes
on two H100s; `--dry` checks on eight CPU devices that it runs.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from jaxllm.train.process import set_xla_flags  # noqa: E402

set_xla_flags(deterministic=True)

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxllm.config import load  # noqa: E402
from jaxllm.sharding import make_mesh  # noqa: E402
from jaxllm.train import programs  # noqa: E402
from jaxllm.train.metrics import peak_memory  # noqa: E402
from jaxllm.train.process import no_long_pauses  # noqa: E402
from jaxllm.train.step import Trainer  # noqa: E402

SMALL = {"n_layers": 1, "d_model": 128, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128}
SMALL |= {"vocab_size": 256, "max_seq_len": 64, "kernels": "xla"}


def measure(name: str, rows: int, width: int, gpus: int, fp8: str) -> dict:
    overrides = {"mesh.data": "1", "mesh.fsdp": str(gpus), "train.fp8": fp8}
    overrides |= {"train.batch_size": str(gpus * rows), "train.seq_len": str(width)}
    overrides |= {"train.grad_accum": "1"}
    if DRY:
        overrides |= {f"model.{key}": str(value) for key, value in SMALL.items()}
    config = load(name, overrides)
    trainer = Trainer(config, make_mesh(config.mesh, jax.devices()[:gpus]))
    lowered = trainer.trace_train_step().lower()
    program = programs.compile_autotuned(lowered, None)
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.model.vocab_size, (gpus * rows, width + 1), dtype=np.int32)
    batch = trainer.put_batch({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    runs, seconds = [], []
    with no_long_pauses():
        for count in (4 if DRY else 60, 4):
            state, losses = trainer.init(), []
            for _ in range(count):
                clock = time.perf_counter()
                state, metrics = program(state, batch)
                losses.append(float(metrics["loss"]))
                seconds.append(time.perf_counter() - clock)
            runs.append(losses)
            del state
    return {
        "device": jax.devices()[0].device_kind,
        "GPUs": gpus,
        "fp8": fp8,
        "tokens/s a GPU": round(rows * width / statistics.median(seconds[2 : len(runs[0])])),
        "GiB": peak_memory(),
        "losses": [runs[0][i] for i in (0, 1, 3, -1)],
        "same bits": runs[0][:4] == runs[1],
    }


def main() -> None:
    name, rows, width = [word for word in sys.argv[1:] if word != "--dry"]
    out = Path(os.environ.get("OUT", tempfile.gettempdir())) / "two_gpu_fp8.jsonl"
    for gpus in (1, 2 if DRY else jax.device_count()):
        for fp8 in ("none", "all"):
            line = json.dumps(measure(name, int(rows), int(width), gpus, fp8))
            print(line, flush=True)
            with out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
