"""Draws docs/step.svg out of the tables of parts in docs/performance.md (with matplotlib):

python docs/step.py
"""

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

HERE = Path(__file__).parent
MODEL = re.compile(r"^### `(\w+)`, (.+)\n(?s:(.*?\*\*all kernels.*?\n))", re.M)
ROW = re.compile(r"^\| ([^|]+) \|" + r" ([\d.]+) \|" * 4, re.M)  # part, bfloat16, fp8, floors
COLORS = "#4477aa #ee6677 #66ccee #228833 #ccbb44 #aa3377 #999999 #222222".split()
# Column of the table, the bar's name, its place below the first bar, height and opacity.
BARS = [
    (0, "bfloat16", 0.0, 0.8, 1.0),
    (2, "floor", 0.7, 0.4, 0.5),
    (1, "fp8", 1.5, 0.8, 1.0),
    (3, "floor", 2.2, 0.4, 0.5),
]
GROUP = 3.8  # from one model's first bar to the next one's


def main():
    """For each model a bar for each column, the same color for the same row of all tables."""
    tables = MODEL.findall((HERE / "performance.md").read_text())
    with rc_context({"svg.hashsalt": "step", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        axes = figure.subplots()
        ticks, names = [], {}
        for group, (model, sizes, text) in enumerate(tables):
            top = GROUP * group
            axes.text(0.5, top - 0.6, f"{model}, {sizes}", weight="bold")
            *rows, (_, *totals) = ROW.findall(text)
            for column, name, below, height, alpha in BARS:
                start = 0.0
                for i, (_, *ms) in enumerate(rows):
                    style = {"color": COLORS[i], "alpha": alpha, "linewidth": 0}
                    axes.barh(top + below, float(ms[column]), height, left=start, **style)
                    start += float(ms[column])
                axes.text(start + 0.6, top + below, totals[column], va="center", size=9)
                ticks.append((top + below, name))
            for i, (part, *_) in enumerate(rows):
                names.setdefault(i, []).append(part)
        axes.set_yticks(*zip(*ticks, strict=True), size=9)
        axes.tick_params("y", length=0)
        axes.set_ylim(GROUP * len(tables) - 0.9, -1.3)
        axes.set_xlabel("ms of kernels a step")
        axes.spines[["top", "right"]].set_visible(False)
        # Attention in one model is the vLSTM in another.
        labels = [", ".join(dict.fromkeys(n)) for n in names.values()]
        legend = [Patch(color=COLORS[i], label=label) for i, label in enumerate(labels)]
        figure.legend(
            handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9
        )
        figure.savefig(HERE / "step.svg", metadata={"Date": None, "Creator": None})
    return figure


if __name__ == "__main__":
    main()
