"""Run by test_processes.py: starts, resumes, stops and kills several processes; prints JSON.

python process_runs.py FOLDER CONFIG

All processes are forks of this one, which has imported everything and started nothing, and share
one compilation, so that each costs a second or two.
"""

import ctypes
import importlib
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from killed_runs import REPO, import_all

SMALL = """--model.n_layers 1 --model.n_kv_heads 2 --train.steps 6 --train.checkpoint_every 3
    --train.eval_every 0""".split()


class Command:
    """A forked process that calls `body`, with its output in a file."""

    def __init__(self, name: str, body: Callable[[], int], **env: str):
        self.log = FOLDER / f"{name}.log"
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with this driver
            output = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(env)
            os._exit(body())

    def wait(self) -> dict:
        """Its exit status, its output, and how many seconds it took to end."""
        began = time.monotonic()
        while time.monotonic() - began < 200:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began
                return {"status": code, "output": self.log.read_text(), "seconds": seconds}
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise TimeoutError(self.log.read_text())

    def until(self, ready: Callable[[str], bool]) -> None:
        """Waits until its output is `ready`."""
        end = time.monotonic() + 200
        while not self.log.exists() or not ready(self.log.read_text()):
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def trainers(self) -> list[int]:
        """The processes that it started, in order."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return sorted(map(int, children.split()))


def train(name: str, *words: str, **env: str) -> Command:
    import train

    words = ("--config", CONFIG, *SMALL, "--out_dir", str(FOLDER / name), *words)
    return Command(name, lambda: train.main(list(words)), **env)


def resumed(name: str, *words: str, **env: str) -> Command:
    """Resumes a copy of the run `two` from its checkpoint of step 3."""
    shutil.copytree(FOLDER / "two", FOLDER / name)
    shutil.rmtree(FOLDER / name / "checkpoints" / "6")
    return train(name, "--resume", "--sample.tokens", "0", *words, **env)


def slurm(rank: int) -> dict:
    """The environment that Slurm gives a task; JAX derives the port from the job id."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def killed_on_another_mesh() -> dict:
    """Processes resume the run of two on another mesh; the last is killed after the checkpoint."""
    count = 4 if EVERY else 2
    mesh = ["--mesh.fsdp", str(count // 2), "--mesh.tensor", "2"]  # pairs read the same rows
    command = resumed("other", "--processes", str(count), *mesh, "--train.steps", "100000000")
    saved = FOLDER / "other" / "checkpoints" / "6" / "_CHECKPOINT_METADATA"
    metrics = FOLDER / "other" / "metrics.jsonl"
    command.until(lambda output: saved.exists() and '"step": 9,' in metrics.read_text())
    victim = command.trainers()[-1]
    os.kill(victim, signal.SIGKILL)
    return {"count": count, "victim": victim} | command.wait()


def pair(name: str) -> list[Command]:
    """Two commands of one process each, as on two machines, which only talk to each other."""

    def talk(log: Path) -> int:
        for step in itertools.count():
            multihost_utils.process_allgather(np.ones(1))
            with log.open("a") as file:  # only the first process prints
                file.write(f"step {step}/\n")
            if number := processes.stops_after(step):
                return 128 + number
            time.sleep(0.05)

    import numpy as np
    from jax.experimental import multihost_utils

    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"

    def body(i: int) -> int:
        place = Namespace(processes=2, process=i, coordinator=address)
        return processes.watch(processes.places(place), partial(talk, FOLDER / f"{name}_{i}.log"))

    return [Command(f"{name}_{i}", partial(body, i)) for i in range(2)]


def main() -> dict:
    fsdp, results = ["--mesh.fsdp", "2"], {}
    tasks = [train("two", "--mesh.distributed", "true", *fsdp, **slurm(i)) for i in range(2)]
    pairs = {name: pair(name) for name in ("killed_0", "killed_1", "stopped")}
    for commands in pairs.values():
        for command in commands:
            command.until(lambda output: "step 3/" in output)
    victims = [pairs[f"killed_{i}"][i].trainers()[0] for i in range(2)]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    os.kill(pairs["stopped"][1].pid, signal.SIGTERM)
    for name, commands in pairs.items():
        results[name] = [command.wait() for command in commands]
    results["victims"] = victims
    results["two"] = [task.wait() for task in tasks]
    results["same"] = resumed("same", "--processes", "2", *fsdp).wait()
    if EVERY:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
        results["one_process"] = resumed("one_process", *fsdp, XLA_FLAGS=flags).wait()
        results["alone"] = train("alone", "--mesh.distributed", "true").wait()
    results["other"] = killed_on_another_mesh()
    return results


def prepare(folder: Path) -> None:
    """Imports everything, for forks that keep their output in `folder` and share compilations."""
    global FOLDER, processes
    FOLDER = folder
    os.chdir(REPO)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(FOLDER / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ.setdefault("NPROC", "16")  # with two threads, two devices could wait for each other
    import_all()
    processes = importlib.import_module("jaxllm.train.processes")
    processes.HEARTBEAT = 10  # so that a dead process is noticed soon, and a busy one is not


if __name__ == "__main__":
    CONFIG, EVERY = sys.argv[2], sys.argv[3:] == ["every"]
    os.environ["JAX_PLATFORMS"] = "cpu"
    prepare(Path(sys.argv[1]))
    print(json.dumps(main()))
