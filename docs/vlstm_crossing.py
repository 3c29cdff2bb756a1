"""Draws docs/vlstm_crossing.svg out of the table of tokens/s in docs/vlstm.md (with matplotlib):

python docs/vlstm_crossing.py
"""

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \| \d+ \| (\d+) \| (\d+) \|", re.M)  # T, batch, vlstm, llama3
NAMES = {"vlstm_124m": "#0072b2", "llama3_124m": "#d55e00"}


def main():
    """Both models' tokens/s over T, both axes logarithmic."""
    lengths, *rates = zip(*ROW.findall((HERE / "vlstm.md").read_text()), strict=True)
    lengths = [int(t) for t in lengths]
    with rc_context({"svg.hashsalt": "vlstm", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.5, 3), layout="constrained")
        axes = figure.subplots()
        for (name, color), rate in zip(NAMES.items(), rates, strict=True):
            rate = [int(r) / 1000 for r in rate]
            axes.plot(lengths, rate, "o-", color=color)
            axes.annotate(name, (lengths[-1], rate[-1]), (0, 7), textcoords="offset points",
                          ha="right", color=color)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(t) for t in lengths])
        axes.set_ylim(0)
        axes.set(xlabel="T (positions of a sequence)", ylabel="thousand tokens/s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        figure.savefig(HERE / "vlstm_crossing.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
