"""Logs a run: metrics.jsonl, TensorBoard, a tracker, loss.png, and a progress bar or lines."""

import contextlib
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxllm.config import Config
from jaxllm.errors import InputError
from jaxllm.files import write_whole
from jaxllm.terminal import PAUSE, is_interactive

# {part of a device's name, without spaces: its dense bf16 FLOP/s}, from the vendor's data sheets.
PEAK_FLOPS = {"H100PCIe": 756e12, "H100NVL": 835e12, "H200NVL": 835e12}  # matched first
PEAK_FLOPS |= {"H100": 989e12, "H200": 989e12, "GB200": 2500e12, "B200": 2250e12, "A100": 312e12}
PEAK_FLOPS |= {"L40S": 362e12, "RTX4090": 165e12}  # the last one with sums in float32
SLOWER = re.compile(r"MIG|Laptop|4090 ?D|A100\d")  # slices, slower variants, others like A1000
WINDOW = 1.0  # seconds of steps whose mean is the speed; a single short step is timed badly


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name, or None if unknown."""
    parts = {} if SLOWER.search(device_kind) else PEAK_FLOPS
    return next((x for part, x in parts.items() if part in device_kind.replace(" ", "")), None)


def peak_memory() -> float | None:
    """Peak memory in GiB of this process's fullest device, or None if unknown."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((s.get("peak_bytes_in_use", 0) for s in stats), default=0) / 2**30 or None


