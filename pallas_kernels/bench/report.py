"""The table and the plot of pallas_kernels.benchmark, from the records in benchmark.json."""

from pathlib import Path

import numpy as np
from rich.table import Table

_FIRST = ("op", "shape", "direction", "runs")


def _first(r: dict) -> list[str]:
    op = " ".join(filter(None, (r["op"], r["variant"])))
    return [op, text(r["sizes"]), r["direction"], r["runs"]]


def text(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}{n}" for axis, n in sizes.items())


def _empty_table(title: str, caption: str, numbers: str) -> Table:
    """A table with the columns of `_first`, and one for each number (names between commas)."""
    view = Table(title=title, caption=caption)
    for name in _FIRST:
        view.add_column(name)
    for name in numbers.split(", "):
        view.add_column(name, justify="right")
    return view


def _number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def table(result: dict):
    """The records as a rich table; without a GPU, only what needs no timing."""
    tops = result["ceilings"]
    title = f"{result['device']}, JAX {result['versions']['jax']}"
    if not tops:
        return _unmeasured(result, title)
    copy, matmul = tops["copy_TB_per_s"], tops["matmul_TFLOP_per_s"]
    title += f", copy {copy:.2f} TB/s, matmul {matmul:.0f} TFLOP/s"
    caption = "*: partly served by the cache   error: relative, RMS"
    numbers = "ms, rate, of ceiling, XLA ms, x XLA, x cuDNN, error, XLA's"
    view = _empty_table(title, caption, numbers)
    for r in result["records"]:
        mine = r["ms"].get("mosaic")
        times = lambda rival, r=r, mine=mine: (
            f"{r['ms'][rival] / mine:.2f}" if mine and rival in r["ms"] else "-"
        )
        view.add_row(
            *_first(r),
            f"{mine:.4f}" if mine else "-",
            f"{r['rate']['mosaic']:.3g} {r['unit']}" if mine else "-",
            f"{r['of_ceiling']['mosaic']:.0%}{'*' * r['in_cache']}" if mine else "-",
            f"{r['ms']['xla']:.4f}" if "xla" in r["ms"] else "-",
            times("xla"),
            times("cudnn"),
            f"{r['error']['mosaic']:.1e}" if "mosaic" in r["error"] else "-",
            f"{r['error']['xla']:.1e}" if "xla" in r["error"] else "-",
        )
    return view


def _unmeasured(result: dict, title: str):
    """The table without times: what each op must move and compute, and the jnp form's error."""
    caption = "error: of the jnp form, relative, RMS   GFLOP: of matmuls, or all that XLA counts"
    view = _empty_table(title, caption, "MB, GFLOP, operations a byte, error")
    for r in result["records"]:
        error = r["error"].get("xla")
        view.add_row(
            *_first(r),
            _number(r["bytes"] / 1e6),
            _number(r["flops"] / 1e9) if r["flops"] else "-",
            _number(r["flops"] / r["bytes"]) if r["flops"] else "-",
            f"{error:.1e}" if error is not None else "-",
        )
    return view


def _one_line_each(bars, records: list[dict]) -> None:
    """Names the records of horizontal bars, the first at the top."""
    bars.set_yticks(range(len(records)), [" ".join(_first(r)[:3]) for r in records], fontsize=7)
    bars.invert_yaxis()


def _draw_unmeasured(result: dict, path: Path) -> None:
    """Plots the operations for each byte, which give an op's position under any roofline."""
    from matplotlib.figure import Figure

    records = [r for r in result["records"] if r["flops"]]
    figure = Figure(figsize=(10, max(3, 0.2 * len(records))), layout="constrained")
    bars = figure.subplots()
    bars.set_title(f"Not measured: {result['not_measured']}", fontsize=8, wrap=True)
    bars.barh(range(len(records)), [r["flops"] / r["bytes"] for r in records], color="lightgrey")
    bars.set(xscale="log", xlabel="operations a byte; below 270 (fp8: 540) memory limits an H100")
    _one_line_each(bars, records)
    figure.savefig(path, dpi=120)


def draw(result: dict, path: Path) -> None:
    """Plots the roofline (left; one colour for each op) and each record's share of its ceiling."""
    if not result["ceilings"]:
        return _draw_unmeasured(result, path)
    from matplotlib.figure import Figure

    records = [r for r in result["records"] if r["ms"]]
    figure = Figure(figsize=(16, max(6, 0.2 * len(records))), layout="constrained")
    roof, bars = figure.subplots(1, 2)
    figure.suptitle(f"{result['device']}, JAX {result['versions']['jax']}")
    roof.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    bars.set(xlabel="of the copy or matmul ceiling", xlim=(0, 1.1))
    copy, matmul = result["ceilings"].values()
    x = np.geomspace(0.1, 1e4, 200)
    roof.plot(x, np.minimum(copy * x, matmul), color="black", label="ceilings")
    rivals = {"mosaic": "o", "xla": "x", "cudnn": "+"}
    for i, op in enumerate(dict.fromkeys(r["op"] for r in records)):
        for name, marker in rivals.items():
            mine = [r for r in records if r["op"] == op and name in r["ms"] and r["flops"]]
            roof.scatter(
                [r["flops"] / r["bytes"] for r in mine],
                [r["flops"] / r["ms"][name] / 1e9 for r in mine],
                marker=marker,
                color=f"C{i}",
                label=op if name == "mosaic" else None,
            )
    for name, marker in rivals.items():
        rows = [i for i, r in enumerate(records) if name in r["ms"]]
        shares = [records[i]["of_ceiling"][name] for i in rows]
        if name == "mosaic":
            bars.barh(rows, shares, color="lightgrey")
        bars.scatter(shares, rows, marker=marker, label=name)
    _one_line_each(bars, records)
    bars.axvline(1, color="black")
    roof.legend()
    bars.legend()
    figure.savefig(path, dpi=120)
