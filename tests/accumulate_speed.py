"""Speed of whole steps with gradient accumulation: tokens/s, memory, joules, seconds to start.

    python tests/accumulate_speed.py 1.3b 1.3b-fp8                (all cases without a name)

Each case runs in two processes, one after the other, which share a cache: the first starts cold,
the second finds what the first one compiled.  A line of JSON each, to the screen and to
$OUT/accumulate_speed.jsonl.  TREE=path takes the package of another checkout.  It needs a GPU:
60 to 90 s a case; `--dry` checks on a CPU that it runs.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIG = """
model: {type: llama3, vocab_size: 128256, n_layers: 24, n_heads: 32, n_kv_heads: 8, d_model: 2048,
  d_ff: 5632, max_seq_len: 4096, rope_theta: 10000.0, tie_embeddings: false, norm_eps: 1.0e-6}
data: {source: stdlib, tokenizer_vocab_size: 8192}
train: {steps: 40, batch_size: 16, seq_len: 4096, grad_accum: 4}
optimizer: {learning_rate: 3.0e-4, warmup_steps: 2, weight_decay: 0.1}
"""
ONE = {"train.grad_accum": "1"}
MUON = {"optimizer.name": "muon"}
GPT2 = ONE | {"train.batch_size": "32"}
CASES = {  # the configuration, its overrides, timed steps
    "1.3b": (BIG, {}, 12),
    "1.3b-fp8": (BIG, {"train.fp8": "all"}, 14),
    "llama3_1b": ("llama3_1b", ONE | {"train.batch_size": "4"}, 60),
    "gpt2_124m": ("gpt2_124m", GPT2, 120),
    "gpt2_124m-muon": ("gpt2_124m", GPT2 | MUON, 120),
}
DRY = {"n_layers": 1, "d_model": 64, "n_heads": 2, "vocab_size": 300, "max_seq_len": 32}


def joules() -> float:
    """The GPU's energy counter (NVML)."""
    nvml, total = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_ulonglong()
    device = ctypes.c_void_p()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(total))
    return total.value / 1000


def measure(case: str, folder: str, dry: bool) -> dict:
    """Seconds up to the first step's end by part, then the figures of some steps."""
    clocks = [("imports", time.perf_counter())]
    lap = lambda name: clocks.append((name, time.perf_counter()))
    from jaxllm.train.process import set_xla_flags

    set_xla_flags(deterministic=True)
    import jax
    import numpy as np

    from jaxllm.config import load
    from jaxllm.sharding import make_mesh
    from jaxllm.train import launch, programs
    from jaxllm.train.metrics import peak_memory
    from jaxllm.train.process import no_long_pauses
    from jaxllm.train.step import Trainer

    text, overrides, count = CASES[case]
    if text is BIG:
        Path(folder, "big.yaml").write_text(BIG)
        text = str(Path(folder, "big.yaml"))
    if dry:
        small = DRY | ({} if "gpt2" in case else {"n_kv_heads": 1, "d_ff": 64})
        overrides = overrides | {f"model.{key}": str(value) for key, value in small.items()}
        overrides |= {"train.seq_len": "32"}
        count = 3
    config = load(text, overrides)
    if hasattr(launch, "keep_compiled"):
        launch.keep_compiled()
    else:  # before this branch: a resumed run finds its own programs
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    trainer = Trainer(config, make_mesh(config.mesh))
    lap("trace")
    traced = trainer.trace_train_step()
    lap("lower")
    lowered = traced.lower()
    lap("compile")
    timings = None if dry else Path(folder) / "timings.txt"
    program = programs.compile_autotuned(lowered, timings)
    lap("state")
    state = jax.block_until_ready(trainer.init())
    lap("first step")
    rows, width = config.train.batch_size, config.train.seq_len
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.model.vocab_size, (rows, width + 1), dtype=np.int32)
    batch = trainer.put_batch({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    seconds, losses = [], []
    with no_long_pauses():
        for i in range(count + 4):
            if i == 4:
                energy = 0 if dry else joules()
            clock = time.perf_counter()
            state, metrics = program(state, batch)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - clock)
            if i == 0:
                lap("end")
        energy = 0 if dry else joules() - energy
    pairs = zip(clocks, clocks[1:], strict=False)
    parts = {name: round(after - before, 2) for (name, before), (_, after) in pairs}
    size = rows * width
    return {
        "case": case,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "tokens/s": round(size / statistics.median(seconds[4:])),
        "joules/token": energy / (count * size),
        "GiB": peak_memory(),
        "to the first step, s": round(clocks[-1][1] - clocks[0][1], 1),
        **parts,
        "losses": [losses[0], losses[3], losses[-1]],
    }


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--dry"]
    dry = "--dry" in sys.argv
    if "CASE_FOLDER" in os.environ:
        figures = measure(words[0], os.environ["CASE_FOLDER"], dry)
        return print(json.dumps({"start": os.environ["CASE_START"]} | figures))
    tree = os.environ.get("TREE", str(Path(__file__).parents[1]))
    out = Path(os.environ.get("OUT", tempfile.gettempdir())) / "accumulate_speed.jsonl"
    for case in words or CASES:
        with tempfile.TemporaryDirectory() as folder:
            for start in ("cold", "second"):
                environment = os.environ | {
                    "CASE_FOLDER": folder,
                    "CASE_START": start,
                    "XDG_CACHE_HOME": folder,
                    "PYTHONPATH": os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")]),
                }
                command = [sys.executable, __file__, case, *["--dry"] * dry]
                ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
                line = ran.stdout.strip().splitlines()[-1:] or [f"{case} failed: {ran.returncode}"]
                line = (
                    json.dumps({"tree": tree} | json.loads(line[0]))
                    if not ran.returncode
                    else line[0]
                )
                print(line, flush=True)
                with out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
