"""Writes a page about one run, or about several in the same charts: jaxllm report DIR [DIR ...]

The page is one HTML file without links: it can be sent, and opened without a network.
"""

import contextlib
import io
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from jaxllm.config.command_line import Parser, exit_status
from jaxllm.config.loading import flat
from jaxllm.errors import InputError
from jaxllm.files import read_json, write_json, write_whole
from jaxllm.train.metrics import read_metrics, seconds_of

DOCTYPE = "<!doctype html>"
INK = "#010203"  # a placeholder, which `chart` replaces with the page's text color
COLORS = ("#2f7ed8", "#e07b39", "#3aa655", "#b0539f", "#8c6d46", "#d0a215", "#17a2a2", "#c0392b")
POINTS = 1000  # maximum number of points per curve
SAMPLES = 12  # maximum number of texts per run
CHARTS = (  # key of metrics.jsonl, title, unit, noisy, scale, only the second half
    ("loss", "Loss", "nats per token; dots: validation", True, "as it is", False),
    ("loss", "Loss, second half", "nats per token; dots: validation", True, "as it is", True),
    ("grad_norm", "Gradient norm", "before clipping", True, "log", False),
    ("lr", "Learning rate", "", False, "from 0", False),
    ("tokens_per_second", "Throughput", "tokens/s", True, "from 0", False),
    ("mfu", "Model FLOPs utilisation", "share of the peak", True, "from 0", False),
    ("peak_memory_gib", "Memory", "GiB at most so far, one device", False, "from 0", False),
)
SPIKE = 10  # a log scale ends at this multiple of the highest median


class LoadedRun:
    """The contents of a run's directory; raises InputError if it holds no metrics."""

    def __init__(self, folder: Path, color: str = COLORS[0]):
        path, config = folder / "metrics.jsonl", folder / "config.yaml"
        try:
            begins = (folder / ".lock").exists() and not config.exists()  # the run is compiling
            self.config = "" if begins else config.read_text(encoding="utf-8", errors="replace")
            self.rows = read_metrics(path)  # jaxllm convert writes none
        except OSError as e:
            raise InputError(f"{folder} is not a run's folder: {e.strerror}: {e.filename}") from e
        if not self.rows:
            raise InputError(f"{folder} holds no metrics yet; jaxllm train writes them")
        self.name, self.color = folder.resolve().name, color
        self.steps = max(row["step"] for row in self.rows)  # the last one may have no loss
        try:
            self.about = read_json(folder / "run.json", optional=True)
            self.ops = [[str(x) for x in decision] for decision in self.about.get("ops", [])]
            self.versions = {k: str(v) for k, v in self.about.get("versions", {}).items()}
        except (InputError, TypeError, AttributeError) as e:
            raise InputError(f"{folder / 'run.json'} is damaged: {e}; delete it") from e
        numbers = {k: x for k, x in self.about.items() if isinstance(x, int | float)}
        known: dict[str, Any] = {k: x for k, x in numbers.items() if 0 < x < 1e30}
        self.tokens, each = known.get("tokens_per_step"), known.get("bytes_per_token")
        self.bits = each and 1 / (math.log(2) * each)  # per byte, for a loss of 1 nat per token

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every row with the key."""
        pairs = ((r["step"], r.get(key)) for r in self.rows)
        return [(s, float(v)) for s, v in pairs if v is not None and abs(v) < 1e30]

    def samples(self) -> list[tuple[int, str]]:
        """(step, text) of at most SAMPLES samples, spread evenly from the first to the last."""
        found = [(r["step"], r["sample"]) for r in self.rows if "sample" in r]
        last = len(found) - 1
        kept = {round(i * last / (SAMPLES - 1)) for i in range(SAMPLES)} if found else set()
        return [found[i] for i in sorted(kept)]

    def settings(self) -> dict[str, str]:
        """{"section.key": value} of config.yaml."""
        try:
            sections = yaml.safe_load(self.config)
            found = flat(sections) if isinstance(sections, dict) else {}
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # it may be edited
            return {}
        return {key: str(value) for key, value in found.items() if "." in key}


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduces a curve to at most POINTS points: the lowest and the highest of each stretch."""
    if (size := -(-len(points) * 2 // POINTS)) <= 2:
        return points
    kept = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Moving median over 1/25 of the curve, at about 200 points."""
    reach, every = max(1, len(points) // 50), max(1, len(points) // 200)
    around = lambda i: [v for _, v in points[max(0, i - reach) : i + reach + 1]]
    return [(points[i][0], median(around(i))) for i in range(0, len(points), every)]


def chart(
    runs: list[LoadedRun], key: str, title: str, unit: str, noisy: bool, scale: str, end: bool
) -> dict[str, str] | None:
    """The page's entry for one chart of the runs, with its SVG; None if no run has the key."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    # A log scale cannot show a gradient norm of 0.
    shown = lambda points: [p for p in points if p[1] > 0] if scale == "log" else points
    axis, sizes, tokens = x_axis(runs)
    # Nats per token cannot be compared between tokenizers.
    tokenizers = {str(run.about.get("tokenizer")) for run in runs}
    if in_bits := key == "loss" and len(tokenizers) > 1 and all(run.bits for run in runs):
        unit = unit.replace("nats per token", "bits per byte")
    read = lambda key: [
        [(s * size, v * ((in_bits and run.bits) or 1)) for s, v in run.points(key)]
        for run, size in zip(runs, sizes, strict=True)
    ]
    curves, dots = [shown(points) for points in read(key)], read("val_loss")
    if end:
        half = max((p[0] for points in curves for p in points), default=0) / 2
        late = lambda lines: [[p for p in points if p[0] > half] for points in lines]
        curves, dots = late(curves), late(dots)
    if not any(curves):
        return None
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK)
    with rc_context(ink | {"xtick.color": INK, "ytick.color": INK, "svg.hashsalt": title}):
        figure = Figure(figsize=(5, 2.8), dpi=72, layout="constrained")
        axes, lines = figure.subplots(), []
        for run, points, validation in zip(runs, curves, dots, strict=True):
            noise = noisy and len(points) > 50
            lines.append(smooth(points) if noise else thin(points))
            if noise:
                axes.plot(*zip(*thin(points), strict=True), color=run.color, lw=1, alpha=0.3)
            if points:
                axes.plot(*zip(*lines[-1], strict=True), color=run.color, lw=1.5 if noise else 1)
            if validation and key == "loss":
                axes.plot(*zip(*thin(validation), strict=True), "o", color=run.color, ms=4)
        axes.set(xlabel=axis, ylabel=unit)
        if axis == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        elif tokens:
            ways = lambda step: step * tokens, lambda count: count / tokens
            top = axes.secondary_xaxis("top", functions=ways)
            top.xaxis.set_major_formatter(EngFormatter(unit=" tokens", sep=""))
        set_scale(axes, curves, scale)
        forms = {"tokens_per_second": EngFormatter(sep=""), "mfu": PercentFormatter(1)}
        axes.yaxis.set_major_formatter(forms.get(key, "{x:g}"))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        out, without = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=without)
        data = json.dumps(hover(axes, runs, lines))
    picture = out.getvalue().replace(INK, "currentColor")
    picture = picture[picture.index("<svg") :]  # drops the XML declarations
    picture = picture.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return {"title": title, "axis": axis, "curves": data, "picture": Markup(picture)}


