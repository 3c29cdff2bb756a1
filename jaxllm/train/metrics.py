"""What a run says: metrics.jsonl, TensorBoard events, a tracker, loss.png, a bar or plain lines."""

import contextlib
import json
import math
import os
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxllm.files import write_whole
from jaxllm.train.tracker import Wandb

# Dense bf16 FLOP/s of one device, from the vendor's data sheets, by a part of its name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name, None if it is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


def peak_memory() -> float | None:
    """GiB that the fullest of this process's devices held at most; None if they do not tell."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((s.get("peak_bytes_in_use", 0) for s in stats), default=0) / 2**30 or None


class RunLog:
    """Writes down one run in `out_dir`; everything up to `start` (a resumed step) is kept.

    A full disk is reported and ends no run.

    tokens, flops: of one step over all devices; peak: FLOP/s of all devices together, or None.
    tracker: gets every row, too.
    """

    def __init__(
        self,
        out_dir: Path,
        steps: int,
        start: int,
        tokens: int,
        flops: float,
        peak: float | None,
        tracker: Wandb | None = None,
    ):
        self.path = out_dir / "metrics.jsonl"
        self.picture = out_dir / "loss.png"
        self.steps, self.tokens, self.flops, self.peak = steps, tokens, flops, peak
        before = _keep_until(self.path, start)
        self.began = time.perf_counter() - seconds_of(before)  # as if nothing had interrupted it
        self.file = self.path.open("ab", buffering=0)
        self.seconds = deque[float](maxlen=20)  # of the last steps
        self.unwritten = b""  # rows that found the disk full
        self.boards: list[Board | Wandb] = [Board(out_dir / "tensorboard", start)]
        if tracker is not None:
            self.boards.append(tracker)
        self.console = Console()
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[news]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=steps, completed=start, news="")
            self.bar.start()

    def train(
        self,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float,
        seconds: float,
        skips: int = 0,
    ) -> None:
        """One step done: `seconds` is its time; skips: updates skipped in a row."""
        speed = self.tokens / seconds
        self.seconds.append(seconds)
        row = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "step_ms": seconds * 1e3,
            "tokens_per_second": speed,
        }
        news = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
        if self.peak is not None:
            row["mfu"] = self.flops / seconds / self.peak
            news += f"  MFU {row['mfu']:.1%}"
        if memory := peak_memory():
            row["peak_memory_gib"] = memory
        if skips:
            row["skips"] = skips
        self._write(row)
        if self.bar is not None:
            self.bar.update(self.task, completed=step, news=news)
        else:
            self.say(
                f"step {step}/{self.steps}  {news}"
                f"  left {timedelta(seconds=round((self.steps - step) * median(self.seconds)))}"
            )

    def evaluation(self, step: int, val_loss: float) -> None:
        """One evaluation: mean loss a token, in nats."""
        self._write({"step": step, "val_loss": val_loss})
        self.say(f"step {step}/{self.steps}  validation loss {val_loss:.4f}")
        self.draw()

    def sample(self, step: int, text: str) -> None:
        """A text that the model wrote, behind its prompt."""
        self._write({"step": step, "sample": text})
        self.say(f"step {step}/{self.steps}  sample:\n{text}")

    def say(self, text: str) -> None:
        """A line for the reader, above the progress bar."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def draw(self) -> None:
        """Draws loss.png from metrics.jsonl."""
        try:
            draw_loss(self.path, self.picture)
        except OSError as e:
            self.say(f"{self.picture} could not be drawn: {e.strerror}")

    def close(self) -> None:
        """Ends the bar and the files."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if problem := self._flush():
            self.say(f"{self.path} lacks its last rows: {problem}")
        self.file.close()
        for board in self.boards:
            with contextlib.suppress(OSError):
                board.close()

    def _write(self, row: dict) -> None:
        # A loss that is not finite stays readable for every JSON reader, as null.
        finite = lambda v: v if isinstance(v, str) or math.isfinite(v) else None
        row = {k: finite(v) for k, v in row.items()}
        row["seconds"] = round(time.perf_counter() - self.began, 3)
        waiting = bool(self.unwritten)
        self.unwritten += json.dumps(row).encode() + b"\n"
        if (problem := self._flush()) and not waiting:
            self.say(f"{self.path} cannot be written now ({problem}); its rows wait")
        for board in list(self.boards):
            try:
                board.write(row)
            except OSError as e:
                self.boards.remove(board)
                self.say(f"no more {board.name} ({e.strerror or e}); metrics.jsonl has them all")

    def _flush(self) -> str | None:
        """Writes all rows that wait; returns why it cannot."""
        try:
            while self.unwritten:  # the system may take only a part
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as e:
            return e.strerror
        return None


class Board:
    """TensorBoard events; events after step `start` of an earlier process are hidden.

    Written by the caller: the thread of tensorboardX's SummaryWriter dies on a full disk, and the
    run would wait for it for ever.
    """

    name = "TensorBoard events"

    def __init__(self, folder: Path, start: int):
        from tensorboardX.event_file_writer import EventsWriter

        # pyrefly: ignore[missing-module-attribute]
        from tensorboardX.proto.event_pb2 import SessionLog

        folder.mkdir(exist_ok=True)
        self.writer = EventsWriter(str(folder / "events"))
        self._event(start + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, row: dict) -> None:
        """The values of one row; raises OSError on a full disk."""
        from tensorboardX.summary import scalar, text

        for name, value in row.items():
            if isinstance(value, str):
                self._event(row["step"], summary=text(name, value))
            elif name not in ("step", "seconds") and value is not None:
                self._event(row["step"], summary=scalar(name, value))
        if "val_loss" in row:
            self.writer.flush()  # on the disk: too slow for every step

    def close(self) -> None:
        """Writes what is left; raises OSError on a full disk."""
        self.writer.close()

    def _event(self, step: int, **content) -> None:
        # pyrefly: ignore[missing-module-attribute]
        from tensorboardX.proto.event_pb2 import Event

        self.writer.write_event(Event(step=step, wall_time=time.time(), **content))


class SilentLog:
    """Stands in for RunLog on all processes but the first."""

    def train(self, *_) -> None: ...
    def evaluation(self, *_) -> None: ...
    def sample(self, *_) -> None: ...
    def say(self, *_) -> None: ...
    def draw(self) -> None: ...
    def close(self) -> None: ...


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that was cut off and all else is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def seconds_of(rows: list[dict]) -> float:
    """How long a run has trained, all its processes together, without compiling; 0: not known."""
    times = (row.get("seconds") for row in rows)
    # Of a damaged file anything may come, and a timedelta holds no more than 1e13.
    return max((t for t in times if isinstance(t, int | float) and 0 <= t < 1e10), default=0)


def draw_loss(metrics: Path, picture: Path) -> None:
    """Training loss of every step and validation loss, as a PNG."""
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    val = [(r["step"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]
    if not train:
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), linewidth=1, label="training")
    if val:
        axes.plot(*zip(*val, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = picture.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, picture)


def _keep_until(path: Path, step: int) -> list[dict]:
    """Drops rows after `step`: steps done after the checkpoint are done again; returns the rest."""
    if not path.exists():
        return []
    kept = [r for r in read_metrics(path) if r["step"] <= step]
    write_whole(path, "".join(json.dumps(r) + "\n" for r in kept).encode())
    return kept


def say(text: str) -> None:
    """Prints a line, if it can: not into a pipe that nobody reads, nor a file on a full disk."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
