"""Shapes that no kernel was tuned for: python -m pallas_kernels.benchmark --untuned.

They follow rules: widths from 1 to 8192 that are not multiples of tiles, 1 to 100,000 rows,
sequences that are odd, short or long, head dimensions from 32 to 256, few heads.
"""

import dataclasses

from pallas_kernels.bench.case import Case, shapes
from pallas_kernels.bench.cases import CASES, attention, vlstm

_ROWS = shapes(
    "N C",
    (1, 8191), (7, 100), (333, 2050), (777, 1601), (8192, 3), (100_000, 33), (16384, 1000),
    (5000, 4100), (2000, 7169), (65536, 72), (4099, 768), (100_000, 256),
)  # fmt: skip
_SIZES = {
    "layer_norm": _ROWS,
    "rms_norm": _ROWS[2:8:2],
    "gelu": _ROWS[2:8],
    "swiglu": _ROWS[3:9:2],
    "mlp": shapes("N C F", (777, 500, 1000), (8192, 1000, 2816)),
    "rope": shapes(
        "B T H K D",
        (3, 333, 5, 1, 80),
        (1, 7777, 3, 3, 34),
        (2, 500, 8, 2, 64),
        (1, 333, 8, 2, 128),
        (4, 1024, 8, 2, 96),
    ),  # fmt: skip
    "encoder": shapes("B T C V", (3, 333, 1000, 5003), (1, 7777, 72, 50257), (4, 1024, 100, 50257)),
    "cross_entropy": shapes("N V", (777, 50257), (5000, 1001), (33, 128257), (64, 50257)),
    "linear_cross_entropy": shapes("N C V", (777, 1000, 50257), (5000, 768, 1001)),
}


def _cases():
    for op, sizes in _SIZES.items():
        case = next(case for case in CASES if case.op == op)
        yield dataclasses.replace(case, sizes=sizes, variant="", xla=True)
    heads = "B T H K D"
    causal = (
        (2, 2050, 10, 5, 128), (3, 1000, 6, 6, 80), (1, 33, 4, 4, 64), (16, 129, 2, 1, 32),
        (1, 12345, 3, 1, 128), (5, 777, 7, 7, 96), (1, 4099, 2, 2, 256), (2, 3000, 9, 3, 160),
        (64, 64, 12, 12, 64), (4, 1500, 8, 8, 40), (1, 5000, 1, 1, 64), (9, 500, 5, 5, 120),
    )  # fmt: skip
    yield attention("", shapes(heads, *causal), xla=True)
    full = shapes(heads, (2, 1001, 8, 8, 64), (7, 300, 3, 1, 128))
    yield attention("full", full, pairs=lambda n: n["T"] ** 2, xla=True, causal=False)
    narrow = shapes(heads, (1, 2050, 10, 2, 64), (2, 3001, 4, 4, 128))
    yield attention("window 100", narrow, pairs=lambda n: 100 * (n["T"] - 50), xla=True, window=100)
    cell = "B T NH DQK DV"
    cells = (
        (1, 333, 3, 64, 64),
        (2, 2050, 3, 128, 192),
        (1, 5001, 1, 128, 128),
        (16, 129, 5, 64, 128),
    )
    yield vlstm(shapes(cell, *cells))


UNTUNED: tuple[Case, ...] = tuple(_cases())
