"""Checks a GPU in twenty minutes on 16 cores: `.ci/gpu`.

    .ci/gpu                   tests, random calls, ops, training steps; compares with docs/gpu
    .ci/gpu --only ops steps  only these parts
    .ci/gpu --save            also stores the figures for this GPU and this JAX
    .ci/gpu --slow            also runs the slow tests, for which it takes up to ten minutes more
    .ci/gpu --only random --seed 20261125 --call 7    repeats a random call
    .ci/gpu --sanitize        runs random calls under compute-sanitizer, and nothing else
    .ci/gpu --sanitize step   runs two steps of vlstm_124m under its memcheck
    .ci/gpu --starts 50       starts vlstm_124m 50 times for 30 s, with the caches of the first

The tests run natively in as many processes as there are cores.  The random calls
(random_checks.py) have another seed every day.  Then every case of
pallas_kernels.benchmark and four training steps are measured: many processes compile them in
parallel, and when all are done, time them one after another.  A figure that is worse than the
stored one by more than 5%, twice, is a regression.  Exit status: 0: passed, 1: a regression or a
failure, 2: a bad command.  --out gets the logs, the table and the figures.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_figures
import gpu_random
import gpu_worker

REPO = Path(__file__).resolve().parents[1]
FIGURES = REPO / "docs" / "gpu"
PARTS = ["tests", "random", "ops", "steps"]
UNITS = {"ops": ("ms",), "steps": ("tokens/s", "GiB")}
# A part that exceeds its limit is stopped, and the others continue; "turn": one process's timing.
SECONDS = {"tests": 540, "random": 250, "compile": 120, "turn": 60, "all": 1230, "slow": 600}
# These use the CPU wherever they run, or check texts, files and the tests themselves; CI runs them.
NOT_HERE = [
    *("test_house.py", "test_readme.py", "test_gpu_random.py", "test_gpu_run.py"),
    *("test_scripts.py", "test_steady_step.py"),
    "jaxllm/test_commands.py",
    *("jaxllm/test_config.py", "jaxllm/test_context.py", "jaxllm/test_data_loader.py"),
    *("jaxllm/test_chat_masks.py", "jaxllm/test_data_cache.py", "jaxllm/test_data_opening.py"),
    *("jaxllm/test_data_parquet.py", "jaxllm/test_data_paths.py", "jaxllm/test_data_prepare.py"),
    *("jaxllm/test_data_shards.py", "jaxllm/test_data_sources.py", "jaxllm/test_bpe.py"),
    *("jaxllm/test_fuzz.py", "jaxllm/test_harness.py", "jaxllm/test_pickles.py"),
    *("jaxllm/test_predict.py", "jaxllm/test_processes.py", "jaxllm/test_programs.py"),
    "jaxllm/test_report.py",
    *("jaxllm/test_sharding.py", "jaxllm/test_split_optimizer.py", "jaxllm/test_tracker.py"),
    *("pallas_kernels/test_dispatch_shapes.py", "pallas_kernels/test_random_calls.py"),
    # On PyTorch's CPU; natively: torch_native.py.
    *("pallas_kernels/test_torch.py", "pallas_kernels/test_torch_start.py"),
]
PYTESTS = 16  # each may take 4 GiB of the GPU
PROCESSES = 12  # compile in parallel; each takes 0.5 GiB of the GPU and about one core


def environment(dry: bool) -> dict[str, str]:
    """The environment of all processes: each allocates GPU memory as needed, and requires a GPU."""
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | {"PYTHONPATH": path}
    return shared | {"JAX_PLATFORMS": "cpu" if dry else "cuda,cpu"}


def end(process: subprocess.Popen) -> None:
    """Kills a process that this one started as the leader of a group, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_tests(log: Path, dry: bool, slow: bool) -> tuple[dict, dict[str, str]]:
    """Runs pytest; returns its counts and {name: reason} of failed tests."""
    # worksteal spreads a file with many compilations over all processes.  Each of them then makes
    # the file's fixture, which takes half a minute in test_train.py.
    command = [sys.executable, "-m", "pytest", "-vv", "-n", str(min(PYTESTS, os.cpu_count() or 1))]
    command += ["-m", ""] if slow else []
    command += ["--dist", "worksteal", "-p", "no:benchmark"]  # pytest-benchmark warns under xdist
    command += ["tests/jaxllm/test_optim.py"] if dry else ["tests"]
    command += [f"--ignore=tests/{name}" for name in NOT_HERE]
    seconds = SECONDS["tests"] + slow * SECONDS["slow"]
    start, late = time.monotonic(), False
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env=environment(dry),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            process.send_signal(signal.SIGINT)  # pytest then still lists failures and reasons
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        finally:
            end(process)
    counts, failed = read_tests(log.read_text(errors="replace"))
    if late:
        failed["tests"] = f"stopped after {seconds} s"
    elif process.returncode and not failed:
        failed["pytest"] = f"exited with status {process.returncode}: {log}"
    return counts | {"seconds": time.monotonic() - start}, failed


