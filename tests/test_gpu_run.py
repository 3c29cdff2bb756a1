"""Tests `.ci/gpu` without a GPU: what it compares, stores and prints, and that it continues."""

import json

import gpu_figures
import gpu_run
import gpu_worker
import pytest
from kernel_checks import kernels_run_here

from pallas_kernels import dispatch
from pallas_kernels.bench import timing
from pallas_kernels.bench.case import A, Case

ABOUT = {"device": "NVIDIA H100 PCIe", "versions": {"JAX": "1.2"}, "date": "today", "tests": None}

# Replaces gpu_worker.py; the names say what it measures and how it fails.
WORKER = """
import json, os, sys, time
say = lambda **what: print(json.dumps(what), flush=True)
names = sys.argv[3:]
if "crash" in names:
    os.abort()
if "hang" in names:
    time.sleep(60)
say(ready=True, device="NVIDIA H100 PCIe", versions={"JAX": "1.2"})
sys.stdin.readline()
for name in names:
    what, _, ms = name.partition("=")
    if what == "bad":
        say(failed=name, why="ValueError: no")
    elif what == "half":
        os.abort()
    else:
        say(figures={"ms": {f"{name} forward": float(ms), f"{name} backward": 2 * float(ms)}})
"""


def test_a_figure_may_be_worse_by_the_tolerance():
    worse = lambda unit, now, stored: gpu_figures.Row("x", unit, now, stored).bad
    assert not worse("ms", 1.049, 1.0)
    assert worse("ms", 1.051, 1.0)
    assert not worse("ms", 0.5, 1.0)
    assert worse("GiB", 10.6, 10.0)
    assert not worse("tokens/s", 100.0, 104.9)
    assert worse("tokens/s", 100.0, 105.1)
    assert not worse("ms", 1.0, None)
    assert worse("ms", None, 1.0)


def test_rows_include_measured_stored_and_failed_figures():
    now = {"ms": {"b N1 backward": 2.0, "b N1 forward": 1.0, "a N1 forward": 3.0}}
    stored = {"ms": {"a N1 forward": 3.3, "gone": 1.0}, "GiB": {"step": 1.0}}
    rows = gpu_figures.compare(now, stored, ["a N1", "b N1", "b N12"], ("ms",))
    assert [(r.name, r.now, r.stored, r.bad) for r in rows] == [
        ("a N1 forward", 3.0, 3.3, False),
        ("b N1 backward", 2.0, None, False),
        ("b N1 forward", 1.0, None, False),
        ("b N12", None, None, True),
        ("gone", None, 1.0, True),
    ]
    assert gpu_figures.status(rows, {}) == 1
    assert gpu_figures.status(rows[:3], {}) == 0
    assert gpu_figures.status(rows[:3], {"a test": "why"}) == 1


def test_figures_that_failed_or_did_not_run_are_kept():
    before = {"tests": {"passed": 3}, "figures": {"ms": {"a": 1.0, "b": 2.0, "gone": 3.0}}}
    before["figures"]["GiB"] = {"step": 4.0}
    rows = gpu_figures.compare({"ms": {"a": 0.5}}, before["figures"], ["a", "b"], ("ms",))
    kept = gpu_figures.merged(before, ABOUT, rows, ["a", "b"])
    assert kept["figures"] == {"ms": {"a": 0.5, "b": 2.0}, "GiB": {"step": 4.0}}
    assert kept["tests"] == {"passed": 3}
    assert kept["device"] == ABOUT["device"]


def test_the_table_shows_worse_figures_in_bold():
    rows = [
        gpu_figures.Row("a", "ms", 1.1, 1.0),
        gpu_figures.Row("b", "tokens/s", 612_345.6, 600_000.0),
        gpu_figures.Row("c", "ms", None, 1.0),
        gpu_figures.Row("d", "ms", 0.01234, None),
    ]
    assert gpu_figures.table(rows).splitlines()[2:] == [
        "| **a** | **1.1 ms** | **1 ms** | **10.0% worse** |",
        "| b | 612,346 tokens/s | 600,000 tokens/s | 2.0% better |",
        "| **c** | **-** | **1 ms** |  |",
        "| d | 0.01234 ms | - |  |",
    ]
    assert gpu_figures.table(rows[3:]).splitlines()[2:] == ["| d | 0.01234 ms |"]
    page = gpu_figures.report(ABOUT, rows, {"tests/a.py::b": "assert 1 == 2"})
    assert "- `tests/a.py::b` assert 1 == 2" in page