def x_axis(runs: list[LoadedRun]) -> tuple[str, list[int], int | None]:
    """(the x axis's unit, how many a step of each run has, tokens per step if equal in all).

    Runs whose steps have different sizes are compared by tokens.
    """
    known = [run.tokens for run in runs if run.tokens]
    if len(known) < len(runs) or len(set(known)) == 1:
        return "step", [1] * len(runs), known[0] if len(known) == len(runs) else None
    return "tokens", known, None


def hover(axes, runs: list[LoadedRun], lines: list) -> list[dict]:
    """For the page's script: {name, points: [(column of the SVG, x, value)]} of each line."""
    column = lambda x: round(float(axes.transData.transform((x, 1))[0]), 1)
    return [
        {"name": run.name * (len(runs) > 1), "points": [(column(x), x, y) for x, y in points]}
        for run, points in zip(runs, lines, strict=True)
        if points
    ]


def set_scale(axes, curves: list[list[tuple[int, float]]], scale: str) -> None:
    """Sets the limits of the y axis so that outliers do not flatten the curves."""
    from matplotlib.ticker import LogLocator, NullLocator

    if scale == "as it is":
        return
    medians = [v for points in curves for _, v in smooth(points)]
    if scale == "from 0":  # cuts off single fast steps after a pause
        axes.set_ylim(0, 1.15 * max(medians) or 1)
        return
    values = [v for points in curves for _, v in points]
    lowest, highest = max(min(values), min(medians) / SPIKE), min(max(values), max(medians) * SPIKE)
    axes.set_yscale("log")
    # The limits span a factor of at least 2.5, so there is a tick at 1, 2 or 5.
    axes.set_ylim(lowest / 1.6, highest * 1.6)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())


def summary(run: LoadedRun) -> dict[str, str]:
    """The run's column in the first table, {row: value}; "" if unknown."""

    def number(key, form, choose=lambda values: values[-1]):
        values = [v for _, v in run.points(key)]
        return form.format(choose(values)) if values else ""

    duration = seconds_of(run.rows)
    wanted = run.settings().get("train.steps", "")
    wanted = f" of {int(wanted):,}" if wanted.isdecimal() else ""
    each = run.bits or 0
    bits = number("val_loss", "{:.4f}", lambda values: min(values) * each) if each else ""
    return {
        "model": str(run.about.get("model", "")),
        "steps": f"{run.steps:,}{wanted}",
        "tokens": f"{run.steps * run.tokens:,}" if run.tokens else "",
        "last loss": number("loss", "{:.4f}"),
        "best validation loss": number("val_loss", "{:.4f}", min),
        "best validation, bits per byte": bits,
        "tokens/s, median": number("tokens_per_second", "{:,.0f}", median),
        "MFU, median": number("mfu", "{:.1%}", median),
        "most memory of a device": number("peak_memory_gib", "{:.1f} GiB", max),
        "updates skipped": number("skips", "{:,}", len),
        "device": str(run.about.get("device", "")),
        "duration": "" if not duration else str(timedelta(seconds=round(duration))),
        "started": str(run.about.get("started", "")),
    }


