"""Times the way to the first training step, by phases: a cold start, and more of the same run.

    python tests/first_step.py gpt2_124m
    python tests/first_step.py llama3_1b --starts 3 --train.batch_size 16 --train.grad_accum 4
    python tests/first_step.py my_lora.yaml --model.init_from FOLDER

Runs `jaxllm train` on random tokens, or on --data.path, in new processes with an empty cache that
they share, and ends each after its first step.  A phase is the time of the main thread in it,
without the phases inside it, so the rows add up to the total; below it is what other threads did
beside it, with the phases inside.  A cold start has no compiled program, but the system may hold
the files of Python and CUDA; the first of all reads them.  The clock starts before Python does.
"""

import builtins
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
CHILD = "FIRST_STEP"  # in the environment of a start: the file of its result and when it began
PHASES = {  # {module:function: phase}; what a commit lacks is left out
    "jaxllm.train.launch:join_devices": "devices",
    "jaxllm.train.launch:make_trainer": "shapes of the model",
    "jaxllm.train.launch:open_initial_weights": "weights opened",
    "jaxllm.train.run:open_dataset": "data",
    "jaxllm.train.launch:initial_state": "state",
    "jaxllm.train.step:Trainer.trace_train_step": "trace",
    "jax.stages:Traced.lower": "lower",
    "jax.stages:Lowered.compile": "compile, or read from JAX's cache",
    "jaxllm.train.programs:read": "read the step",
    "jaxllm.train.programs:write": "keep the step",
    "jaxllm.train.launch:compile_step": "rest of the step's program",
    "jaxllm.train.run:_start_devices": "devices",
    "concurrent.futures:Future.result": "wait for the step's program",
    "jaxllm.train.launch:open_log": "log",
    "jaxllm.train.run:Run.loop": "first batch and step",
    "jaxllm.train.profiling:StepClock.started": "first batch and step",
}
IMPORTS, REST, TOTAL, BESIDE = "imports", "rest", "total", "beside: "


class Phases:
    """Seconds of the main thread in each phase, without the phases inside it."""

    def __init__(self, began: float):
        self.seconds, self.inside = defaultdict(float), [REST]
        self.clock = began

    def change(self, to: str | None) -> None:
        """Enters a phase, or leaves the innermost one if `to` is None."""
        now = time.time()
        self.seconds[self.inside[-1]] += now - self.clock
        self.clock = now
        if to is None:
            self.inside.pop()
        else:
            self.inside.append(to)

    def timed(self, function, phase: str):
        """The function, whose time in the main thread counts for `phase`."""

        @functools.wraps(function)
        def run(*args, **options):
            if threading.current_thread() is not threading.main_thread():
                clock = time.time()
                result = function(*args, **options)
                self.seconds[f"{BESIDE}{phase}"] += time.time() - clock
                return result
            self.change(phase)
            try:
                return function(*args, **options)
            finally:
                self.change(None)

        return run


def start(argv: list[str]) -> None:
    """Trains until the first step is done; writes the phases, and ends the process."""
    out, began = os.environ[CHILD].split(os.pathsep)
    phases, pending = Phases(float(began)), dict(PHASES)
    plain, depth = builtins.__import__, 0

    def end(function):
        def run(clock, step, metrics):
            function(clock, step, metrics)
            float(metrics["loss"])
            phases.change(REST)
            seconds = phases.seconds | {TOTAL: time.time() - float(began)}
            Path(out).write_text(json.dumps(seconds))
            sys.stdout.flush()
            os._exit(0)

        return run

    def patch():
        for where in list(pending):
            module, _, path = where.partition(":")
            *owners, name = path.split(".")
            owner = sys.modules.get(module)
            for part in owners:
                owner = getattr(owner, part, None)
            if not hasattr(owner, name):
                continue
            function = phases.timed(getattr(owner, name), pending.pop(where))
            setattr(owner, name, end(function) if name == "started" else function)

    def timed_import(*args, **options):
        nonlocal depth
        if depth or threading.current_thread() is not threading.main_thread():
            return plain(*args, **options)
        depth = 1
        phases.change(IMPORTS)
        try:
            return plain(*args, **options)
        finally:
            phases.change(None)
            depth = 0
            patch()

    builtins.__import__ = timed_import
    from jaxllm.commands import run

    status = run("train", argv)
    sys.exit(status or "the run ended before its first step")


def random_shards(folder: Path, config: str, overrides: dict[str, str]) -> dict[str, str]:
    """Overrides that name new shards with random tokens for this configuration."""
    import numpy as np

    from jaxllm.config import load
    from jaxllm.data.shards import ShardWriter

    loaded = load(config, overrides | {"data.source": "shards", "data.path": "x"})
    vocab, rows = loaded.model.vocab_size, loaded.train.batch_size
    count = max(2 * rows * loaded.train.seq_len, 1 << 20) + 1
    found = {"data.source": "shards"}
    for key in ("path", "val_path"):
        writer = ShardWriter(folder / f"{key}.bin", vocab)
        writer.append(np.random.default_rng(len(key)).integers(0, vocab, count))
        writer.close()
        found[f"data.{key}"] = str(folder / f"{key}.bin")
    return found


def main() -> int:
    from scripts import Parser

    parser = Parser(__doc__)
    parser.add_argument("config")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="a folder instead of a new one, then not cold")
    arguments, rest = parser.parse_known_args()
    overrides = parser.overrides(rest)
    with tempfile.TemporaryDirectory() as temporary:
        folder, starts = Path(temporary), []
        if "data.path" not in overrides:
            overrides |= random_shards(folder, arguments.config, overrides)
        options = [word for key, value in overrides.items() for word in (f"--{key}", value)]
        for i in range(arguments.starts):
            out = folder / f"{i}.json"
            environment = os.environ | {
                "XDG_CACHE_HOME": str(arguments.cache or folder / "cache"),
                CHILD: f"{out}{os.pathsep}{time.time()}",
            }
            words = [sys.executable, __file__, "--config", arguments.config, *options]
            words += ["--out_dir", str(folder / f"run{i}")]
            if status := subprocess.run(words, env=environment).returncode:
                return status  # it has said why
            starts.append(json.loads(out.read_text()))
    print(f"\n{arguments.config}, seconds of starts after each other:")
    phases = [IMPORTS, *dict.fromkeys(PHASES.values()), REST, TOTAL]
    for name in [*phases, *(f"{BESIDE}{phase}" for phase in phases)]:
        if any(name in start for start in starts):
            print(f"{name:<42}" + "".join(f"{start.get(name, 0):8.2f}" for start in starts))
    if sys.flags.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: each start may compile what it imports")
    return 0


if __name__ == "__main__":
    if CHILD in os.environ:
        start(sys.argv[1:])
    else:
        import scripts  # here, because its imports would count as a start's

        scripts.run(main)
