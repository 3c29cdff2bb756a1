"""Speed of whole steps with gradient accumulation: tokens/s, memory, joules, seconds to start.

    python tests/accumulate_speed.py 1.3b 1.3b-fp8           without a name: all cases but jla-*
    python tests/accumulate_speed.py --cold llama3_3b
    python tests/accumulate_speed.py --cold 1.3b jla-1.3b 1.3b-fp8 jla-1.3b-fp8

Each case runs in two processes, one after the other, which share a cache: the first starts cold,
the second finds what the first one compiled.  A line of JSON each, to the screen and to
$OUT/accumulate_speed.jsonl.  --cold: without the second.  TREE=path takes the package of another
checkout.  The cases jla-* are the same model in jax-linear-attention 0.1.0, which needs JAX 0.11.2
and starts cold only.  It needs a GPU: 60 to 90 s a case, jla's 120 to 170; `--dry` checks on a CPU
that it runs.
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

from late_steps import take

BIG = """
model: {type: llama3, vocab_size: 128256, n_layers: 24, n_heads: 32, n_kv_heads: 8, d_model: 2048,
  d_ff: 5632, max_seq_len: 4096, rope_theta: 10000.0, tie_embeddings: false, norm_eps: 1.0e-6}
data: {source: stdlib, tokenizer_vocab_size: 8192}
train: {steps: 40, batch_size: 16, seq_len: 4096, grad_accum: 2}
optimizer: {learning_rate: 3.0e-4, warmup_steps: 2, weight_decay: 0.1}
"""
ONE = {"train.grad_accum": "1"}
THREE = {"n_layers": 28, "d_model": 3072, "n_heads": 24, "d_ff": 8192, "remat": "dots"}
SMALL = ONE | {"train.batch_size": "32"}  # the models of 124M
# In the best settings found for jla, whose authors give it four parts: with the parts of a batch
# unrolled it needs 109 GiB.
JLA = """
name = "jla"
model = {preset = "transformer-1p3b", remat = "none", lean_vjp = true}
optim = {lr = 3e-4, warmup_steps = 2}
data = {source = "synthetic", synthetic_kind = "uniform"}
[train]
max_steps = 14
seq_len = 4096
micro_batch_per_replica = 4
grad_accum = 4
scan_unroll = 1
log_every = 1
final_eval = false
save_final = false
ce_impl = "auto"
ce_grad_in_forward = true
dispatch_ahead = true
update_guard = "select"
resume = "never"
"""
JLA_FP8 = {"model.fp8": '"delayed"', "model.fp8_fused": "true"}
CASES = {  # the configuration, its overrides, timed steps
    "1.3b": (BIG, {}, 12),
    "1.3b-fp8": (BIG, {"train.fp8": "all"}, 14),
    "jla-1.3b": (JLA, {}, 14),
    "jla-1.3b-fp8": (JLA, JLA_FP8, 14),
    "llama3_1b": ("llama3_1b", ONE | {"train.batch_size": "4"}, 60),
    # Llama 3.2 3B; T and rows as above.
    "llama3_3b": (
        "llama3_1b",
        ONE | {"train.batch_size": "4"} | {f"model.{key}": str(n) for key, n in THREE.items()},
        30,
    ),
    "gpt2_124m": ("gpt2_124m", SMALL, 120),
    "gpt2_124m-512": ("gpt2_124m", {}, 8),  # 16 parts of 32 rows, as the configuration says
    "gpt2_124m-512-muon": ("gpt2_124m", {"optimizer.name": "muon"}, 8),
    "llama3_124m": ("llama3_124m", SMALL, 120),
    "vlstm_124m": ("vlstm_124m", SMALL, 120),
}
DRY = {"n_layers": 1, "d_model": 64, "n_heads": 2, "vocab_size": 300, "max_seq_len": 32}


def joules() -> float:
    """The GPU's energy counter (NVML, which counts all GPUs of the host)."""
    number = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    nvml, total = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_ulonglong()
    device = ctypes.c_void_p()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
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
    from jaxllm.data.cache import keep_compiled
    from jaxllm.sharding import make_mesh
    from jaxllm.train import programs
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
    keep_compiled()
    trainer = Trainer(config, make_mesh(config.mesh))
    lap("program")
    timings = None if dry else Path(folder) / "timings.txt"
    program = programs.find_or_compile(trainer, Trainer.trace_train_step, timings)
    lap("state")
    state = jax.block_until_ready(trainer.init())
    lap("first step")
    rows, width = config.train.batch_size, config.train.seq_len
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.model.vocab_size, (rows, width + 1), dtype=np.int32)
    batch = trainer.put_batch({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    with no_long_pauses():
        state, metrics, _ = take(program, state, [batch])
        lap("end")
        state, more, _ = take(program, state, [batch] * 4)
        energy = 0 if dry else joules()
        state, last, seconds = take(program, state, [batch] * count)
        energy = 0 if dry else joules() - energy
    losses = [values["loss"] for values in (*metrics, *more, *last)]
    pairs = zip(clocks, clocks[1:], strict=False)
    parts = {name: round(after - before, 2) for (name, before), (_, after) in pairs}
    size = rows * width
    return {
        "case": case,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "tokens/s": round(size / statistics.median(seconds)),
        "joules/token": energy / (count * size),
        "GiB": peak_memory(),
        "to the first step, s": round(clocks[-1][1] - clocks[0][1], 1),
        **parts,
        "losses": [losses[0], losses[3], losses[-1]],
    }


def measure_jla(case: str, folder: str, dry: bool) -> dict:
    """tokens/s of the steps without the first two and the last, which its log shortens."""
    text, overrides, _ = CASES[case]
    file, out = Path(folder, "jla.toml"), Path(folder, "run")
    file.write_text(text)
    overrides = overrides | {"train.output_dir": f'"{out}"'}
    if dry:
        overrides |= {"model.preset": '"tiny"', "train.seq_len": "64", "train.max_steps": "5"}
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "jla.cli", "train", "--config", str(file), *words]
    clock = time.perf_counter()
    subprocess.run(command, stdout=sys.stderr, check=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] for row in rows if row["event"] == "train"]
    return {
        "case": case,
        "tokens/s": round(statistics.median(step["tokens_per_sec"] for step in steps[2:-1])),
        "all of it, s": round(time.perf_counter() - clock, 1),
        "losses": [steps[i]["loss"] for i in (0, 3, -1)],
    }