def differences(runs: list[LoadedRun]) -> list[list[str]]:
    """The settings in which the runs differ, and their value in each run."""
    settings = [run.settings() for run in runs]
    keys = dict.fromkeys(key for found in settings for key in found)
    rows = [[key, *(found.get(key, "") for found in settings)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def page(runs: list[LoadedRun]) -> str:
    columns = [summary(run) for run in runs]
    facts = [[name, *(column[name] for column in columns)] for name in columns[0]]
    # The name of each run after a dot in the color of its curves.
    dot = Markup('<i class="dot" style="background:{}"></i>{}')
    text = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(text)
    return template.render(
        runs=runs,
        names=[dot.format(run.color, run.name) for run in runs],
        facts=[fact for fact in facts if any(fact[1:])],
        charts=filter(None, [chart(runs, *of_chart) for of_chart in CHARTS]),
        differences=differences(runs),
    )


def summarize_run(out_dir: Path, prompt: str, chat: bool = False) -> str:
    """The losses, speed and reports of the run in out_dir, and the command that generates text.

    prompt: for that command.  chat: whether the model answers messages.
    """
    lines = [f"done: {out_dir}"]
    try:
        run = LoadedRun(out_dir)
    except InputError as e:  # a full disk
        return f"{lines[0]} ({e})"
    if losses := run.points("loss"):
        (first, from_loss), (last, to_loss) = losses[0], losses[-1]
        line = f"loss     {from_loss:.4f} at step {first:,}, {to_loss:.4f} at step {last:,}"
        if validation := run.points("val_loss"):
            line += f", validation {validation[-1][1]:.4f}"
        lines.append(line)
        tokens = run.steps * (run.tokens or 0)
        line = f"speed    {tokens:,} tokens in {timedelta(seconds=round(seconds_of(run.rows)))}"
        rows = [(0, 0.0), *run.points("step_ms")]  # each covers the steps since the previous row
        if spent := sum((s - b) * ms / 1e3 for (b, _), (s, ms) in pairwise(rows)):
            line += f", of which {spent:,.1f} s are steps: {tokens / spent:,.0f} tokens/s"
        lines.append(line)
    pages = [out_dir / name for name in ("loss.png", "report.html")]
    lines.append(f"look at  {', '.join(str(page) for page in pages if page.exists())}")
    if (out_dir / "tokenizer.json").exists():
        lines.append(f"try it   {generate_command(out_dir, prompt or 'The', chat)}")
    return "\n".join(lines)


def generate_command(out_dir: Path, prompt: str, chat: bool = False) -> str:
    """The command that generates text with this run, in the form that started this process."""
    uv, python = "UV" in os.environ, sys.executable  # under `uv run`, `python` may be another one
    if Path(sys.argv[0]).name == "jaxllm":  # the package's console command
        command = ["jaxllm", "generate"]
    else:
        known = uv or shutil.which("python") == python
        command = ["python" if known else python, "-m", "jaxllm", "generate"]
    before = ["uv", "run"] if uv else []
    text = [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
    options = ["--checkpoint", str(out_dir.absolute()), *["--chat"] * chat, *text]
    return shlex.join([*before, *command, *options])


def describe(folder: Path, about: dict, ops: list) -> None:
    """Writes run.json: `about` (model, tokens per step, device, ...), versions, how the ops ran."""
    path = folder / "run.json"
    about = about | {
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
        | {"python": platform.python_version()},
        "ops": [[decision.op, decision.runs, decision.why] for decision in ops],
    }
    with contextlib.suppress(InputError, KeyError):  # a resumed run keeps it
        about["started"] = read_json(path)["started"]
    write_json(path, about, indent=1)


def write(folders: list[Path], out: Path) -> None:
    """Writes the page about the runs in `folders`; raises InputError if one holds no run."""
    colors = COLORS * len(folders)
    runs = [LoadedRun(folder, color) for folder, color in zip(folders, colors, strict=False)]
    if out.is_file():
        with out.open("rb") as file:
            if file.read(len(DOCTYPE)) != DOCTYPE.encode():
                raise InputError(f"{out} is not a report and would be overwritten; change --out")
    write_whole(out, page(runs).encode(errors="replace"))  # a folder may have any bytes


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 2: bad input."""
    return exit_status(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    parser = Parser(prog="jaxllm report", description=__doc__.partition("\n\n")[2])
    parser.option("folders DIR", "a run's directory", nargs="+")
    parser.option("--out FILE", "default: report.html in the first directory")
    words = parser.parse_args(argv)
    out = words.out or words.folders[0] / "report.html"
    try:
        write(words.folders, out)
    except OSError as e:
        raise InputError(f"cannot write {out}: {e.strerror}; change --out") from e
    print(out)
