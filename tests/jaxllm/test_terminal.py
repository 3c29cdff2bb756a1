"""Standard streams, signals and the progress bar, as a user's shell and terminal give them."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from cases import slow
from training_runs import REPO, command, losses

from jaxllm import terminal
from jaxllm.train.process import STOPPING, StopSignals

PRINTS = """
import sys
from jaxllm import terminal
terminal.protect_streams(lossy=%s)
print("ü \\udcff" * 10_000)
print("x", file=sys.stderr)
open("kept", "w").write("x")
"""


@pytest.mark.parametrize(
    "more", [">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", "| true"]
)
def test_nothing_printed_ends_a_run(more, tmp_path):
    words = f"PYTHONIOENCODING=ascii {sys.executable} -c '{PRINTS % True}' {more}"
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "kept").read_text() == "x"  # and nothing was printed into it


def test_unencodable_characters_are_escaped():
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    code = PRINTS.replace("10_000", "1").replace("open(", "str(") % False
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True)
    assert done.stdout == b"\xfc \\udcff\n"


@pytest.mark.parametrize(("more", "read"), [("<&-", ""), ("<<< $'caf\\xe9'", "caf\\udce9\\n")])
def test_standard_input_never_raises(more, read):
    code = PRINTS.partition("print")[0] % False + "print(ascii(sys.stdin.read()))"
    words = f"PYTHONIOENCODING=utf-8:strict {sys.executable} -c '{code}' {more}"
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(["bash", "-c", words], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"'{read}'\n", "")


def test_progress_ends_at_all(monkeypatch, capsys):
    """A last batch that was not full ended an evaluation at 150%."""
    monkeypatch.setattr(terminal, "PAUSE", 0)
    with terminal.progress_bar("counting", 4, size=False) as done:
        done(3)
        done(6)
    assert capsys.readouterr().err == "counting\ncounting: 75%\ncounting: 100%\n"


@pytest.mark.slow
def test_a_run_ends_well_without_a_screen(tiny, tmp_path):
    out_dir = tmp_path / "ü"
    words = command(tiny, out_dir, "--train.steps", "4", "--sample.prompt", "ü")
    with open("/dev/full", "w") as full:
        env = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(words, cwd=REPO, env=env, stdout=full, stderr=full)
    assert done.returncode == 0
    assert list(losses(out_dir)) == [1, 2, 3, 4]


# As in a shell's foreground; a background ignores SIGINT.
FOREGROUND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.usefixtures("own_programs")
def test_ctrl_c_at_any_early_moment_ends_the_process(tiny, tmp_path):
    """At moments of the imports, of the data's and of XLA's compilation."""
    words = command(tiny, tmp_path / "x", "--train.steps", "100000000")
    words = [sys.executable, "-c", FOREGROUND, *words]
    pipe = subprocess.PIPE
    for moment in range(6):
        process = subprocess.Popen(words, cwd=REPO, stdout=pipe, stderr=pipe, text=True)
        while len(os.listdir(f"/proc/{process.pid}/task")) < 2:  # our code has begun
            time.sleep(0.001)
        time.sleep(0.4 * moment)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGINT
        assert "Traceback" not in errors


@pytest.mark.parametrize("number", STOPPING)
def test_every_signal_stops_a_run_after_its_step(number):
    with StopSignals() as stop:
        assert stop.after(1) is None
        signal.raise_signal(number)
        assert stop.after(2) == number


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.after(1) is None
    finally:
        signal.signal(signal.SIGHUP, before)


LOGS = """
import time
from pathlib import Path
from jaxllm.train.metrics import RunLog
log = RunLog(Path("."), 20000, 0, tokens=10**6, flops=1e15, peak=1e15)
for step in range(1, 301):
    log.train(step, 2.5, 1e-3, 1.0, 0.01)
    time.sleep(0.005)
log.message("the last line")
log.close()
"""


def shown(folder, columns, **env):
    """What LOGS writes to a terminal of some columns."""
    folder.mkdir()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")} | env
    env["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", LOGS], cwd=folder, env=env, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:
            break
        if not block:
            break
        text += block
    assert process.wait() == 0, text
    os.close(ours)
    return text.decode()


@pytest.mark.parametrize("columns", [40, slow(60), slow(80), slow(140)])
def test_the_bar_keeps_step_and_time_and_leaves_no_trace(columns, tmp_path):
    text = shown(tmp_path / "x", columns, TERM="xterm")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    frames = [line for line in re.split(r"[\r\n]+", plain) if line.startswith("step")]
    assert frames
    assert all(len(line) <= columns for line in frames)
    whole = r"step +\d+/20000 .*left (\d+:\d\d:\d\d|-:--:--) *"
    assert all(re.fullmatch(whole, line) for line in frames), frames[-1]
    assert ("MFU" in frames[-1]) == (columns >= 80)
    after = text.rpartition("the last line")[2]
    assert "step" not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", after.rpartition("\x1b[2K")[2])


@pytest.mark.parametrize("env", [slow({}), {"FORCE_COLOR": "1"}])
def test_a_dumb_terminal_gets_a_line_every_few_seconds(env, tmp_path):
    text = shown(tmp_path / "x", 80, TERM="dumb", **env)
    lines = text.splitlines()
    assert 2 <= len(lines) <= 5
    assert lines[0].startswith("step 1/20000  loss 2.5000")
    assert lines[-1] == "the last line"
