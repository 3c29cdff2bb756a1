"""Draws docs/rows.svg out of the table by rows in docs/decoding.md (with matplotlib):

python docs/rows.py
"""

import re
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \| ([\d.]+) \| ([\d.]*) ?\| ([\d.]*) ?\| ([\d.]*) ?\|$", re.M)
NAMES = {"ours": "#0072b2", "gemlite": "#009e73", "bfloat16": "#d55e00", "XLA's form": "#999999"}
K, N = 4096, 14336
WEIGHT = K * N * (4 + 16 / 128) / 8  # bytes: 4 bits, and a scale of 16 bits for each 128
COPY, MATMUL = 2.95e12, 800e12  # bytes/s and FLOP/s that docs/benchmarks.md measures


def floor(rows):
    """Microseconds that the bytes or the operations take, whichever take longer."""
    bytes_moved = WEIGHT + 2 * rows * (K + N)
    return 1e6 * np.maximum(bytes_moved / COPY, 2.0 * rows * K * N / MATMUL)


def main():
    """Times over rows, both axes logarithmic."""
    rows, *times = zip(*ROW.findall((HERE / "decoding.md").read_text()), strict=True)
    rows = [int(r) for r in rows]
    with rc_context({"svg.hashsalt": "rows", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.5, 3.6), layout="constrained")
        axes = figure.subplots()
        for (name, color), column in zip(NAMES.items(), times, strict=True):
            known = [(r, float(t)) for r, t in zip(rows, column, strict=True) if t]
            axes.plot(*zip(*known, strict=True), "o-", color=color, label=name)
        x = np.geomspace(rows[0], rows[-1], 200)
        axes.plot(x, floor(x), "--", color="black", label="bytes or operations")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(rows, [str(r) for r in rows])
        axes.set(xlabel="rows of x", ylabel="us")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        figure.savefig(HERE / "rows.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