def read_tests(log: str) -> tuple[dict[str, int], dict[str, str]]:
    """Parses pytest's output, even if truncated: counts, and {name: reason} of failed tests."""
    results = re.findall(
        r"^\[gw\d+\][^\n]*? (PASSED|SKIPPED|FAILED|ERROR) (tests\S*[^\n]*)", log, re.M
    )
    ended = {name.strip(): result for result, name in results}
    failed = {name: "" for name, result in ended.items() if result in ("FAILED", "ERROR")}
    begun = (name.strip() for name in re.findall(r"^tests/\S+::.*", log, re.M))
    failed |= {name: "did not end" for name in begun if name not in ended}
    for name, why in re.findall(r"^(?:FAILED|ERROR) (tests.*?)(?: - (.*))?$", log, re.M):
        failed[name.strip()] = (why or "")[:200]
    count = lambda result: sum(r == result for r, _ in results)
    counts = {"passed": count("PASSED"), "failed": len(failed), "skipped": count("SKIPPED")}
    return counts, failed


class Workers:
    """Processes of gpu_worker.py, which compile in parallel and measure one after another."""

    def __init__(self, shares: list[list[str]], log: Path, dry: bool):
        self.figures, self.failed, self.about = {}, {}, {}
        self.log, self.shares, self.stopped = log, shares, set()
        script = [sys.executable, str(Path(gpu_worker.__file__))]
        script += [str(FIGURES), "dry" if dry else "gpu"]
        env = {"CUDA_VISIBLE_DEVICES": "0"} | environment(dry)
        with log.open("w") as file:
            self.processes = [
                subprocess.Popen(
                    script + names,
                    cwd=REPO,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    start_new_session=True,
                )
                for names in shares
            ]

    def run(self, until: float) -> None:
        """Measures everything that can be measured in time."""
        start = time.monotonic()
        try:
            ready_by = min(until, start + SECONDS["compile"])
            with ThreadPoolExecutor(len(self.processes)) as threads:
                list(threads.map(lambda process: self._listen(process, ready_by), self.processes))
            print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
            for process, names in zip(self.processes, self.shares, strict=True):
                with contextlib.suppress(OSError):  # the process may have exited
                    process.stdin.write("go\n")
                    process.stdin.flush()
                self._listen(process, min(until, time.monotonic() + SECONDS["turn"]))
                self._look_for_the_rest(process, names)
            print(f"measured after {time.monotonic() - start:.0f} s", flush=True)
        finally:
            for process in self.processes:
                end(process)
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):  # flushing to a dead process fails
                        pipe.close()

    def _listen(self, process: subprocess.Popen, until: float) -> None:
        """Reads a process's messages until it is ready or exits; kills it if it is late."""

        def stop():
            self.stopped.add(process)
            end(process)

        timer = threading.Timer(max(0, until - time.monotonic()), stop)
        timer.start()
        for line in process.stdout:
            message = json.loads(line)
            if "failed" in message:
                self.failed[message["failed"]] = message["why"]
            for unit, figures in message.get("figures", {}).items():
                self.figures.setdefault(unit, {}).update(figures)
                for name, figure in figures.items():
                    print(f"  {name}: {figure:.5g} {unit}", flush=True)
            if message.get("ready"):
                self.about = {"device": message["device"], "versions": message["versions"]}
                break
        timer.cancel()

    def _look_for_the_rest(self, process: subprocess.Popen, names: list[str]) -> None:
        """Marks what a process did not measure as failed, because LLVM or a timeout ended it."""
        why = f"its process exited with status {process.wait()}"
        why = "ran out of time" if process in self.stopped else why
        found = [name for figures in self.figures.values() for name in figures]
        for name in names:
            if name not in self.failed and not any(gpu_figures.belongs(f, name) for f in found):
                self.failed[name] = f"{why}: {self.log}"


