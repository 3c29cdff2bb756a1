"""Draws docs/fp8-losses.svg out of the table of runs in docs/fp8.md (with matplotlib):

python docs/fp8_losses.py
"""

import re
import statistics
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
# Model, mode and text; then training losses in bfloat16 and fp8, and validation losses.
RUN = re.compile(r"^\| `(\w+)`, `(\w+)`(, \w+|) \| \d+ \|" + r" ([\d.]+) \|" * 4, re.M)
COLORS = ("#4477aa", "#ee6677")


def main():
    """For each model and mode the differences of all pairs, with their mean and standard error."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for model, mode, text, *losses in RUN.findall((HERE / "fp8.md").read_text()):
        t0, t, v0, v = map(float, losses)
        pairs.setdefault(f"{model}, {mode}{text}", []).append((t - t0, v - v0))
    with rc_context({"svg.hashsalt": "fp8-losses", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3), layout="constrained")
        both = figure.subplots(1, 2, sharey=True)
        for axes, column, title in zip(both, (0, 1), ("training", "validation"), strict=True):
            axes.axvline(0, color="grey", linewidth=0.8)
            for row, found in enumerate(pairs.values()):
                points = [pair[column] for pair in found]
                error = statistics.stdev(points) / len(points) ** 0.5
                style = {"color": COLORS[column], "markersize": 5}
                axes.plot(points, [row - 0.15] * len(points), "o", alpha=0.5, **style)
                axes.errorbar(statistics.mean(points), row + 0.15, xerr=error, fmt="s", **style)
            axes.set_title(f"{title} loss, fp8 - bfloat16", size=10)
            axes.set_xlim(-0.1, 0.1)
            axes.spines[["top", "right"]].set_visible(False)
        both[0].set_yticks(range(len(pairs)), list(pairs))
        both[0].invert_yaxis()
        figure.savefig(HERE / "fp8-losses.svg", metadata={"Date": None, "Creator": None})
    return figure


if __name__ == "__main__":
    main()
