"""Starts runs of train.py and of scripts for tests, and reads their errors and results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

import train
from jaxllm import config as configs
from jaxllm.sharding import make_mesh
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.metrics import read_metrics
from jaxllm.train.step import Trainer

REPO = Path(__file__).resolve().parents[1]
STEPS = 60
TINY = {
    "model": {
        "type": "llama3",
        "vocab_size": 320,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_model": 64,
        "d_ff": 128,
        "max_seq_len": 32,
    },
    "data": {"source": "text", "tokenizer_vocab_size": 320},
    "train": {
        "steps": STEPS,
        "batch_size": 8,
        "seq_len": 32,
        "eval_every": 20,
        "eval_batches": 2,
        "checkpoint_every": 5,
        "autotune": False,  # tests compare runs
    },
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5},
    "sample": {"prompt": "the ", "tokens": 8, "every": 30},
}


def write_tiny(folder):
    """Writes a tiny configuration with a tiny corpus; returns its path."""
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "rat", "run"]
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(words, 3000)))
    content = json.loads(json.dumps(TINY))
    content["data"].update(path=str(folder / "*.txt"), cache_dir=str(folder / "cache"))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(tiny, out_dir, *more):
    return [sys.executable, "train.py", "--config", str(tiny), "--out_dir", str(out_dir), *more]


def run(tiny, out_dir, *more, **env):
    return subprocess.run(
        command(tiny, out_dir, *more),
        cwd=REPO,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def losses(out_dir):
    return {r["step"]: r["loss"] for r in read_metrics(out_dir / "metrics.jsonl") if "loss" in r}


def final_state(out_dir, step=STEPS):
    """The saved state, on this process's devices."""
    config = configs.load(str(out_dir / "config.yaml"), {"mesh.fsdp": "1"})
    trainer = Trainer(config, make_mesh(config.mesh))
    return Checkpoints(out_dir / "checkpoints", 1).restore(step, trainer.abstract_state().saved())


def devices(count):
    """The environment of a process with `count` forced CPU devices, which compiles as tests do."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def devices_run(script, count):
    """The JSON that a script of tests/ prints in a process with `count` forced CPU devices."""
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(REPO / "tests" / script)],
        env=os.environ | devices(count) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def error_of(capsys, *argv):
    status = train.main([str(a) for a in argv])
    captured = capsys.readouterr()
    assert status == 2, captured.out + captured.err
    # The data may print that it trains a tokenizer before the error, but nothing follows it.
    lines = captured.err.strip().splitlines()
    assert lines[-1].startswith("error: "), captured.err
    assert "Traceback" not in captured.err
    return lines[-1]
