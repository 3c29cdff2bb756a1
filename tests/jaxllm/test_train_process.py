"""What surrounds a run's steps: signals, the clock, the trace, the settings of JAX."""

import signal
import subprocess
import sys
import time

import jax
import pytest

from jaxllm.train.process import StopSignals
from jaxllm.train.profiling import StepClock, StepTrace


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also where a shell started pytest in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_two_signals_at_once_are_one_and_a_later_one_stops_at_once(interrupts, capfd):
    with StopSignals() as stop:
        for _ in range(2):  # uv and `timeout`
            signal.raise_signal(signal.SIGINT)
        assert stop.after(3) == signal.SIGINT
        stop.at -= 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "SIGINT again: stopped without saving" in capfd.readouterr().err


def test_a_second_signal_stops_a_process_that_ignored_it():
    """As a shell makes the processes ignore SIGINT that it starts in the background."""
    code = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from jaxllm.train.process import StopSignals
with StopSignals() as stop:
    signal.raise_signal(signal.SIGINT)
    stop.at -= 2
    signal.raise_signal(signal.SIGINT)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode == -signal.SIGINT
    assert b"SIGINT again: stopped without saving" in ended.stderr


def test_a_step_is_recorded_while_the_next_one_runs_and_excludes_pauses(monkeypatch):
    now, steps = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StepClock(lambda *step: steps.append(step))
    for step in (1, 2, 3):
        now[0] += 1
        clock.started(step, {"loss": step})
        assert [s[0] for s in steps] == list(range(1, step))
    with clock.stopped():
        assert steps == [(1, {"loss": 1.0}, 2.0), (2, {"loss": 2.0}, 1.0), (3, {"loss": 3.0}, 0.0)]
        now[0] += 100
    now[0] += 1
    clock.started(4, {"loss": 4})
    now[0] += 1
    with clock.stopped():
        assert steps[3:] == [(4, {"loss": 4.0}, 2.0)]


def test_a_trace_ends_with_the_run(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))

    def take(start, steps, signal_after=None):
        trace, ended = StepTrace(range(4, 8), tmp_path, StepClock(lambda *step: None)), []
        for step in range(start + 1, steps + 1):
            trace.before(step)
            if (said := trace.after(step, step == signal_after)) is not None:
                ended.append(step)
                assert "could not be written" in said  # there is no file, as on a full disk
            if step == signal_after:
                break
        trace.close()
        assert calls in ([], ["start", "stop"]), calls
        calls.clear()
        return ended

    assert (take(0, 9), take(5, 9), take(7, 9)) == ([7], [7], [])  # resumed in it, and after it
    assert (take(0, 9, signal_after=5), take(0, 5)) == ([5], [])  # an error ends the second
