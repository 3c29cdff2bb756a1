"""The cases of pallas_kernels.benchmark: every op with its arrays, at the sizes of real models."""

import jax
import jax.numpy as jnp

from pallas_kernels.bench import generation
from pallas_kernels.bench.case import A, Case, shapes
from pallas_kernels.packed import Packed

_NORMS = shapes("N C", (32768, 768), (16384, 4096), (8192, 8192), (4096, 1600))
_GATED = shapes("N C", (8192, 14336), (32768, 3072))
_X, _W = A("N C"), A("C", "float32")
_GATE, _BIAS = {"gate": A("C F")}, {"bias": A("F", "float32")}
_GATES = {"i": A("B T NH", "float32"), "f": A("B T NH", "float32")}  # of the vLSTM


def _cudnn(q, k, v, *, causal, window=None):
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=local, implementation="cudnn"
    )


def _norm(op: str, bias: bool, add: bool) -> Case:
    arrays = {"x": _X} | ({"residual": _X} if add else {}) | {"weight": _W}
    arrays |= {"bias": _W} if bias else {}
    writes = tuple(name for name in arrays if name != "residual")  # it shares x's gradient
    return Case(
        op,
        arrays,
        _NORMS,
        {"N": 128, "C": 1024},
        reads=("x", "weight"),
        writes=writes,
        variant="residual" if add else "",
        gpu="sm_80",
    )


def _mlp(variant: str, arrays: dict[str, A], matmuls: int, *sizes, fp8: bool = False) -> Case:
    return Case(
        "mlp",
        {"x": A("N C"), "up": A("C F"), "down": A("F C"), **arrays},
        shapes("N C F", *sizes),
        {"N": 128, "C": 64, "F": 192 if fp8 else 256},
        reads=("x", "up", "down", *arrays),
        variant=f"{variant}, fp8" if fp8 else variant,
        options={"precision": "fp8"} if fp8 else {},
        flops=lambda n: 2 * matmuls * n["N"] * n["C"] * n["F"],
        backward=2,
        rate=1 + fp8,
        gpu="sm_89" if fp8 else "sm_90a",
    )


def attention(variant, sizes, *, pairs=None, xla=False, packed=False, **options) -> Case:
    """pairs: the number of pairs of a query and a key that it sees, from the sizes."""
    arrays = {"q": A("B T H D"), "k": A("B T K D"), "v": A("B T K D")}
    small = {"B": 1, "T": 384, "H": 4, "K": 2}
    if packed:
        arrays |= {"segment_ids": A("B T", "int32", "documents L")}
        small |= {"L": 150}
    pairs = pairs or (lambda n: n["T"] ** 2 / 2)
    return Case(
        "attention",
        arrays,
        sizes,
        small,
        reads=tuple(arrays)[3:],
        options={"causal": True} | options,
        variant=variant,
        flops=lambda n: 4 * n["B"] * n["H"] * n["D"] * pairs(n),
        cudnn=None if packed else _cudnn,
        xla=xla,
        gpu="sm_90a",
    )


