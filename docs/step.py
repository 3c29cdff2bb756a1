"""Draws docs/step.svg out of the table of parts in docs/performance.md (with matplotlib):

python docs/step.py
"""

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ROW = re.compile(
    r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.M
)  # part, first, now, floor
COLORS = [
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
    "#bbbbbb",
    "#555555",
    "#000000",
]


def main():
    """A bar for each column, a color for each part."""
    parts, *columns = zip(*ROW.findall((HERE / "performance.md").read_text()), strict=True)
    with rc_context({"svg.hashsalt": "step", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        starts = [0.0] * len(columns)
        for i, part in enumerate(parts):
            ms = [float(column[i]) for column in columns]
            axes.barh(range(len(columns)), ms, left=starts, color=COLORS[i], label=part, height=0.7)
            starts = [a + b for a, b in zip(starts, ms, strict=True)]
        names = [f"{n}: {t:.1f}" for n, t in zip(("first", "now", "floor"), starts, strict=True)]
        axes.set_yticks(range(len(columns)), names)
        axes.invert_yaxis()
        axes.set_xlabel("ms of kernels a step, gpt2_124m, batch 32")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
        )
        figure.savefig(HERE / "step.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
