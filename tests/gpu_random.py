"""Random calls on a GPU, for gpu_run.py: in many processes, and under compute-sanitizer.

Each process of random_checks.py runs a share of the calls and says which one it begins, so a call
that ends its process is known.  Its other calls then continue in a new process.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
CALLS = 432
LEAST = 400  # of them must run in time
PROCESSES = 14  # each compiles on about one core
SECONDS = {
    "call": 120, "sanitized call": 240, "sanitizer": 300, "step": 540,
    "start": 200, "stop": 60,  # of a training run: at most until its first step, and to its end
}  # fmt: skip
# The calls that each tool runs, and its processes.  racecheck and synccheck know shared memory and
# barriers before Hopper's: with TMA and wgmma they may report what is right.
TOOLS = {"memcheck": (96, 4), "initcheck": (96, 4), "racecheck": (48, 3), "synccheck": (48, 3)}
Results = dict[int, dict[str, Any]]


def messages(process: subprocess.Popen, seconds: Callable[[], float]) -> Iterator[str]:
    """The lines of a process, which is killed if it prints none for so many seconds."""
    while True:
        timer = threading.Timer(max(0, seconds()), lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            return
        yield line


class Share:
    """Calls that run one after another, in one process as long as it lives."""

    def __init__(self, command: list[str], env: dict[str, str], log: IO[str], until: float):
        self.command, self.env, self.log, self.until = command, env, log, until
        self.results: Results = {}
        self.said: list[tuple[int | None, str]] = []  # (call, line) that is not a message
        self.limit = SECONDS["sanitized call" if "compute-sanitizer" in command[0] else "call"]

    def run(self, numbers: list[int]) -> None:
        """Runs these calls; a process that ends takes only its current call with it."""
        left = list(numbers)
        while left and time.monotonic() < self.until:
            current, status = self._process(left)
            done = [number for number in left if number in self.results]
            late = time.monotonic() >= self.until
            if current is None and not done and not late:  # no call to blame: JAX does not start
                self._failed(left[0], f"no call began: its process ended with status {status}")
            elif current is not None and not late:
                self._failed(current, f"its process ended with status {status} in this call")
            left = [number for number in left if number not in self.results]

    def _process(self, numbers: list[int]) -> tuple[int | None, int]:
        """Runs one process; returns the call that has not ended, and the exit status."""
        command = [*self.command, "--call", *map(str, numbers)]
        process = subprocess.Popen(
            command, cwd=REPO, env=self.env, stdout=subprocess.PIPE, stderr=self.log, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        current = None
        remaining = lambda: min(self.limit, self.until - time.monotonic())
        try:
            for line in messages(process, remaining):
                current = self._heard(line, current)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        return current, process.returncode

    def _heard(self, line: str, current: int | None) -> int | None:
        """The call that runs after this line."""
        if not line.startswith("{"):
            self.said.append((current, line.rstrip()))
            return current
        message = json.loads(line)
        if "begin" in message:
            self.results.pop(message["begin"], None)
            self.line = message["line"]
            return message["begin"]
        self.results[message["end"]] = message | {"line": self.line}
        return None

    def _failed(self, number: int, why: str) -> None:
        line = getattr(self, "line", "")
        self.results[number] = dict(end=number, outcome="wrong", form="", why=why, line=line)


def environment(base: dict[str, str]) -> dict[str, str]:
    """What random_checks.py needs: cheap compilation, threads for the interpreter."""
    dry = base["JAX_PLATFORMS"] == "cpu"
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    if not dry:
        fast = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
    flags = f"{fast} {base.get('XLA_FLAGS', '')}".strip()
    path = os.pathsep.join([str(HERE), base["PYTHONPATH"]])
    return base | {"XLA_FLAGS": flags, "NPROC": "16", "PYTHONPATH": path}


def script(seed: int) -> list[str]:
    return [sys.executable, str(HERE / "random_checks.py"), "--json", "--seed", str(seed)]


def run(
    base: dict[str, str], out: Path, seed: int, numbers: list[int], until: float
) -> tuple[dict[str, int], dict[str, str]]:
    """Runs these calls of a seed; returns their counts and {call: what is wrong}.

    base: the environment of all processes.  out gets random.jsonl, a line for each call, and
    random.log.
    """
    count = max(1, min(PROCESSES, os.cpu_count() or 1, len(numbers)))
    base = {"CUDA_VISIBLE_DEVICES": "0"} | base
    with (out / "random.log").open("w") as log:
        shares = [Share(script(seed), environment(base), log, until) for _ in range(count)]
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda i: shares[i].run(numbers[i::count]), range(count)))
    results = dict(sorted(item for share in shares for item in share.results.items()))
    with (out / "random.jsonl").open("w") as file:
        file.writelines(json.dumps(result) + "\n" for result in results.values())
    counts = Counter(result["outcome"] for result in results.values())
    counts["not run"] = len(numbers) - len(results)
    failed = {
        f"random --seed {seed} --call {number}": "{form} {why}: {line}".format(**result)
        for number, result in results.items()
        if result["outcome"] == "wrong"
    }
    if len(results) < (least := min(LEAST, len(numbers))):
        why = f"{len(results)} calls ran in their time, fewer than {least}: {out / 'random.log'}"
        failed[f"random --seed {seed}"] = why
    return dict(counts), failed


# ---- compute-sanitizer --------------------------------------------------------------------------


def sanitizer() -> str | None:
    """The path of compute-sanitizer, or None."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(f"{cuda}/bin/compute-sanitizer")


