"""One page about a run, or several over one another: python -m jaxllm.report DIR [DIR ...]

The page is one HTML file without any link: it can be sent, and opened without a network.
"""

import argparse
import html
import io
import json
import re
import sys
from pathlib import Path
from statistics import median

from jaxllm.errors import InputError
from jaxllm.metrics import error_line, read_metrics

INK = "#010203"  # stands for the page's text colour until the picture is in the page
COLORS = ("#2f7ed8", "#e07b39", "#3aa655", "#b0539f", "#8c6d46", "#d0a215", "#17a2a2", "#c0392b")
POINTS = 1000  # of one curve
CHARTS = (  # keys of metrics.jsonl, title, unit
    (("loss", "val_loss"), "Loss", "nats per token; dots: validation"),
    (("tokens_per_second",), "Throughput", "tokens/s"),
    (("mfu",), "Model FLOPs utilisation", "share of the peak"),
    (("lr",), "Learning rate", ""),
    (("grad_norm",), "Gradient norm", "before clipping"),
)
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; }
body { padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin-bottom: 1rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
.charts { display: grid; gap: 1rem; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); }
figure { margin: 0; } svg { width: 100%; height: auto; } figcaption { font-weight: 600; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); white-space: pre-wrap; }
.dot { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em; }
"""


class Loaded:
    """What a run's directory tells; raises InputError if it holds no metrics."""

    def __init__(self, folder: Path):
        path = folder / "metrics.jsonl"
        try:
            self.rows = read_metrics(path)
            self.config = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            raise InputError(f"{folder} is no run's directory: {e.strerror}: {e.filename}") from e
        if not self.rows:
            raise InputError(f"{path} holds no metrics yet")
        self.name = folder.resolve().name
        self.about = {}
        if (folder / "run.json").exists():
            try:
                self.about = dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))
            except (ValueError, TypeError) as e:
                raise InputError(f"{folder / 'run.json'} is damaged: {e}") from e

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every row that has the key."""
        pairs = ((r["step"], r.get(key)) for r in self.rows)
        return [(s, float(v)) for s, v in pairs if isinstance(v, int | float)]


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS of them: of each stretch the lowest and the highest."""
    size = -(-len(points) * 2 // POINTS)
    if size <= 2:
        return points
    kept = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def chart(runs: list[Loaded], keys: tuple[str, ...], title: str, unit: str) -> str:
    """An inline SVG of the runs' curves, or nothing if no run has the first key."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not any(run.points(keys[0]) for run in runs):
        return ""
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK)
    with rc_context(ink | {"xtick.color": INK, "ytick.color": INK, "svg.hashsalt": title}):
        figure = Figure(figsize=(5, 3), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        for run, color in zip(runs, COLORS * len(runs), strict=False):
            for key, style in zip(keys, ("-", "o"), strict=False):
                if points := thin(run.points(key)):
                    axes.plot(*zip(*points, strict=True), style, color=color, lw=1, ms=4)
        axes.set(xlabel="step", ylabel=unit)
        axes.grid(alpha=0.3)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    picture = out.getvalue().replace(INK, "currentColor")
    picture = picture[picture.index("<svg") :]  # without the declarations of a file of its own
    picture = re.sub("<metadata>.*?</metadata>", "", picture, flags=re.S)
    picture = picture.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{picture}</figure>"


def table(head: list[str], rows: list[list]) -> str:
    """An HTML table; cells are text, but for those that begin with a tag of our own."""
    cell = lambda x: x if str(x).startswith("<span") else html.escape(str(x))
    line = lambda tag, cells: "".join(f"<{tag}>{cell(c)}</{tag}>" for c in cells)
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def summary(run: Loaded, color: str) -> list:
    """The run's line in the first table."""
    last = lambda key: run.points(key)[-1][1] if run.points(key) else None
    text = lambda x, form: "" if x is None else format(x, form)
    values = [v for _, v in run.points("val_loss")]
    speeds = [v for _, v in run.points("tokens_per_second")]
    dot = f'<span><i class="dot" style="background:{color}"></i>{html.escape(run.name)}</span>'
    return [
        dot,
        run.rows[-1]["step"],
        text(last("loss"), ".4f"),
        text(min(values, default=None), ".4f"),
        text(median(speeds) if speeds else None, ",.0f"),
        text(last("mfu"), ".1%"),
        text(run.about.get("peak_memory_gib"), ".1f") and f"{run.about['peak_memory_gib']:.1f} GiB",
        run.about.get("device", ""),
    ]


def page(runs: list[Loaded]) -> str:
    """The whole HTML page."""
    head = [
        "run",
        "steps",
        "loss",
        "best validation",
        "tokens/s (median)",
        "MFU",
        "memory",
        "device",
    ]
    rows = [summary(run, color) for run, color in zip(runs, COLORS * len(runs), strict=False)]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(', '.join(r.name for r in runs))}</title>"
        f"<style>{STYLE}</style></head><body><h1>Training report</h1>",
        table(head, rows),
        "<h2>Curves</h2><div class=charts>",
        *(chart(runs, *c) for c in CHARTS),
        "</div>",
    ]
    for run in runs:
        parts.append(f"<h2>{html.escape(run.name)}</h2>")
        if versions := run.about.get("versions"):
            parts.append(table(["package", "version"], [[k, v] for k, v in versions.items()]))
        if ops := run.about.get("ops"):
            parts.append(table(["op", "runs on", "why"], ops))
        if sample := run.about.get("sample"):
            parts.append(f"<h3>Sample</h3><pre>{html.escape(sample)}</pre>")
        parts.append(
            f"<details><summary>Configuration</summary><pre>{html.escape(run.config)}</pre></details>"
        )
    return "".join(parts) + "</body></html>\n"


def describe(folder: Path, ops: list, sample: str | None) -> None:
    """Writes run.json: device, versions, peak memory, how the ops ran, the sample of text."""
    import platform
    from importlib.metadata import version

    import jax

    device = jax.local_devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    about = {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
        | {"python": platform.python_version()},
        "peak_memory_gib": memory and memory / 2**30,
        "ops": [list(decision) for decision in ops],
        "sample": sample,
    }
    (folder / "run.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


def write(folders: list[Path], out: Path) -> None:
    """Writes the page about the runs in `folders`; raises InputError if one holds no run."""
    out.write_text(page([Loaded(folder) for folder in folders]), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxllm.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run's directory")
    parser.add_argument("--out", type=Path, help="default: report.html in the first directory")
    words = parser.parse_args(argv)
    out = words.out or words.folders[0] / "report.html"
    try:
        write(words.folders, out)
    except InputError as e:
        error_line(str(e))
        return 2
    except OSError as e:
        error_line(f"cannot write {out}: {e.strerror}")
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