class RunLog:
    """Logs one run to `out_dir`, and to a tracker if there is one.

    A full disk is reported but does not stop the run.

    start: the step to resume from; later rows are dropped.
    saved: the checkpoint's JSON page, which includes the result of `state`.
    tokens, flops: per step over all devices.
    peak: FLOP/s of all devices together, or None.
    """

    def __init__(
        self,
        out_dir: Path,
        steps: int,
        start: int,
        tokens: int,
        flops: float,
        peak: float | None,
        tracker: "Wandb | None" = None,
        saved: dict | None = None,
    ):
        self.path, self.picture = out_dir / "metrics.jsonl", out_dir / "loss.png"
        self.steps, self.tokens, self.flops, self.peak = steps, tokens, flops, peak
        # A resumed run repeats the steps after `start`; a restarted run, step 0, too.
        before = [row for row in read_metrics(self.path) if row["step"] <= (start or -1)]
        self.logged = keys_at(start, before)
        lines = [json.dumps(row).encode() + b"\n" for row in before]
        if self.path.exists():
            write_whole(self.path, b"".join(lines))
        self.rows, self.digest = len(lines), hashlib.sha256(b"".join(lines))
        self.damage = _damage(lines, saved or {})
        self.began = time.perf_counter() - seconds_of(before)  # includes earlier processes
        self.file = self.path.open("ab", buffering=0)
        self.seconds = deque[float]()  # duration of the last steps
        self.printed = -PAUSE  # time of the last line
        self.draws_from = 0.0  # earliest time at which an evaluation draws the losses
        self.unwritten = b""  # rows that a full disk has not taken yet
        self.boards = [Board(out_dir / "tensorboard", start), *filter(None, [tracker])]
        self.console = Console()
        columns = [TextColumn("step"), MofNCompleteColumn()]
        columns += [BarColumn()] * (self.console.width >= 110)
        columns += [TextColumn("{task.fields[news]} left"), TimeRemainingColumn()]
        shown = is_interactive(self.console)
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not shown)
        self.task = self.bar.add_task("", total=steps, completed=start, news="")
        self.bar.start()

    def state(self) -> dict:
        """What a checkpoint stores about the rows so far."""
        return {"rows": self.rows, "metrics": self.digest.hexdigest()}

    def train(
        self, step: int, loss: float, lr: float, grad_norm: float, seconds: float, skips: int = 0
    ) -> None:
        """Logs a step; seconds: mean per step since the last row; skips: skipped in a row."""
        self.seconds.append(seconds)
        while len(self.seconds) > 1 and sum(self.seconds) - self.seconds[0] >= WINDOW:
            self.seconds.popleft()
        mean = sum(self.seconds) / len(self.seconds)
        speed = self.tokens / mean
        row = dict(step=step, loss=loss, lr=lr, grad_norm=grad_norm, step_ms=seconds * 1e3)
        row |= dict(tokens_per_second=speed, tokens=step * self.tokens)
        news = [f"loss {loss:.4f}", f"{speed:,.0f} tokens/s"]
        if self.peak is not None:
            row["mfu"] = self.flops / mean / self.peak
            news.append(f"MFU {row['mfu']:.1%}")
        if memory := peak_memory():
            row["peak_memory_gib"] = memory
        if skips:
            row["skips"] = skips
        self._write(row)
        if not self.bar.disable:
            # Step and time are in every line, other values as far as there is room.
            shown = news[: (self.console.width >= 50) + 2 * (self.console.width >= 80)]
            self.bar.update(self.task, completed=step, news="  ".join(shown))
        elif step == self.steps or time.monotonic() - self.printed >= PAUSE:
            self.printed = time.monotonic()
            left = timedelta(seconds=round((self.steps - step) * mean))
            self.message(f"step {step}/{self.steps}  {'  '.join(news)}  left {left}")

    def evaluation(self, step: int, val_loss: float) -> None:
        """Logs an evaluation; val_loss: mean loss per token, in nats."""
        self._write({"step": step, "val_loss": val_loss})
        self.message(f"step {step}/{self.steps}  validation loss {val_loss:.4f}")
        if time.monotonic() >= self.draws_from:
            self.draw()

    def sample(self, step: int, text: str) -> None:
        """Logs a text that the model wrote, including its prompt."""
        self._write({"step": step, "sample": text})
        self.message(f"step {step}/{self.steps}  sample:\n{text}")

    def message(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if not self.bar.disable:
            # Soft wrap, so that a command can be copied: rich would insert newlines into it.
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text)

    def draw(self) -> None:
        began = time.monotonic()
        try:
            draw_loss(self.path, self.picture)
        except OSError as e:
            self.message(f"{self.picture} could not be drawn: {e.strerror}")
        ended = time.monotonic()
        self.draws_from = ended + 20 * (ended - began)  # it reads all rows: 9 s after 10^6 steps

    def close(self) -> None:
        if not self.bar.disable:  # rich 13 prints an empty line even if disabled
            self.bar.stop()
        if problem := self._flush():
            self.message(f"{self.path} lacks its last rows: {problem}")
        self.file.close()
        for board in self.boards:
            with contextlib.suppress(Exception):
                board.close()

    def _write(self, row: dict) -> None:
        # JSON has no NaN or infinity, so they become null.
        finite = lambda v: v if isinstance(v, str) or math.isfinite(v) else None
        row = {k: finite(v) for k, v in row.items()}
        self.rows += 1
        row["seconds"] = round(time.perf_counter() - self.began, 3)
        reported = bool(self.unwritten)
        line = json.dumps(row).encode() + b"\n"
        self.digest.update(line)
        self.unwritten += line
        if (problem := self._flush()) and not reported:
            self.message(f"{self.path} cannot be written now ({problem}); the next row retries")
        for board in list(self.boards):
            try:
                board.write(row)
            except Exception as e:  # a full disk, or whatever a tracker raises
                self.boards.remove(board)
                why = getattr(e, "strerror", None) or e
                self.message(f"stopped writing {board.name} ({why}); metrics.jsonl has them all")

    def _flush(self) -> str | None:
        """Writes all pending rows; returns the reason if it cannot."""
        try:
            while self.unwritten:  # a write may be partial
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as e:
            return e.strerror
        return None


class Board:
    """TensorBoard events; hides an earlier process's events after step `start`.

    The caller's thread writes them: the thread of tensorboardX's SummaryWriter dies on a full disk,
    and the run would wait for it forever.
    """

    name = "TensorBoard events"

    def __init__(self, folder: Path, start: int):
        # tensorboardX would import PyTorch, where it is installed: 2 to 6 s.  None hides it.
        modules: dict[str, Any] = sys.modules
        hidden = modules.setdefault("torch", None) is None
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if hidden:
            del modules["torch"]
        folder.mkdir(exist_ok=True)
        self.event, self.writer = Event, EventsWriter(str(folder / "events"))
        self._event(start + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, row: dict) -> None:
        from tensorboardX.summary import scalar, text

        for name, value in row.items():
            if isinstance(value, str):
                self._event(row["step"], summary=text(name, value))
            elif name not in ("step", "seconds") and value is not None:
                self._event(row["step"], summary=scalar(name, value))
        if "val_loss" in row:
            self.writer.flush()  # too slow for every step

    def close(self) -> None:
        self.writer.close()

    def _event(self, step: int, **content) -> None:
        self.writer.write_event(self.event(step=step, wall_time=time.time(), **content))