def under(tool: str, path: str) -> list[str]:
    """The command before a Python program; one allocation an array is the environment's part."""
    return [
        *(path, "--tool", tool, "--target-processes", "application-only"),
        *("--print-limit", "30", "--report-api-errors", "no", "--show-backtrace", "no"),
    ]


def alone(env: dict[str, str]) -> dict[str, str]:
    """Each array is an allocation of its own, and each kernel a launch of its own."""
    flags = f"{env.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    return env | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_FLAGS": flags}


def findings(said: list[tuple[int | None, str]]) -> tuple[Counter, int | None]:
    """({(call, what, kernel): how often}, errors in all, or None without a summary) of output."""
    found, errors = Counter(), None
    for i, (call, line) in enumerate(said):
        if summary := re.match(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", line):
            errors = (errors or 0) + int(summary[1])
        elif (text := re.match(r"=+ (\S.*)", line)) and not re.match(
            r"COMPUTE-SANITIZER|.*SUMMARY|Target application|LEAK", text[1]
        ):
            near = " ".join(line for _, line in said[i : i + 6])
            kernel = re.search(r"\b[Aa]t (?:void )?([A-Za-z_][\w:]*)", near)
            what = re.sub(r"0x[0-9a-f]+|\+?0x\w+|\(\d+,\d+,\d+\)", "_", text[1])
            found[call, what[:200], kernel[1] if kernel else ""] += 1
    return found, errors


def sanitize(base: dict[str, str], out: Path, seed: int, numbers: list[int] | None) -> int:
    """Runs calls under each tool of compute-sanitizer, side by side; 0 if none finds an error.

    numbers: the calls, or None for as many as each tool takes.  out gets sanitize.md and the
    tools' output, sanitize.log.
    """
    path = sanitizer()
    if path is None:
        print("error: compute-sanitizer is missing: put CUDA's bin on PATH", file=sys.stderr)
        return 2
    until, env, bad = time.monotonic() + SECONDS["sanitizer"], alone(environment(base)), 0
    work = []
    with (out / "sanitize.log").open("w") as log:
        for tool, (calls, processes) in TOOLS.items():
            chosen = numbers or list(range(calls))
            command = [*under(tool, path), *script(seed), "--run_only"]
            for i in range(min(processes, len(chosen))):
                share = Share(command, env, log, until)
                work.append((tool, share, chosen[i::processes]))
        with ThreadPoolExecutor(len(work)) as threads:
            list(threads.map(lambda item: item[1].run(item[2]), work))
        for tool, share, _ in work:
            log.writelines(f"{tool} {call}: {line}\n" for call, line in share.said)
    page = [
        f"compute-sanitizer over random calls of seed {seed}. racecheck and synccheck do not know"
        " all of TMA, wgmma and their barriers, so a finding of theirs may be a false one."
    ]
    for tool in TOOLS:
        of_tool = [(share, asked) for name, share, asked in work if name == tool]
        lines, errors = report(tool, of_tool)
        page, bad = page + lines, bad + errors
    (out / "sanitize.md").write_text("\n".join(page) + "\n")
    print("\n".join(page))
    return int(bad > 0)


def report(tool: str, shares: list[tuple[Share, list[int]]]) -> tuple[list[str], int]:
    """Lines about one tool, and its number of findings and of calls that ended a process."""
    results = {n: result for share, _ in shares for n, result in share.results.items()}
    wrong = {n: result for n, result in results.items() if result["outcome"] == "wrong"}
    found, errors = Counter(), 0
    ended = 0
    for share, _ in shares:
        of_share, summary = findings(share.said)
        found.update(of_share)
        errors, ended = errors + (summary or 0), ended + (summary is not None)
    asked = sum(len(numbers) for _, numbers in shares)
    lines = [
        f"\n{tool}: {errors} errors, {sum(found.values())} findings in {len(results)} of {asked}"
        f" calls; {ended} of {len(shares)} processes printed a summary"
    ]
    for (call, what, kernel), times in sorted(found.items(), key=str):
        line = "" if call is None else results.get(call, {}).get("line", "")
        lines.append(f"- call {call}, {times} times: {what} {kernel} {line}")
    lines += [f"- call {n}: {result['why']} {result['line']}" for n, result in wrong.items()]
    if not results:
        lines.append("- no call ended in its time, so nothing is known")
    return lines, errors + sum(found.values()) + len(wrong) + (not results)


STEP = """
import gpu_worker
from jaxllm.train.process import set_xla_flags
set_xla_flags(deterministic=True)
gpu_worker.UNTIMED, gpu_worker.TIMED = 0, 2
print(gpu_worker.prepare_step({name!r}, {dry})(), flush=True)
"""


def sanitize_step(base: dict[str, str], out: Path, name: str, dry: bool) -> int:
    """Two training steps under memcheck; out gets step.log."""
    path = sanitizer()
    if path is None:
        print("error: compute-sanitizer is missing: put CUDA's bin on PATH", file=sys.stderr)
        return 2
    env = alone(base | {"XLA_FLAGS": "--xla_gpu_autotune_level=0"})
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), base["PYTHONPATH"]])
    command = [*under("memcheck", path), sys.executable, "-c", STEP.format(name=name, dry=dry)]
    with (out / "step.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=REPO, env=env, stdout=log, stderr=log, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS["step"])
        ended = process.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = (out / "step.log").read_text(errors="replace")
    found, errors = findings([(None, line) for line in text.splitlines()])
    status = f"exit status {process.returncode}" if ended else f"stopped after {SECONDS['step']} s"
    print(f"{name} under memcheck: {errors} errors, {status}: {out / 'step.log'}")
    print(
        *(f"- {times} times: {what} {kernel}" for (_, what, kernel), times in found.items()),
        sep="\n",
    )
    return int(bool(found) or errors != 0 or process.returncode != 0)


# ---- starts -------------------------------------------------------------------------------------

# Every start after the first resumes, so it takes the compiled programs and XLA's choices of
# matmuls from the run's folder.
START = """--config vlstm_124m --train.batch_size 32 --train.grad_accum 1 --train.eval_every 0
    --train.checkpoint_every 0 --data.source stdlib --data.path null --data.val_path null""".split()


def starts(base: dict[str, str], out: Path, count: int, seconds: float, words=START) -> int:
    """Starts a run `count` times, and stops it after `seconds` and a step; out gets starts.log.

    It looks for errors of CUDA that happen once in many starts.
    """
    bad = 0
    with tempfile.TemporaryDirectory() as folder, (out / "starts.log").open("w") as log:
        for i in range(count):
            how = words if i == 0 else ["--resume"]
            command = [sys.executable, "train.py", *how, "--out_dir", f"{folder}/run"]
            status, text = start(command, base, log, seconds)
            error = re.search(r"CUDA_ERROR\w*|CUDNN_STATUS\w*|^error: .*", text, re.M)
            bad += bool(error) or status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
            steps = len(re.findall(r"^step ", text, re.M))
            why = f", {error[0]}" if error else ""
            print(f"start {i + 1}: {steps} lines of steps, exit status {status}{why}", flush=True)
    print(f"{bad} of {count} starts failed: {out / 'starts.log'}")
    return int(bad > 0)


def start(command: list[str], env: dict[str, str], log: IO[str], seconds: float) -> tuple[int, str]:
    """The exit status of a run that is stopped after this time and a step, and what it printed."""
    begin, clock = Path(log.name).stat().st_size, time.monotonic()
    text = lambda: Path(log.name).read_bytes()[begin:].decode(errors="replace")
    process = subprocess.Popen(
        command, cwd=REPO, env=env, stdout=log, stderr=log, start_new_session=True
    )
    while process.poll() is None and time.monotonic() < clock + SECONDS["start"]:
        if time.monotonic() > clock + seconds and re.search(r"^step ", text(), re.M):
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # it stops after the step and saves
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS["stop"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), text()