def test_two_boards_count_as_two_gpus(tmp_path):
    path = lambda device: gpu_figures.path_of(tmp_path, device, "0.12").name
    assert path("NVIDIA H100 PCIe") == "h100-pcie_jax0.12.json"
    assert path("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3_jax0.12.json"


def test_a_worse_figure_is_measured_again_and_the_better_counts():
    def times(*values):
        left = [{"ms": {"a": ms}, "tokens/s": {"a": 10 / ms}} for ms in values]
        return lambda: left.pop(0)

    stored = {"ms": {"a": 1.0}}
    assert gpu_worker.measured(times(1.04), stored)["ms"] == {"a": 1.04}
    better = {"ms": {"a": 1.0}, "tokens/s": {"a": 10.0}}
    assert gpu_worker.measured(times(2.0, 1.0), stored) == better
    assert gpu_worker.measured(times(1.25, 2.0), stored)["ms"] == {"a": 1.25}
    assert gpu_worker.measured(times(2.0), {})["ms"] == {"a": 2.0}


def test_the_output_of_pytest_is_parsed():
    log = """16 workers [6 items]
tests/a.py::test_a[x y]
tests/a.py::test_e
[gw1] [ 20%] PASSED tests/a.py::test_a[x y]
[gw10] [ 40%] FAILED tests/a.py::test_b[1-2]
[gw0] [ 60%] SKIPPED tests/a.py::test_c
[gw0] [ 80%] ERROR tests/b.py::test_d
=== short test summary info ===
FAILED tests/a.py::test_b[1-2] - AssertionError: no - never
ERROR tests/c.py
"""
    counts, failed = gpu_run.read_tests(log)
    assert counts == {"passed": 1, "failed": 4, "skipped": 1}
    assert failed == {
        "tests/a.py::test_b[1-2]": "AssertionError: no - never",
        "tests/b.py::test_d": "",
        "tests/a.py::test_e": "did not end",
        "tests/c.py": "",
    }


def test_the_files_that_a_gpu_need_not_run_exist():
    assert all((gpu_run.REPO / "tests" / name).exists() for name in gpu_run.NOT_HERE)


def test_each_case_is_measured_once_under_a_unique_name():
    names = gpu_run.names(["ops", "steps"], dry=False)
    assert "gpt2_124m B32 T1024" in names
    assert len(names) == len(set(names))
    assert not any(gpu_figures.belongs(a, b) for a in names for b in names if a != b)
    shares = gpu_run.shares(names)
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert gpu_run.shares([]) == [[]]


def test_an_op_is_timed_in_both_directions(monkeypatch):
    case = Case("gelu", {"x": A("N C")}, ({"N": 65, "C": 1024},), {}, reads=("x",))
    monkeypatch.setattr(gpu_worker, "ops", lambda: {"gelu N65": (case, case.sizes[0])})
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)  # as if there were a GPU
    monkeypatch.setattr(timing, "gpu_ms", lambda f, *args: [f(*args), 2.0][1:])
    with kernels_run_here():
        measure = gpu_worker.prepare_op("gelu N65", dry=False)
        assert measure() == {"ms": {"gelu N65 forward": 2.0, "gelu N65 backward": 2.0}}
    dispatch.reset()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Runs the command as on a machine with a GPU that measures `names`."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(gpu_worker, "__file__", str(script))
    monkeypatch.setattr(gpu_run, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(gpu_run.shutil, "which", lambda name: name)

    def run(names, *more):
        monkeypatch.setattr(gpu_run, "names", lambda parts, dry: names)
        monkeypatch.setattr(gpu_run, "shares", lambda names: [[name] for name in names])
        return gpu_run.main(["--only", "ops", "--out", str(tmp_path / "out"), *more])

    return run


def test_figures_are_stored_and_compared(machine, tmp_path, capsys):
    assert machine(["b=2"]) == 0
    assert "There are no figures for this GPU and JAX yet" in capsys.readouterr().out
    assert not (tmp_path / "figures").exists()
    assert machine(["a=1", "b=2"], "--save") == 0
    path = tmp_path / "figures" / "h100-pcie_jax1.2.json"
    kept = json.loads(path.read_text())["figures"]["ms"]
    assert kept == {"a=1 forward": 1, "a=1 backward": 2, "b=2 forward": 2, "b=2 backward": 4}
    assert "| a=1 forward | 1 ms |" in path.with_suffix(".md").read_text()
    assert machine(["a=1", "b=2"]) == 0
    path.write_text(path.read_text().replace('"a=1 forward": 1.0', '"a=1 forward": 0.9'))
    assert machine(["a=1", "b=2"]) == 1
    row = "| **a=1 forward** | **1 ms** | **0.9 ms** | **11.1% worse** |"
    assert row in capsys.readouterr().out
    assert row in (tmp_path / "out" / "h100-pcie_jax1.2.md").read_text()


def test_a_failure_does_not_stop_the_other_measurements(machine, monkeypatch, capsys):
    monkeypatch.setattr(gpu_run, "SECONDS", gpu_run.SECONDS | {"compile": 5})
    assert machine(["crash", "hang", "bad", "half", "a=1"]) == 1
    shown = capsys.readouterr().out
    assert "| a=1 forward | 1 ms |" in shown
    assert "- `bad` ValueError: no" in shown
    assert "- `crash` its process exited with status -6" in shown
    assert "- `half` its process exited with status -6" in shown
    assert "- `hang` ran out of time" in shown
    assert machine(["crash"]) == 1
    assert "error: no process could use the GPU" in capsys.readouterr().err


def test_a_missing_gpu_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(gpu_run.shutil, "which", lambda name: None)
    assert gpu_run.main([]) == 2
    assert capsys.readouterr().err.startswith("error: nvidia-smi is missing")
    assert gpu_run.main(["--dry", "--save"]) == 2