def check_tracker(config: Config) -> None:
    """Raises InputError if the tracker's package is missing."""
    if config.train.tracker == "wandb" and importlib.util.find_spec("wandb") is None:
        raise InputError(
            "train.tracker=wandb needs the package wandb: pip install 'wandb>=0.28,<0.32', or"
            " uv run --extra wandb train.py; or set train.tracker=none"
        )


class Wandb:
    """A run of Weights & Biases, offline unless WANDB_MODE is set.

    A resumed run becomes a separate run there, in the same group.
    """

    name = "values for wandb"

    def __init__(self, out_dir: Path, config: dict):
        os.environ.setdefault("WANDB_MODE", "offline")
        import wandb

        name, project = out_dir.name, os.environ.get("WANDB_PROJECT", "jaxllm")
        about = dict(project=project, name=name, group=name, config=config)
        try:
            # Otherwise wandb would capture and write to standard output.
            settings = wandb.Settings(console="off", silent=True)
            self.run = wandb.init(**about, dir=out_dir, settings=settings)
        except Exception as e:  # such as: no key, no network, a full disk
            raise InputError(
                f"train.tracker=wandb failed ({e}); set WANDB_MODE=offline, or train.tracker=none"
            ) from e
        offline = self.run.settings.mode == "offline"
        folder = Path(self.run.settings.sync_dir)
        self.where = f"offline; `wandb sync {folder}` sends it" if offline else self.run.url

    def write(self, row: dict) -> None:
        values = {k: v for k, v in row.items() if k != "step" and v is not None}
        self.run.log(values, step=row["step"])

    def close(self) -> None:
        """Waits until everything is written."""
        self.run.finish()


class SilentLog:
    """Replaces RunLog on all processes but the first, and logs nothing."""

    damage, state = None, dict

    def __init__(self, out_dir: Path, start: int):
        self.logged = keys_at(start, read_metrics(out_dir / "metrics.jsonl"))

    def ignore(self, *_) -> None: ...

    train = evaluation = sample = message = draw = close = ignore


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, if it exists; skips whatever a damaged file may hold instead."""
    rows, text = [], path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    number = lambda x: x is None or (isinstance(x, int | float) and abs(x) < 1e300)
    fits = lambda key, x: isinstance(x, str) if key == "sample" else number(x)
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is int and 0 <= step < 2**31:
            rows.append({key: x for key, x in row.items() if fits(key, x)})
    return rows


def _damage(lines: list[bytes], saved: dict) -> str | None:
    """How the rows differ from the checkpoint's record; earlier versions stored no digest."""
    rows, digest = saved.get("rows", 0), saved.get("metrics")
    if len(lines) < rows:
        return f"it lacks {rows - len(lines)} rows of this run"
    same = digest in (None, hashlib.sha256(b"".join(lines[:rows])).hexdigest())
    return None if same else "a row of this run was changed"


def keys_at(step: int, rows: list[dict]) -> set[str]:
    """The keys logged for a step; a signal or a kill may have prevented the others."""
    return {key for row in rows if row["step"] == step for key in row}


def seconds_of(rows: list[dict]) -> float:
    """Seconds that a run has trained in all its processes, without compilation; 0 if unknown."""
    times = (row.get("seconds") or 0 for row in rows)
    return max((t for t in times if 0 <= t < 1e10), default=0)  # a timedelta takes at most 1e13


def draw_loss(metrics: Path, picture: Path) -> None:
    """Draws training loss and validation loss over the steps as a PNG."""
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    if all(row.get("loss") is None for row in rows):
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, form, label in (("loss", "-", "training"), ("val_loss", "o-", "validation")):
        if points := [(row["step"], row[key]) for row in rows if row.get(key) is not None]:
            axes.plot(*zip(*points, strict=True), form, linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_whole(picture, png.getvalue())
