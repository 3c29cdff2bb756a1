"""Draws docs/roofline.svg from the times in docs/gpu (with matplotlib):

python docs/roofline.py
"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import gpu_worker  # noqa: E402

from pallas_kernels.bench import compiling  # noqa: E402

TIMES = HERE / "gpu" / "h100-80gb-hbm3_jax0.12.0.1.json"
COPY, MATMUL = 2.95e12, 800e12  # bytes/s and FLOP/s that docs/benchmarks.md measures there
FORWARD = "forward"


def points(ms: dict[str, float]) -> dict[str, list[tuple[str, float, float]]]:
    """{op: (direction, operations a byte, FLOP/s)} of the cases whose operations are counted."""
    found = {}
    for name, (case, sizes) in gpu_worker.ops().items():
        moved = compiling.bytes_moved(case, sizes)
        for direction, count in compiling.counted_flops(case, sizes).items():
            time = ms.get(f"{name} {direction}")
            if time and count:
                speed = count / time * 1e3
                found.setdefault(case.op, []).append((direction, count / moved[direction], speed))
    return found


def main():
    stored = json.loads(TIMES.read_text())
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    versions = stored["versions"]
    axes.set_title(f"{stored['device']}, JAX {versions['JAX']}, ptxas {versions['ptxas']}")
    x = np.geomspace(0.1, 2e4, 200)
    label = f"copy {COPY / 1e12} TB/s, matmul {MATMUL / 1e12:.0f} TFLOP/s"
    axes.plot(x, np.minimum(COPY * x, MATMUL) / 1e12, color="black", label=label)
    for i, (op, found) in enumerate(points(stored["figures"]["ms"]).items()):
        for direction, intensity, speed in found:
            style = {"facecolors": f"C{i % 10}" if direction == FORWARD else "none"}
            style |= {"edgecolors": f"C{i % 10}", "marker": "o" if i < 10 else "s"}
            axes.scatter(intensity, speed / 1e12, s=28, **style)
        axes.scatter([], [], color=f"C{i % 10}", marker="o" if i < 10 else "s", label=op)
    axes.scatter([], [], facecolors="none", edgecolors="black", label="open: with backward")
    axes.legend(fontsize=7, ncols=2)
    # Without the date and with a fixed salt, the same table gives the same file.
    with rc_context({"svg.hashsalt": "roofline"}):
        figure.savefig(HERE / "roofline.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