def child() -> None:
    """Measures the case of argv; imports nothing before its clock starts."""
    case, dry = sys.argv[1], "--dry" in sys.argv
    how = measure_jla if case.startswith("jla") else measure
    figures = how(case, os.environ["CASE_FOLDER"], dry)
    print(json.dumps({"start": os.environ["CASE_START"]} | figures))


def main() -> None:
    from scripts import Parser, needs_gpu, one_of

    parser = Parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--cold", action="store_true", help="without the second process")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU")
    arguments = parser.parse_args()
    dry, cold = arguments.dry, arguments.cold
    for case in arguments.cases:
        one_of("case", case, CASES)
    if not dry:
        needs_gpu()
    tree = os.environ.get("TREE", str(Path(__file__).parents[1]))
    out = Path(os.environ.get("OUT", tempfile.gettempdir())) / "accumulate_speed.jsonl"
    for case in arguments.cases or (case for case in CASES if not case.startswith("jla")):
        once = cold or case.startswith("jla")
        with tempfile.TemporaryDirectory() as folder:
            for start in ("cold",) if once else ("cold", "second"):
                environment = os.environ | {
                    "CASE_FOLDER": folder,
                    "CASE_START": start,
                    "XDG_CACHE_HOME": folder,
                    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",  # 0.75 is too little for the 3B
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
    if "CASE_FOLDER" in os.environ:
        child()
    else:
        import scripts  # here, because its imports would count as a case's

        scripts.run(main)
