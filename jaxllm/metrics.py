"""What a run says: metrics.jsonl, TensorBoard events, loss.png, a progress bar or plain lines."""

import json
import math
import os
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Dense bf16 FLOP/s of one device, from the vendor's data sheets, by a part of its name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name, None if it is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


class RunLog:
    """Writes down one run in `out_dir`; everything up to `start` (a resumed step) is kept.

    tokens, flops: of one step over all devices; peak: FLOP/s of all devices together, or None.
    """

    def __init__(
        self, out_dir: Path, steps: int, start: int, tokens: int, flops: float, peak: float | None
    ):
        from tensorboardX import SummaryWriter

        self.path = out_dir / "metrics.jsonl"
        self.picture = out_dir / "loss.png"
        self.steps, self.tokens, self.flops, self.peak = steps, tokens, flops, peak
        _keep_until(self.path, start)
        self.file: TextIO = self.path.open("a", encoding="utf-8")
        self.board = SummaryWriter(str(out_dir / "tensorboard"), purge_step=start + 1)
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

    def train(self, step: int, loss: float, lr: float, grad_norm: float, seconds: float) -> None:
        """One step done: `seconds` is its time."""
        speed = self.tokens / seconds
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
        self._write(row)
        if self.bar is not None:
            self.bar.update(self.task, completed=step, news=news)
        else:
            left = (self.steps - step) * seconds
            print(f"step {step}/{self.steps}  {news}  left {left:.0f} s", flush=True)

    def evaluation(self, step: int, val_loss: float) -> None:
        """One evaluation: mean loss a token, in nats."""
        self._write({"step": step, "val_loss": val_loss})
        self.say(f"step {step}/{self.steps}  validation loss {val_loss:.4f}")
        self.draw()

    def say(self, text: str) -> None:
        """A line for the reader, above the progress bar."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def draw(self) -> None:
        """Draws loss.png from metrics.jsonl."""
        draw_loss(self.path, self.picture)

    def close(self) -> None:
        """Ends the bar and the files."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        self.file.close()
        self.board.close()

    def _write(self, row: dict) -> None:
        # A loss that is not finite stays readable for every JSON reader, as null.
        row = {k: v if math.isfinite(v) else None for k, v in row.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        for name, value in row.items():
            if name != "step" and value is not None:
                self.board.add_scalar(name, value, row["step"])


class SilentLog:
    """Stands in for RunLog on all processes but the first."""

    def train(self, *_) -> None: ...
    def evaluation(self, *_) -> None: ...
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


def _keep_until(path: Path, step: int) -> None:
    """Drops rows after `step`: steps done after the checkpoint are done again."""
    if not path.exists():
        return
    kept = [r for r in read_metrics(path) if r["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
    os.replace(temporary, path)


def error_line(message: str) -> None:
    """Prints `error: ...` on standard error, as one line."""
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