def _attention_packed(*sizes) -> Case:
    """q, k and v with the same heads, in one array."""

    def parts(q):
        return q.reshape(*q.shape[:2], 3, 12, -1)

    return Case(
        "attention",
        {"q": A("B T P")},
        shapes("B T P", *sizes),
        {"B": 1, "T": 384},
        variant="packed",
        flops=lambda n: 2 * n["B"] * n["T"] ** 2 * n["P"] // 3,
        cudnn=lambda q: _cudnn(*(parts(q)[:, :, i] for i in range(3)), causal=True),
        gpu="sm_90a",
        pack=lambda q: {"q": Packed(q, ((12, q.shape[2] // 36),) * 3)},
    )


def _encoder(variant: str, fill: str) -> Case:
    return Case(
        "encoder",
        {"tokens": A("B T", "int32", fill), "wte": A("V C", "float32"), "wpe": A("T C", "float32")},
        shapes("B T C V", (32, 1024, 768, 50304), (4, 8192, 4096, 128256)),
        {"B": 2, "T": 256, "C": 256, "V": 1000},
        reads=("tokens",),
        options={"dtype": jnp.bfloat16},
        variant=variant,
    )


def vlstm(sizes, *, xla=True) -> Case:
    arrays = {"q": A("B T NH DQK"), "k": A("B T NH DQK"), "v": A("B T NH DV"), **_GATES}
    small = {"B": 1, "T": 300, "NH": 1}
    return Case("vlstm", arrays, sizes, small, reads=tuple(arrays), xla=xla)


def _vlstm_packed(*sizes, gated: bool = False, xla=True) -> Case:
    """q, k, v and perhaps o in one array; DV is 2 DQK; sizes: (B, T, NH, DQK)."""
    columns = 6 if gated else 4  # of DQK, for each head
    weight = {"norm_weight": A("NH DV", "float32")} if gated else {}
    arrays = {"q": A("B T P"), **_GATES, **weight}

    def pack(q, i, **others):
        heads, dqk = i.shape[2], q.shape[2] // (columns * i.shape[2])
        parts = ((heads, dqk),) * 2 + ((heads, 2 * dqk),) * (2 if gated else 1)
        return {"q": Packed(q, parts), "k": None, "v": None, "i": i, **others}

    return Case(
        "vlstm",
        arrays,
        shapes("B T NH DQK", *sizes),
        {"B": 1, "T": 304, "NH": 1},
        reads=tuple(arrays),
        variant="packed, gated" if gated else "packed",
        derive=lambda n: {"P": columns * n["NH"] * n["DQK"], "DV": 2 * n["DQK"]},
        pack=pack,
        xla=xla,
    )


_FP8_LINEAR = Case(
    "fp8_linear",
    {"x": A("M K"), "weight": A("K N")},
    shapes("M K N", (32768, 768, 3072), (8192, 2048, 8192), (8192, 4096, 14336)),
    {"M": 128, "K": 192, "N": 64},
    reads=("x", "weight"),
    flops=lambda n: 2 * n["M"] * n["K"] * n["N"],
    backward=2,
    rate=2,
    gpu="sm_89",
)


def _head(variant: str, **fields) -> Case:
    return Case(
        "linear_cross_entropy",
        {"x": A("N C"), "weight": A("V C", "float32"), "labels": A("N", "int32", "uniform V")},
        shapes("N C V", (32768, 768, 50304), (8192, 2048, 128256)),
        {"N": 64, "C": 256, "V": 5000},
        reads=("x", "weight", "labels"),
        variant=variant,
        flops=lambda n: 2 * n["N"] * n["C"] * n["V"],
        backward=2,
        **fields,
    )


_ATTENTION = "B T H K D"
_VLSTM = "B T NH DQK DV"
_LLAMA_8B = [(b, s, 32, 8, 128) for s in (8192, 131072) for b in (1, 32)]  # B, S, H, K, D
_UP_DOWN = (1, 4096, 14336), (1, 14336, 4096)  # M, K, N of Llama 3.1 8B
_UP = _UP_DOWN[0], (256, 4096, 14336)
CASES = (
    _norm("layer_norm", bias=True, add=False),
    _norm("rms_norm", bias=False, add=False),
    _norm("layer_norm", bias=True, add=True),
    _norm("rms_norm", bias=False, add=True),
    Case(
        "layer_norm",
        {"x": A("B T H D"), "gate": A("B T H D"), "weight": A("H D", "float32")},
        shapes("B T H D", (32, 1024, 6, 128), (8, 4096, 8, 512)),
        {"B": 1, "T": 64},
        reads=("x", "gate", "weight"),
        variant="gate",
        gpu="sm_80",
    ),
    Case("gelu", {"x": _X}, _GATED, {"N": 64, "C": 1024}, reads=("x",)),
    Case("swiglu", {"gate": _X, "up": _X}, _GATED, {"N": 64, "C": 1024}, reads=("gate", "up")),
    _mlp("swiglu", _GATE, 3, (32768, 768, 2048), (8192, 2048, 8192), (8192, 4096, 14336)),
    _mlp("gelu", _BIAS, 2, (32768, 768, 3072)),
    Case(
        "rope",
        {"q": A("B T H D"), "k": A("B T K D"), "positions": A("T", "int32", "arange")},
        shapes("B T H K D", (32, 1024, 12, 4, 64), (4, 4096, 32, 8, 128)),
        {"B": 1, "T": 512},
        reads=("positions",),
    ),
    _encoder("uniform ids", "uniform V"),
    _encoder("Zipf ids", "zipf V"),
    Case(
        "cross_entropy",
        {"logits": A("N V"), "labels": A("N", "int32", "uniform V")},
        shapes("N V", (8192, 50304), (4096, 128256)),
        {"N": 64, "V": 5120},
        reads=("logits", "labels"),
    ),
    _head(""),
    _head("fp8", rate=2, options={"fp8": True}, gpu="sm_89"),
    attention("", shapes(_ATTENTION, (32, 1024, 12, 12, 64), (4, 4096, 32, 8, 128)), xla=True),
    attention("", shapes(_ATTENTION, (4, 4096, 32, 8, 64), (1, 16384, 16, 16, 128))),
    attention("", shapes(_ATTENTION, (8, 2048, 16, 16, 96), (2, 4096, 8, 8, 256))),
    attention(
        "full",
        shapes(_ATTENTION, (4, 4096, 32, 8, 128), (4, 4096, 32, 8, 64)),
        pairs=lambda n: n["T"] ** 2,
        causal=False,
    ),
    attention(
        "window 1024",
        shapes(_ATTENTION, (1, 16384, 16, 16, 128)),
        pairs=lambda n: min(n["T"], 1024) * (n["T"] - min(n["T"], 1024) / 2),
        window=1024,
    ),
    attention(
        "documents",
        shapes("B T H K D L", (1, 16384, 16, 16, 128, 2048), (4, 4096, 32, 8, 128, 1000)),
        pairs=lambda n: (n["T"] // n["L"] * n["L"] ** 2 + (n["T"] % n["L"]) ** 2) / 2,
        packed=True,
    ),
    _attention_packed((32, 1024, 2304), (4, 2048, 4608)),
    # Tiles of 8 rows and 16 columns do not fill these.
    attention("", shapes(_ATTENTION, (4, 2050, 32, 8, 128), (4, 2048, 16, 16, 72))),
    generation.decode("", *_LLAMA_8B, (32, 1024, 12, 12, 64)),
    generation.decode("float8 cache", *_LLAMA_8B[:3], cache="float8_e4m3fn"),
    vlstm(shapes(_VLSTM, (16, 1024, 12, 64, 64), (32, 1024, 6, 64, 128))),
    vlstm(shapes(_VLSTM, (16, 2048, 4, 128, 256), (8, 8192, 8, 256, 512)), xla=False),
    _vlstm_packed((32, 1024, 6, 64)),
    _vlstm_packed((16, 2048, 4, 128), (8, 8192, 8, 256), xla=False),
    _vlstm_packed((32, 1024, 6, 64), gated=True),
    _vlstm_packed((16, 2048, 4, 128), (8, 8192, 8, 256), xla=False, gated=True),
    _FP8_LINEAR,
    _mlp("swiglu", _GATE, 3, (8192, 2048, 8192), (8192, 4096, 14336), fp8=True),
    _mlp("gelu", _BIAS, 2, (32768, 768, 3072), fp8=True),
    generation.row((768, 3072), (3072, 768), (2048, 2048)),
    generation.packed_row("q, k and v", (4, 1, 1), (4096, 6144)),
    generation.packed_row("gate and up", (1, 1), (4096, 28672), activation="swiglu"),
    generation.quantized("int4", 4, *_UP_DOWN, (1, 6144, 2048), group=32),
    generation.quantized("int4", 4, *_UP_DOWN, group=128),
    generation.quantized("int4", 4, *((m, 4096, 14336) for m in (8, 64, 128, 256)), group=128),
    generation.quantized("int4", 4, (256, 14336, 4096), group=128),
    generation.quantized("int8", 8, *_UP, group=128),
    generation.quantized("int2", 2, *_UP, group=128),
    generation.quantized("int1", 1, *_UP, group=128),
    generation.quantized("fp8", 8, *_UP, group=128, format="fp8"),
    generation.quantized("2:4 of int8", 8, *_UP, group=128, format="2:4"),
    generation.quantized("2:4 of int4", 4, *_UP, group=128, format="2:4"),
)
