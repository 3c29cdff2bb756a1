"""Run by test_kills_and_full_disks.py: trains, kills the process at random moments, resumes it.

python killed_runs.py FOLDER KILLS SEED STEPS -- WORDS OF train.py

The processes are forks of this one, which has imported everything and started nothing: a life
costs two seconds instead of ten.  FOLDER/straight is a run without kills; run_1, run_2, ... are
runs that came to their end.  Prints JSON.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))


def life(words: list[str], log: Path, out_dir: Path, rng: random.Random | None) -> bool:
    """Runs one process: True if it finished, False if it was killed (never without rng)."""
    pid = os.fork()
    if pid == 0:
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import train

        os._exit(train.main(words))
    # Half of the kills come at any moment, half during a save.
    in_save = rng is not None and rng.random() < 0.5
    end = time.monotonic() + (rng.uniform(0, 5) if rng and not in_save else 120)
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, log.read_text()
            return True
        if in_save and saving(out_dir):
            time.sleep(rng.uniform(0, 0.1))
            break
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert rng is not None, f"hangs: {log.read_text()}"
    return False


def saving(out_dir: Path) -> bool:
    """Whether a save is in progress."""
    return any((out_dir / "checkpoints").glob("*tmp*"))


def main(folder: Path, kills: int, seed: int, steps: int, words: list[str]) -> None:
    rng, log, done, in_save = random.Random(seed), folder / "log", 0, 0
    steps_of = ["--train.steps", str(steps)]
    runs = [str(folder / "straight")]
    life([*words, *steps_of, "--out_dir", runs[0]], log, folder / "straight", None)
    out_dir = folder / "run_1"
    while len(runs) == 1 or done < kills:
        # A run that was killed very early has no config.yaml yet and cannot be resumed.
        more = ["--resume"] if (out_dir / "config.yaml").exists() else []
        more += [*steps_of, "--out_dir", str(out_dir)]
        # A run that was killed after its report is complete.
        ended = (out_dir / "report.html").exists() or life(
            [*words, *more], log, out_dir, rng if done < kills else None
        )
        if ended:
            runs.append(str(out_dir))
            out_dir = folder / f"run_{len(runs)}"
        else:
            done += 1
            in_save += saving(out_dir)
    print(json.dumps({"kills": done, "in_save": in_save, "runs": runs}))


def import_all() -> None:
    """Imports what a run imports, so that forks of this process need not."""
    warnings.simplefilter("ignore")  # JAX warns about forks of a process with threads
    for name in ("train", "grain", "matplotlib.figure", "tensorboardX.summary"):
        importlib.import_module(name)
    for name in ("train.checkpoint", "data", "train.profiling", "train.report", "train.step"):
        importlib.import_module(f"jaxllm.{name}")


if __name__ == "__main__":
    os.chdir(REPO)
    # All processes share one compilation, with those of the test where it has a cache.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(sys.argv[1]) / "compiled"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    import_all()
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[6:])
