"""The processes of random calls and of compute-sanitizer, without a GPU."""

import json
import os
import sys
import time

import gpu_random
import gpu_run
import pytest

# Replaces random_checks.py; the number says what happens to the call.
SCRIPT = """
import json, os, sys, time
say = lambda **what: print(json.dumps(what), flush=True)
for n in map(int, sys.argv[sys.argv.index("--call") + 1:]):
    say(begin=n, line=f"call {n}")
    if n == 3:
        os.abort()
    if n == 4:
        time.sleep(60)
    if n == 6 and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        print("========= Invalid __global__ read of size 4 bytes")
        print("=========     at rms_norm_forward+0x20", flush=True)
    say(end=n, outcome="wrong" if n == 5 else "right", form="mosaic", why="no" * (n == 5))
    if n == 5:
        sys.exit(1)  # lost its context
"""

END = {0: {"end": 0, "outcome": "right", "form": "mosaic", "why": "", "line": "call 0"}}

# Replaces compute-sanitizer.
SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
while [ "${1#*python}" = "$1" ]; do shift; done
"$@"
echo "========= ERROR SUMMARY: ${ERRORS:-0} errors"
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Runs a part of gpu_random with a script in place of random_checks.py."""
    (tmp_path / "script.py").write_text(SCRIPT)
    script = lambda seed: [sys.executable, str(tmp_path / "script.py"), "--seed", str(seed)]
    monkeypatch.setattr(gpu_random, "script", script)
    monkeypatch.setattr(gpu_random, "PROCESSES", 2)
    return tmp_path


def test_a_call_that_ends_its_process_is_named(calls, monkeypatch):
    monkeypatch.setitem(gpu_random.SECONDS, "call", 3)
    until = time.monotonic() + 60
    counts, failed = gpu_random.run(gpu_run.environment(True), calls, 9, [1, 2, 3, 4, 5, 6], until)
    assert counts == {"right": 3, "wrong": 3, "not run": 0}
    name = lambda number: f"random --seed 9 --call {number}"
    assert failed == {
        name(3): " its process ended with status -6 in this call: call 3",
        name(4): " its process ended with status -9 in this call: call 4",
        name(5): "mosaic no: call 5",
    }
    lines = [json.loads(line) for line in (calls / "random.jsonl").read_text().splitlines()]
    assert [(line["end"], line["outcome"]) for line in lines if line["end"] != 6][0] == (1, "right")


def test_calls_without_time_did_not_run(calls):
    counts, failed = gpu_random.run(gpu_run.environment(True), calls, 9, [1, 2], time.monotonic())
    assert counts == {"not run": 2}
    assert "0 calls ran in their time, fewer than 2" in failed["random --seed 9"]


def test_too_few_calls_are_a_failure(calls, monkeypatch):
    monkeypatch.setattr(gpu_random.Share, "run", lambda share, _: share.results.update(END))
    _, failed = gpu_random.run(gpu_run.environment(True), calls, 9, list(range(432)), 0)
    assert "1 calls ran in their time, fewer than 400" in failed["random --seed 9"]


def test_a_process_that_begins_no_call_is_reported(calls, monkeypatch):
    monkeypatch.setattr(gpu_random, "script", lambda seed: [sys.executable, "-c", "1 / 0"])
    until = time.monotonic() + 60
    _, failed = gpu_random.run(gpu_run.environment(True), calls, 9, [7], until)
    assert "no call began: its process ended with status 1" in failed["random --seed 9 --call 7"]


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at attention_forward+0x1a30
=========     by thread (96,0,0) in block (3,0,0)
=========     Access at 0x7f2b12000400 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2b12000000 of size 1,024 bytes
=========
========= Invalid __global__ read of size 16 bytes
=========     at attention_forward+0x1a30
=========     by thread (97,0,0) in block (3,0,0)
=========     Access at 0x7f2b12000410 is out of bounds
=========
========= ERROR SUMMARY: 2 errors"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at norm_backward+0x20 and Read access at \
norm_backward+0x90 [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""
INITCHECK = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at void cutlass::gemm_kernel<float>(float *)+0x20
========= ERROR SUMMARY: 1 error"""