def names(parts: list[str], dry: bool) -> list[str]:
    """The names of everything to measure."""
    ops = list(gpu_worker.ops())[:: 12 if dry else 1] if "ops" in parts else []
    return ops + (list(gpu_worker.steps()) if "steps" in parts else [])


def shares(measured: list[str]) -> list[list[str]]:
    """The names that each process measures; neighbors are similar, so they go to different ones.

    Without names there is still one process, which reports the device and the versions.
    """
    steps = [name for name in measured if name in gpu_worker.steps()]
    ops = [name for name in measured if name not in steps]
    n = min(PROCESSES, os.cpu_count() or 1, len(ops))
    return [ops[i::n] for i in range(n)] + [[name] for name in steps] or [[]]


def look_for_faults(a: argparse.Namespace, out: Path) -> int:
    """What --sanitize and --starts run."""
    env = {"CUDA_VISIBLE_DEVICES": "0"} | environment(a.dry)
    if a.starts:
        return gpu_random.starts(env, out, a.starts, seconds=30)
    if a.sanitize == "calls":
        return gpu_random.sanitize(env, out, a.seed, a.call)
    step = next(name for name, (config, _) in gpu_worker.steps().items() if config == "vlstm_124m")
    return gpu_random.sanitize_step(env, out, step, a.dry)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=".ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--slow", action="store_true", help="also run the slow tests")
    parser.add_argument("--save", action="store_true", help="store the figures in docs/gpu")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), metavar="N",
                        help="of the random calls; default: the date, as in 20261125")  # fmt: skip
    parser.add_argument("--call", type=int, nargs="+", metavar="K", help="only these random calls")
    parser.add_argument("--sanitize", nargs="?", const="calls", choices=("calls", "step"))
    parser.add_argument("--starts", type=int, metavar="N", help="start a training run N times")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "gpu", metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="run a little of everything on the CPU")
    a = parser.parse_args(argv)
    if not a.dry and shutil.which("nvidia-smi") is None:
        print("error: nvidia-smi is missing, so there is no GPU; use --dry", file=sys.stderr)
        return 2
    if a.dry and a.save:
        print("error: --dry measures nothing to --save; drop one of them", file=sys.stderr)
        return 2
    parts, out = a.only or PARTS, a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if a.sanitize or a.starts:
        return look_for_faults(a, out)
    tests, failed, start = None, {}, time.monotonic()
    if "tests" in parts:
        print(f"tests: {out / 'tests.log'}", flush=True)
        tests, failed = run_tests(out / "tests.log", a.dry, a.slow)
        print(f"{tests}", *failed, sep="\n  ", flush=True)
    if "random" in parts:
        calls = a.call or list(range(3 if a.dry else gpu_random.CALLS))
        print(f"random: {len(calls)} calls of --seed {a.seed}: {out / 'random.jsonl'}", flush=True)
        until = time.monotonic() + SECONDS["random"]
        counts, wrong = gpu_random.run(environment(a.dry), out, a.seed, calls, until)
        print(f"{counts}", *(f"{k}: {why}" for k, why in wrong.items()), sep="\n  ", flush=True)
        failed |= wrong
    measured = names(parts, a.dry)
    work = shares(measured)
    print(f"{len(work)} processes compile: {out / 'measure.log'}", flush=True)
    workers = Workers(work, out / "measure.log", a.dry)
    workers.run(start + SECONDS["all"] + a.slow * SECONDS["slow"])
    failed |= workers.failed
    if not workers.about:
        print(f"error: no process could use the GPU: {out / 'measure.log'}", file=sys.stderr)
        return 1
    about = {**workers.about, "date": time.strftime("%Y-%m-%d"), "tests": tests}
    file = gpu_figures.path_of(FIGURES, about["device"], about["versions"]["JAX"])
    before = gpu_figures.read(file)
    units = tuple(unit for part in parts for unit in UNITS.get(part, ()))
    rows = gpu_figures.compare(workers.figures, before.get("figures", {}), measured, units)
    content = gpu_figures.report(about, rows, failed)
    (out / file.with_suffix(".md").name).write_text(content)
    now = gpu_figures.merged(before, about, rows, measured)
    gpu_figures.write(out / file.name, now)
    if a.save:
        gpu_figures.write(file, now)
        file.with_suffix(".md").write_text(gpu_figures.report(now, gpu_figures.rows(now), failed))
    print("\n" + content)
    if units and not before:
        print(f"There are no figures for this GPU and JAX yet ({file}): run with --save.")
    return gpu_figures.status(rows, failed)


if __name__ == "__main__":
    sys.exit(main())
