"""Times every step; traces a few steps and lists the longest kernels."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxllm.errors import in_short


class StepClock:
    """Times each step, and records it while the devices run the next one."""

    def __init__(self, record: Callable[[int, dict, float], None]):
        """record: called with a step, its metrics and its seconds."""
        self.record = record
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
        values = {name: float(value) for name, value in metrics.items()}  # waits for the step
        before, self.clock = self.clock, time.perf_counter()
        self.record(step, values, self.clock - before)


class StepTrace:
    """Traces the steps of `span` that this process takes; no other step runs meanwhile."""

    def __init__(self, span: range, folder: Path, clock: StepClock):
        self.span, self.folder, self.clock = span, folder, clock
        self.first: int | None = None  # the first traced step, while the trace runs

    def before(self, step: int) -> None:
        """Starts the trace if `step` is in the span; a resumed run may begin within the span."""
        if self.first is None and step in self.span:
            with self.clock.stopped():
                jax.profiler.start_trace(str(self.folder))
            self.first = step

    def after(self, step: int, stopping: bool) -> str | None:
        """Ends the trace after the span, or if a signal stops the run; returns its summary."""
        if self.first is None or (step + 1 in self.span and not stopping):
            return None
        with self.clock.stopped():
            return self._kernels(step + 1 - self.first)

    def _kernels(self, n: int) -> str:
        """Writes the trace of n steps; returns a table of the ten longest kernels."""
        self.first = None
        try:
            jax.profiler.stop_trace()
            files = sorted(self.folder.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
            events = list(kernel_events(files[-1]))
        except (RuntimeError, OSError, IndexError) as e:  # the disk is full
            return f"profile  {self.folder} could not be written ({in_short(e)})"
        if not events:
            return f"profile  {self.folder}: no kernels (only a GPU's kernels are timed)"
        times, calls = Counter(), Counter(event.name for event in events)
        for event in events:
            times[event.name] += event.duration_ns / 1e6
        total = sum(times.values())
        rows = [f"profile  {self.folder}: kernels {total / n:.2f} ms per step; the ten longest:"]
        for name, ms in times.most_common(10):
            called = f"{calls[name] / n:7.1f} x  {name[:90]}"
            rows.append(f"{ms / n:10.3f} ms {ms / total:6.1%} {called}")
        return "\n".join(rows)

    def close(self) -> None:
        """Ends a trace that an error left running: the run may continue from a checkpoint."""
        if self.first is not None:
            jax.profiler.stop_trace()


def kernel_events(path: Path) -> Iterator[jax.profiler.ProfileEvent]:
    """Yields the kernels that ran on the first GPU of an .xplane.pb file, all streams."""
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    for line in (x for plane in planes if plane.name == "/device:GPU:0" for x in plane.lines):
        if line.name.startswith("Stream"):  # the others repeat the time by module and source
            yield from line.events
