"""Cases of the ops that generate text: one position or few rows, and no gradients."""

import jax.numpy as jnp

from pallas_kernels.bench.case import A, Case, shapes
from pallas_kernels.quantized.formats import COLUMNS, LANES, WORDS, Format, QuantizedWeight

_WORDS = {"words": A("C S P L W", "int32", "uniform V"), "scales": A("C G R H")}


def _packed_axes(sizes, step: int, parts: int, group: int) -> dict[str, int]:
    """The axes of the words and scales of a packed K x N weight."""
    axes = {"S": sizes["K"] // step, "P": parts, "L": LANES, "W": WORDS}
    axes |= {"G": sizes["K"] // group, "R": COLUMNS // 2, "H": 2}
    return axes | {"C": sizes["N"] // COLUMNS, "V": 2**31 - 1}


def quantized(variant: str, bits: int, *sizes, group: int, format: Format = "int") -> Case:
    """quantized_linear of random words; sizes: (M, K, N)."""
    step, parts = (256, bits // 2 + 1) if format == "2:4" else (256 // bits, 1)

    def pack(x, words, scales):
        shape = (x.shape[-1], words.shape[0] * COLUMNS)
        weight = QuantizedWeight(words, scales, None, shape, bits, group, format)
        return {"x": x, "weight": weight}

    return Case(
        "quantized_linear",
        {"x": A("M K"), **_WORDS},
        shapes("M K N", *sizes),
        {"N": 128},
        variant=f"{variant} group {group}",
        gpu="sm_80" if sizes[0][0] == 1 else "sm_90a",
        forward_only=True,  # gradients are for LoRA, whose rows are many
        derive=lambda n: _packed_axes(n, step, parts, group),
        pack=pack,
    )


def decode(variant: str, *sizes, cache: str = "bfloat16") -> Case:
    """decode_attention of one position to a full cache; sizes: (B, S, H, K, D)."""
    arrays = {"q": A("B T H D"), "k": A("B S K D", cache), "v": A("B S K D", cache)}

    def pack(q, k, v):
        return {"q": q, "k": k, "v": v, "lengths": jnp.full(len(k), k.shape[1])}

    return Case(
        "decode_attention",
        arrays,
        shapes("B T S H K D", *((b, 1, *others) for b, *others in sizes)),
        {"B": 2, "S": 640, "H": 8, "K": 2},
        variant=variant,
        xla=False,  # it writes the keys and values in float32
        gpu="sm_90a",
        forward_only=True,
        pack=pack,
    )


def row(*sizes) -> Case:
    """row_linear with a bias and GELU; sizes: (K, N)."""
    return Case(
        "row_linear",
        {"x": A("M K"), "w": A("N K"), "bias": A("N", "float32")},
        shapes("M K N", *((1, *size) for size in sizes)),
        {"K": 512, "N": 128},
        options={"activation": "gelu"},
        forward_only=True,
        pack=lambda x, w, bias: {"x": x, "weights": [w], "biases": [bias]},
    )


def packed_row(variant: str, shares: tuple[int, ...], *sizes, activation=None) -> Case:
    """row_linear of int4 in groups of 128 with RMS norm; shares of N of the weights; (K, N)."""

    def pack(x, norm, words, scales):
        weights, first = [], 0
        for share in shares:
            some = slice(first, first + share * len(words) // sum(shares))
            shape, first = (x.shape[-1], (some.stop - first) * COLUMNS), some.stop
            weights += [QuantizedWeight(words[some], scales[some], None, shape, 4, 128, "int")]
        return {"x": x, "weights": weights, "norm_weight": norm}

    return Case(
        "row_linear",
        {"x": A("M K"), "norm": A("K", "float32"), **_WORDS},
        shapes("M K N", *((1, *size) for size in sizes)),
        {"K": 512, "N": COLUMNS * sum(shares)},
        options={"activation": activation, "centered": False},
        variant=f"int4, {variant}",
        forward_only=True,
        derive=lambda n: _packed_axes(n, 64, 1, 128),
        pack=pack,
    )
