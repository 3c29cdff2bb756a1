"""Times every step; traces a few steps and lists the longest kernels."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxllm.errors import memory_errors


class StepClock:
    """Times each step, and records it while the devices run the next one."""

    def __init__(self, record: Callable[[int, dict, float], None], advice: str):
        """record: called with a step, its metrics and its seconds.

        advice: for when memory runs out.
        """
        self.record, self.advice = record, advice
        self.running: tuple[int, dict] | None = None
        self.clock = time.perf_counter()

    def started(self, step: int, metrics: dict) -> None:
        """Call this after dispatching a step; waits for the previous step and records it."""
        self._record_last()
        self.running = step, metrics

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Waits for the last step; the time inside the context counts for no step."""
        self._record_last()
        yield
        self.clock = time.perf_counter()

    def _record_last(self) -> None:
        if self.running is None:
            return
        (step, metrics), self.running = self.running, None
        with memory_errors(self.advice):
            values = {name: float(value) for name, value in metrics.items()}  # waits for the step
        before, self.clock = self.clock, time.perf_counter()
        self.record(step, values, self.clock - before)


class StepTrace:
    """Traces steps first ... end - 1 of span = (first, end) into a folder; (0, 0): none.

    The loop waits for the devices and calls `start()` before the step for which `begins(step)` is
    true, and `stop()` after the step for which `ends(step)` is true.
    """

    def __init__(self, span: tuple[int, int], folder: Path):
        self.first, self.end = span
        self.folder = folder

    def begins(self, step: int) -> bool:
        """Whether `step` is the first step of the trace."""
        return bool(self.end) and step == self.first

    def ends(self, step: int) -> bool:
        """Whether `step` is the last step of the trace."""
        return bool(self.end) and step == self.end - 1

    def start(self) -> None:
        """Starts the trace; no step may be running."""
        jax.profiler.start_trace(str(self.folder))

    def stop(self) -> str:
        """Writes the trace; returns a table of the ten longest kernels.  No step may be running."""
        jax.profiler.stop_trace()
        n = self.end - self.first
        files = sorted(self.folder.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
        times, calls = kernel_times(files[-1])
        if not times:
            return f"profile  {self.folder}: no kernels (only a GPU's kernels are timed)"
        total = sum(times.values())
        rows = [f"profile  {self.folder}: kernels {total / n:.2f} ms per step; the ten longest:"]
        for name, ms in times.most_common(10):
            rows.append(
                f"{ms / n:10.3f} ms {ms / total:6.1%} {calls[name] / n:7.1f} x  {name[:90]}"
            )
        return "\n".join(rows)


def kernel_events(path: Path) -> Iterator[jax.profiler.ProfileEvent]:
    """Yields the kernels that ran on the first GPU of an .xplane.pb file, all streams."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            # The others repeat the time by module and source.
            if line.name.startswith("Stream"):
                yield from line.events


def kernel_times(path: Path) -> tuple[Counter, Counter]:
    """({kernel: ms}, {kernel: calls}) of `kernel_events`."""
    times, calls = Counter(), Counter()
    for event in kernel_events(path):
        times[event.name] += event.duration_ns / 1e6
        calls[event.name] += 1
    return times, calls
