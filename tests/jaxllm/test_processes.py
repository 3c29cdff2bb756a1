"""Several processes train as one, write their parts, stop together, and name the one that dies."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow
from training_runs import REPO, command, error_of, losses

from jaxllm import config as configs
from jaxllm.config import InputError
from jaxllm.sharding import make_mesh
from jaxllm.train import processes
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.step import Trainer

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory, request):
    """(folder of the runs, what process_runs.py prints)."""
    folder = tmp_path_factory.mktemp("processes")
    words = [] if "not slow" in request.config.option.markexpr else ["every"]
    done = subprocess.run(
        [sys.executable, str(HERE / "process_runs.py"), str(folder), str(tiny), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def checksums(out_dir):
    """The checksums of all arrays of the checkpoint of step 6."""
    return json.loads((out_dir / "checkpoints/6/about/metadata").read_text())["checksums"]


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def errors(run):
    return [line for line in run["output"].splitlines() if line.startswith("error: ")]


def test_two_tasks_of_slurm_train_as_one(runs):
    folder, results = runs
    assert [task["status"] for task in results["two"]] == [0, 0]
    output = results["two"][0]["output"]  # both write to one file
    assert (
        output.count("devices  2 x cpu, mesh {'data': 1, 'fsdp': 2, 'context': 1, 'tensor': 1}")
        == 1
    )
    assert output.count("step 6/6  loss") == 1  # only process 0 prints
    assert output.count("step 6/6  sample:\nthe ") == 1
    assert list(losses(folder / "two")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["same", slow("one_process")])
def test_a_run_continues_bit_for_bit_on_the_same_mesh(runs, name):
    """`same` has two processes of one device; `one_process` has both devices."""
    folder, results = runs
    assert results[name]["status"] == 0, results[name]["output"]
    assert losses(folder / name) == losses(folder / "two")
    assert checksums(folder / name) == checksums(folder / "two")


def test_a_run_continues_on_another_mesh_with_the_same_losses(runs):
    folder, results = runs
    count = results["other"]["count"]
    mesh = f"{count} x cpu, mesh {{'data': 1, 'fsdp': {count // 2}, 'context': 1, 'tensor': 2}}"
    assert mesh in results["other"]["output"]
    got, wanted = losses(folder / "other"), losses(folder / "two")
    assert [got[s] for s in (1, 2, 3)] == [wanted[s] for s in (1, 2, 3)]
    for step in (4, 5, 6):  # bf16
        assert got[step] == pytest.approx(wanted[step], rel=1e-3)
    assert checksums(folder / "other") != checksums(folder / "two")


@pytest.mark.parametrize("name", ["two", "other"])
def test_every_process_writes_its_part_of_the_checkpoint(runs, name):
    count = 2 if name == "two" else runs[1][name]["count"]
    state = runs[0] / name / "checkpoints" / "6" / "state"
    parts = [size(state / f"ocdbt.process_{i}") for i in range(count)]
    assert not (state / f"ocdbt.process_{count}").exists()
    assert min(parts) > 0.7 * sum(parts) / count
    assert size(state) - sum(parts) < 0.2 * size(state)  # the index, which process 0 writes


def test_damage_in_a_part_of_another_process_is_named(runs, tmp_path):
    shutil.copytree(runs[0] / "two", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    part = folder / "6" / "state" / "ocdbt.process_1" / "d"
    victim = max(part.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    config = configs.load(str(tmp_path / "run" / "config.yaml"), {"mesh.fsdp": "1"})
    wanted = Trainer(config, make_mesh(config.mesh)).abstract_state().saved()
    Checkpoints(folder, 1).restore(6, wanted)
    victim.write_bytes(content)
    with pytest.raises(InputError, match=r"checkpoints/6 is damaged at .*to continue from step 3"):
        Checkpoints(folder, 1).restore(6, wanted)


def test_a_killed_process_ends_the_others_of_its_machine(runs):
    run = runs[1]["other"]
    assert run["status"] == 1
    assert run["seconds"] < 60
    victim = f"process {run['count'] - 1} (pid {run['victim']} on {socket.gethostname()})"
    assert run["output"].splitlines()[-1] == (
        f"error: {victim} was killed by SIGKILL (is the machine out of memory?); the run ends:"
        " continue with --resume"
    )
    assert "Traceback" not in run["output"]


def test_a_process_that_takes_long_to_abort_is_not_blamed(monkeypatch, capsys):
    """On a busy machine its last words were passed on before it ended, and its signal was named."""
    monkeypatch.setattr(processes, "QUIET", 0.1)
    words = f"{processes.FATAL.decode()}: Failed to send RPC to coordination service"
    script = f"echo '{words}' >&2; sleep 0.7; kill -ABRT $$"

    class Process(subprocess.Popen):
        exitcode = property(subprocess.Popen.poll)

    with Process(["sh", "-c", script], stderr=subprocess.PIPE) as child:
        children = [processes._Child(child, os.dup(child.stderr.fileno()))]
        processes._wait(children)
    peers = io.StringIO(json.dumps(["process 0 (pid 5 on a)", f"process 1 (pid {child.pid} on b)"]))
    assert processes._report(children, peers) == 1
    assert "process 0 (pid 5 on a) died or lost its connection" in capsys.readouterr().err


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_process_ends_those_of_other_machines(runs, index):
    """Process 0 has the coordination service, process 1 is missed after its last heartbeat."""
    killed, other = runs[1][f"killed_{index}"][index], runs[1][f"killed_{index}"][1 - index]
    name = f"process {index} (pid {runs[1]['victims'][index]} on {socket.gethostname()})"
    assert [killed["status"], other["status"]] == [1, 1]
    assert other["seconds"] < 60
    assert other["output"].splitlines()[-1] == (
        f"error: {name} died or lost its connection; the run ends: continue with --resume"
    )
    assert errors(killed) == [
        f"error: {name} was killed by SIGKILL (is the machine out of memory?); the run ends:"
        " continue with --resume"
    ]
    for run in (killed, other):
        lines = [line for line in run["output"].splitlines() if not line.startswith("[Gloo]")]
        assert len(lines) == run["output"].count("step ") + 1


def test_sigterm_to_one_process_stops_all_after_the_same_step(runs):
    both = runs[1]["stopped"]
    assert [run["status"] for run in both] == [143, 143]
    assert both[0]["output"].count("step ") == both[1]["output"].count("step ") > 3


@pytest.mark.slow
def test_a_process_that_finds_no_others_is_refused(runs):
    run = runs[1]["alone"]
    assert run["status"] == 2
    assert errors(run) == run["output"].strip().splitlines()
    assert (
        "mesh.distributed=true finds no other processes (coordinator_address should"
        in (run["output"])
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--processes 0", "--processes 0 must be 1 to 64"),
        ("--processes 2 --process 1", "--process I needs --processes N and --coordinator"),
        ("--process 1 --coordinator a:1", "--process I needs --processes N and --coordinator"),
        ("--processes 2 --process 2 --coordinator a:1", "--process 2 is not one of 0 to 1"),
        ("--processes 2 --process 1 --coordinator a", "--coordinator a is not HOST:PORT"),
        (
            "--processes 2 --process 1 --coordinator a:65536",
            "with PORT up to 65535",
        ),
        ("--processes 2 --process 1 --coordinator a:1", "several processes need --out_dir"),
        ("--mesh.distributed true", "several processes need --out_dir"),
        ("--mesh.distributed true --processes 2", "omit it, or --processes"),
    ],
)
def test_wrong_places_are_refused(tiny, capsys, words, message):
    assert message in error_of(capsys, "--config", tiny, *words.split())


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_process_says_for_whom_it_waits_and_can_be_stopped(tiny, tmp_path, number, status):
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    peers = ["--processes", "2", "--process", "1", "--coordinator", address]
    words = command(tiny, tmp_path / "run", *peers)
    with subprocess.Popen(words, cwd=REPO, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
        waiting.send_signal(number)
        rest = waiting.stderr.read()
    assert line == f"process 1 waits for process 0 at {address}, up to five minutes\n"
    assert rest == ""  # it was no accident
    assert waiting.returncode == status