def test_the_output_of_compute_sanitizer_is_parsed():
    of = lambda text: gpu_random.findings([(7, line) for line in text.splitlines()])
    read = "Invalid __global__ read of size 16 bytes"
    assert of(MEMCHECK) == ({(7, read, "attention_forward"): 2}, 2)
    ((_, what, kernel), times), *_ = of(RACECHECK)[0].items()
    assert (kernel, times, of(RACECHECK)[1]) == ("norm_backward", 1, 1)
    assert what.startswith("Error: Race reported between Write access at norm_backward")
    assert [kernel for _, _, kernel in of(INITCHECK)[0]] == ["cutlass::gemm_kernel"]
    assert of("========= COMPUTE-SANITIZER\nall is well") == ({}, None)
    assert of("========= ERROR SUMMARY: 0 errors") == ({}, 0)


@pytest.fixture
def sanitizer(calls, monkeypatch):
    path = calls / "compute-sanitizer"
    path.write_text(SANITIZER)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{calls}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_random, "TOOLS", {"memcheck": (3, 2), "synccheck": (2, 1)})
    return calls


def test_findings_are_listed_with_their_calls(sanitizer, capsys):
    command = ["--dry", "--sanitize", "--out", str(sanitizer), "--seed", "9"]
    assert gpu_run.main([*command, "--call", "1", "2"]) == 0
    shown = capsys.readouterr().out
    assert "memcheck: 0 errors, 0 findings in 2 of 2 calls; 2 of 2 processes printed" in shown
    assert gpu_run.main([*command, "--call", "6", "3"]) == 1
    page = (sanitizer / "sanitize.md").read_text()
    read = "Invalid __global__ read of size 4 bytes rms_norm_forward call 6"
    assert f"- call 6, 1 times: {read}" in page
    assert "- call 3: its process ended with status 0 in this call call 3" in page
    assert "memcheck 6: =========     at rms_norm" in (sanitizer / "sanitize.log").read_text()


def test_a_tool_that_ends_no_call_is_a_failure(sanitizer, monkeypatch, capsys):
    monkeypatch.setitem(gpu_random.SECONDS, "sanitizer", 0)
    assert gpu_run.main(["--dry", "--sanitize", "--out", str(sanitizer)]) == 1
    assert capsys.readouterr().out.count("no call ended in its time, so nothing is known") == 2


def test_a_missing_sanitizer_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_random, "sanitizer", lambda: None)
    for kind in ("calls", "step"):
        assert gpu_run.main(["--dry", "--sanitize", kind, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith("error: compute-sanitizer is missing")


def test_a_step_runs_under_memcheck(sanitizer, monkeypatch, capsys):
    monkeypatch.setattr(gpu_random, "STEP", "print({name!r}, {dry})")
    command = ["--dry", "--sanitize", "step", "--out", str(sanitizer)]
    assert gpu_run.main(command) == 0
    assert "vlstm_124m B32 T1024 True" in (sanitizer / "step.log").read_text()
    monkeypatch.setenv("ERRORS", "2")
    assert gpu_run.main(command) == 1
    assert "vlstm_124m B32 T1024 under memcheck: 2 errors, exit status 0" in capsys.readouterr().out


def test_starts_are_stopped_and_counted(tmp_path, monkeypatch, capsys):
    script = 'import time; print("step 1", flush=True); time.sleep(60)'
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setattr(gpu_random, "REPO", tmp_path)
    assert gpu_random.starts(dict(os.environ), tmp_path, 1, seconds=1) == 0
    assert "start 1: 1 lines of steps, exit status -15" in capsys.readouterr().out
    (tmp_path / "train.py").write_text('raise SystemExit("INTERNAL: CUDA_ERROR_LAUNCH_FAILED")')
    assert gpu_random.starts(dict(os.environ), tmp_path, 2, seconds=20) == 1
    shown = capsys.readouterr().out
    assert "start 2: 0 lines of steps, exit status 1, CUDA_ERROR_LAUNCH_FAILED" in shown
    assert "2 of 2 starts failed" in shown


def test_a_random_call_runs_in_a_process_of_its_own(tmp_path, capsys):
    command = ["--dry", "--only", "random", "--seed", "1", "--call", "0", "--out", str(tmp_path)]
    assert gpu_run.main(command) == 0
    assert "{'right': 1, 'not run': 0}" in capsys.readouterr().out
