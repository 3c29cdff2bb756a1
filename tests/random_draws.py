"""The rules by which random_calls.py draws calls of each op: arrays, and options.

Consecutive calls go through all ops, so any `len(ORDER)` of them contain each op once.
"""

import dataclasses
import math

import jax
import numpy as np
from random_calls import HALVES, A, Call, Draw

from pallas_kernels import Packed, RopeScaling


def encoder(r: Draw):
    v, c, t = r.size(5, 64, zero=0), r.large(1280, 1600, 4096) or r.size(64, 128), r.size(8, 33)
    t = t if c > 200 else r.large(1000, 4099) or t
    dtype, info = r.weight_dtype(), np.iinfo(kind := r.integers())
    special = (-1, v, info.min, info.max) if r.x64 or info.bits < 64 else (-1, v)
    tokens = A((r.batch(1, 2, 3, 9), t), kind, "ids", (0, v, *(special if r.odds(0.4) else ())))
    wpe = r.maybe(A((t + r.one(0, 1, 5), c), r.one(dtype, "float32")))
    options = dict(dtype=r.maybe(r.dtype))
    return dict(tokens=tokens, wte=A((v, c), dtype), wpe=wpe), options


def _norm(r: Draw):
    c = r.size(64, 128, 256, *r.one((), (), (1024,), (2048, 4096)))
    c = r.large(192, 320, 768, 1280, 1600, 3072, 5120, share=0.3) or c
    heads, rows = r.one((), (), (3,)), r.rows(4, 8, 33)
    if many := c <= 320 and r.large(1999, 4100):  # rows, for blocks that take several tiles
        rows = (many,)
    x = r.floats(*rows, *heads, c, huge=1e16, special=(math.inf, math.nan))
    values = r.one((0.2, 1.0), (0.2, 1.0), (1.0, 0.0))
    weight = lambda share: r.maybe(A((*heads, c), r.weight_dtype(), "normal", values), share)
    return x, weight, dict(eps=r.one(1e-5, 1e-6, 1e-3, 1.0))


def norm(r: Draw, centered: bool = False):
    x, weight, options = _norm(r)
    arrays = dict(x=x, weight=weight(0.7))
    if r.odds(0.5):
        residual = A(x.shape, r.one(x.dtype, x.dtype, "float32"))
        arrays |= dict(residual=residual, x_bias=weight(0.5))
    elif centered and r.odds(0.5):
        gate = A(x.shape, r.one(x.dtype, x.dtype, "float32"), "normal", (r.one(1.0, 10.0),))
        return arrays | dict(gate=gate), options
    return arrays | (dict(bias=weight(0.5)) if centered else {}), options


def layer_norm(r: Draw):
    return norm(r, centered=True)


def rope(r: Draw):
    (h, k), b, t = r.heads(), r.batch(1, 2, 3), r.size(16, 32, 128)
    d = 2 * r.one(1, 3, 4, 16, 20, 32, 48, 64, 128)
    q, key = A((b, t, h, d), r.dtype), A((b, t, k, d), r.one(r.dtype, r.dtype, "float32"))
    kind = r.integers()
    positions = A(
        r.one((t,), (b, t)), kind, "ids", (r.one(0, 0, -t, -(2**24)), r.one(t + 1, 2**15, 2**24))
    )
    theta = r.one(10000.0, 500000.0, 100.0, 1.0)
    scaling = r.maybe(_scaling(r, theta), 0.3)
    options = dict(theta=theta, scaling=scaling, layout=r.one("half", "half", "interleaved"))
    if r.odds(0.3):
        q, key = _packed(q, key, key), None
    return dict(q=q, k=key, positions=positions), options


def _scaling(r: Draw, theta: float) -> RopeScaling:
    low, high = r.one((1.0, 4.0), (1.0, 4.0), (0.5, 32.0))
    yarn = r.maybe(1.0, 0.3 * (theta > 1))
    return RopeScaling(r.one(8.0, 32.0, 1.0), low, high, r.one(8192, 8192, 64), yarn)


def _packed(*parts: A) -> Packed:
    """Arrays (B, T, heads, width) side by side in one, of the first one's dtype."""
    columns = sum(a.shape[2] * a.shape[3] for a in parts)
    array = dataclasses.replace(parts[0], shape=(*parts[0].shape[:2], columns))
    return Packed(array, tuple(a.shape[2:] for a in parts))


def _attention(r: Draw, t: int, s: int):
    window = r.one(1, 1, 2, 64, r.one(7, 63, 65, 127, 128, 200), max(s, 1), s + 1, 1000)
    softcap = r.maybe(r.one(2.0, 30.0, 100.0, 1000.0), 0.25)
    scale = r.maybe(r.one(0.3, 0.3, 1.0, 0.01, 0.01, 0.0, -0.5), 0.3)
    return dict(window=r.maybe(window, 0.35), softcap=softcap, scale=scale)


def _head_width(r: Draw) -> int:
    rare = r.one((256,), (200,), (1,), (112, 192), (160, 224))
    return r.one(64, 64, 128, 96, 16, 32, 40, 80, *rare)


def _many(r: Draw) -> tuple[int, int, int]:
    """Batch, query and kv heads: more than an H100 has processors, so blocks take several."""
    h, k = r.heads(most=3)
    return 140 // k, h, k


def attention(r: Draw):
    r.dtype = r.one(*HALVES)
    (h, k), b, d = r.heads(), r.batch(1, 1, 2), _head_width(r)
    t, causal = r.size(64, 64, 128, 192), r.odds(0.7)
    s = t if r.odds(0.6) else t + r.size(64) if causal else r.size(64, 128)
    if r.odds(0.06):
        (b, h, k), d, t = _many(r), r.one(64, 64, 128, 80), r.one(24, 64, 72)
        s = t + r.one(0, 0, 70)
    elif length := r.large(650, 1100, 2050):
        (h, k), b, few = r.heads(most=2), 1, r.one(1, 40, 65, 130)
        t, s = r.one((few, length), (few, length), (length, few), (650, 650))
        causal = causal and t <= s
    options = _attention(r, t, s) | dict(causal=causal, return_lse=r.odds(0.3))
    options["window"] = options["window"] if causal else None
    segments = r.segments(b, s)
    if t > s or r.odds(0.3):
        segments = (dataclasses.replace(segments, shape=(b, t)), segments)
    q = A((b, t, h, d), r.dtype, "normal", (r.one(1.0, 1.0, 10.0),))
    kind = "normal" if r.odds(0.9) else "rows of zeros"
    keys = dict(k=A((b, s, k, d), r.dtype, kind), v=r.floats(b, s, k, d, huge=1e3))
    return dict(q=q, **keys, segment_ids=segments if r.odds(0.4) else None), options


def attention_packed(r: Draw):
    r.dtype = r.one(*HALVES)
    (h, k), b, d = r.heads(), r.batch(1, 1, 2), _head_width(r)
    t = r.one(r.size(64, 128), 8 * r.one(1, 3, 8, 9, 16, 17))
    if r.odds(0.1):
        (b, h, k), d, t = _many(r), r.one(64, 64, 128, 80), r.one(24, 64, 72)
    of = lambda heads: A((b, t, heads, d), r.dtype)
    options = _attention(r, t, t) | dict(return_lse=r.odds(0.3))
    segments = r.segments(b, t) if r.odds(0.4) else None
    return dict(q=_packed(of(h), of(k), of(k)), segment_ids=segments), options


def decode_attention(r: Draw):
    r.dtype = r.one(*HALVES)
    (h, k), b = r.heads(), r.batch(1, 2, 5)
    float8, t = r.odds(0.3), r.one(1, 1, 1, 2, 5, 8)
    d = r.one(32, 64, 128, 96) if float8 else r.one(16, 48, 64, 80, 112, 128, 160, 192, 224, 256)
    s = r.one(8 * r.one(1, 2, 5, 9, 17, 33), r.size(64, zero=0))
    if length := r.large(520, 1032, 2056, 4104, share=0.3):  # several blocks share a row
        s, b, (h, k) = length, min(b, 2), r.heads(most=4)
    t, new = min(t, s), t == 1 and r.odds(0.5)
    lengths, turned = (0, s + 1, t, s), new and r.odds(0.5)
    if not turned:  # RoPE would take the length for a position
        lengths += (-1, -(2**31), 2**31 - 1)
    lengths = A((b,), r.integers(), "ids", lengths)
    cache = lambda: (
        A((b, s, k, d), "float8_e4m3fn", "float8") if float8 else A((b, s, k, d), r.dtype)
    )
    scaled, about = float8 or r.odds(0.2), (0.001, 0.02) if float8 else (0.1, r.one(1.0, -1.0))
    scales = lambda: r.maybe(A((b, k), "float32", "normal", about)) if scaled else None
    key = A((b, 1, k, d), r.dtype)
    arrays = dict(q=A((b, t, h, d), r.dtype), k=cache(), v=cache(), lengths=lengths)
    arrays |= dict(new=(key, key) if new else None, k_scale=scales(), v_scale=scales())
    if turned:
        theta = r.one(10000.0, 500000.0)
        turned = dict(theta=theta, scaling=r.maybe(_scaling(r, theta), 0.3))
    return arrays, _attention(r, t, s) | (turned or {})


def swiglu(r: Draw):
    shape = (*r.rows(4, 64), r.size(64, 128, 1000))
    gate = r.floats(*shape, huge=1e12, special=(math.inf, math.nan))
    up = r.floats(*shape, huge=1e12, dtype=r.one(r.dtype, r.dtype, "float32"))
    return dict(gate=gate, up=up), {}


def gelu(r: Draw):
    f = r.one(128, 256, r.size(64, 128, 1000))
    x = r.floats(*r.rows(4, 64), f, huge=1e30, special=(math.inf, math.nan))
    return dict(x=x, bias=r.maybe(A((f,), r.weight_dtype()))), {}


def _tiles(r: Draw) -> tuple[tuple[int, ...], int, int]:
    """Rows, C and F, mostly such that the kernels take them."""
    r.dtype = r.one(*HALVES, *HALVES, r.dtype)
    if r.odds(0.2):
        return r.rows(128), r.size(64), r.size(128)
    return r.one((128,), (2, 128), (128, 3)), r.one(64, 128, 192, 320), r.one(128, 256, 384)


def _dense(r: Draw, *shape: int) -> A:
    return A(shape, r.dtype, "normal", (shape[0] ** -0.5 if shape[0] else 1.0,))


def mlp(r: Draw):
    if r.odds(0.4):
        return mlp_fp8(r)
    rows, c, f = _tiles(r)
    gate = _dense(r, c, f) if r.odds(0.5) else None
    bias = A((f,), r.weight_dtype()) if gate is None and r.odds(0.9) else None
    weights = dict(up=_dense(r, c, f), down=_dense(r, f, c), gate=gate, bias=bias)
    x = A((*rows, c), r.dtype, *r.one((), (), ("rows of zeros",)))
    return dict(x=x, **weights), {}


def _labels(r: Draw, shape, v: int, wrong: float = 0.1) -> tuple[A, dict]:
    """Labels, some ignored, seldom some outside of the vocabulary; and the options about them."""
    info, ignore = np.iinfo(kind := r.integers()), r.one(-100, -100, -1, 0, 3)
    vocab = r.maybe(r.one(1, v, max(1, v - 1), max(1, v - 64)))
    special = [ignore, ignore] if r.odds(0.5) else []
    if r.odds(wrong):
        special += [info.max if r.x64 or info.bits < 64 else 2**31 - 1]
    labels = A(shape, kind, "ids", (0, v if vocab is None else vocab, *special))
    return labels, dict(vocab_size=vocab, ignore_index=ignore)


def cross_entropy(r: Draw):
    rows, v = r.rows(4, 41), r.one(256, 257, r.size(128, 1024, zero=0))
    if wide := r.large(
        12416, 25088, 28800, 57472, share=0.3
    ):  # around what a kernel's tiles divide
        rows, v = r.one((1,), (3,), (2, 21)), wide
    labels, options = _labels(r, rows, v)
    logits = r.floats(*rows, v, huge=1e4, special=(-math.inf, math.inf, math.nan))
    return dict(logits=logits, labels=labels), options


def linear_cross_entropy(r: Draw):
    rows, v, c = r.rows(64), r.one(256, 300, r.size(128, zero=0)), r.size(64)
    if wide := r.large(12416, 25000, 57472, share=0.2):
        v, c = wide, r.one(1, 16, 64)
    if fp8 := r.odds(0.3):
        rows, c = r.one((64,), (2, 64)), r.one(64, 128)
    # In XLA's form one NaN makes the scale of all fp8 gradients NaN, in the kernel's its row alone.
    labels, options = _labels(r, rows, v, wrong=0.0 if fp8 else 0.1)
    transposed = r.odds(0.4)
    shape = (c, v) if transposed else (v, c)
    weight = A(shape, r.weight_dtype(), "normal", (r.one(0.1, 0.1, 1.0),))
    options |= dict(transposed=transposed, fp8=fp8, softcap=r.maybe(r.one(5.0, 30.0), 0.3))
    options |= dict(reduction=r.one("mean", "sum"), chunk=r.maybe(r.one(1, 7, 64, 100)))
    scale = A((), "float32", "all", (r.one(1.0, 0.5, 1 / 3, -2.0, 0.0),))
    return dict(x=A((*rows, c), r.dtype), weight=weight, labels=labels, scale=scale), options


def _cell(r: Draw):
    r.dtype = r.one(*HALVES, *HALVES, "float32")
    b, heads, t = r.batch(1, 1, 2), r.one(1, 2, 3), r.size(64, 64, 128)
    widths = r.one(
        (64, 64), (64, 128), (128, 128), (16, 16), (16, 48), (80, 32), (5, 7), (256, 512)
    )
    if length := r.large(700, 1601):  # from 24 chunks on they are split
        b, heads, t, widths = 1, 1, length, r.one((64, 64), (64, 128), (16, 48))
    i = r.one(A((b, t, heads), "float32", "normal", (r.one(1.0, 5.0),)),
              A((b, t, heads), "float32", "normal", (1.0, -10.0)),
              A((b, t, heads), "float32", "some", (-math.inf,)),
              A((b, t, heads), "float32", "some", (100.0,)))  # fmt: skip
    i = dataclasses.replace(i, dtype=r.one("float32", "float32", r.dtype))
    f = A((b, t, heads), i.dtype, "normal", r.one((1.0, 3.0), (1.0, 0.0), (10.0, 0.0), (0.0, 30.0)))
    options = dict(gate=r.one("exp", "exp", "sigmoid"), normalize=True)
    if i.values == "normal" and i.more[0] == 1:  # else e^i without a denominator overflows
        options["normalize"] = r.odds(0.7)
    return b, heads, t, widths, i, f, options | dict(chunk_size=r.maybe(r.one(1, 16, 50), 0.2))


def _state(r: Draw, b: int, heads: int, dqk: int, dv: int):
    m = A((b, heads), "float32", *r.one(("normal",), ("all", (-math.inf,)), ("normal", (1.0, 5.0))))
    empty = ("zeros",) if m.values == "all" else ("normal",)
    return (A((b, heads, dqk, dv), "float32", *empty), A((b, heads, dqk), "float32", *empty), m)


def vlstm(r: Draw):
    b, heads, t, (dqk, dv), i, f, options = _cell(r)
    q, k, v = (A((b, t, heads, d), r.dtype) for d in (dqk, dqk, dv))
    state = r.maybe(_state(r, b, heads, dqk, dv), 0.3)
    mild = i.values == "normal"  # e^m of a final state is in range
    options |= dict(return_state=r.odds(0.4) and mild)
    segments = r.maybe(r.segments(b, t), 0.3)
    return dict(q=q, k=k, v=v, i=i, f=f, segment_ids=segments, initial_state=state), options


def vlstm_packed(r: Draw, gated: bool = False):
    b, heads, t, (dqk, dv), i, f, options = _cell(r)
    q = _packed(*(A((b, t, heads, d), r.dtype) for d in (dqk, dqk, dv, dv)[: 3 + gated]))
    weight = A((heads, dv), r.weight_dtype(), "normal", (0.2, 1.0)) if gated else None
    state = r.maybe(_state(r, b, heads, dqk, dv), 0.2)
    options |= dict(return_state=r.odds(0.2) and i.values == "normal")
    options |= dict(norm_eps=r.maybe(r.one(1e-5, 1e-3))) if gated else {}
    arrays = dict(q=q, k=None, v=None, i=i, f=f, norm_weight=weight, initial_state=state)
    return arrays | dict(segment_ids=r.maybe(r.segments(b, t), 0.3)), options


def vlstm_gated(r: Draw):
    return vlstm_packed(r, gated=True)


def vlstm_step(r: Draw):
    b, heads, _, _, i, f, options = _cell(r)
    dqk, dv = r.one((64, 64), (64, 128), (16, 32), (80, 32), (5, 7), (256, 512))
    gates = (dataclasses.replace(gate, shape=(b, heads)) for gate in (i, f))
    q, k, v = (A((b, heads, d), r.dtype) for d in (dqk, dqk, dv))
    del options["chunk_size"]
    arrays = dict(zip("qkvif", (q, k, v, *gates), strict=True))
    return arrays | dict(state=_state(r, b, heads, dqk, dv)), options


def _quantized_weight(r: Draw, k: int, n: int, plain: bool = False) -> A:
    """A weight (K, N) of any format that fits K, with few bits."""
    format = "int" if plain else r.one("int", "int", "int", "fp8", "2:4")
    bits = {"int": r.one(8, 4, 2, 1), "fp8": 8, "2:4": r.one(8, 4)}[format]
    bits = 8 if plain else bits
    groups = [g for g in (32, 64, 128) if k % g == 0 and (format != "2:4" or g > 32)]
    group = (
        None if plain or (r.odds(0.4) and (format != "2:4" or k % 4 == 0)) else r.one(None, *groups)
    )
    symmetric = format != "int" or plain or r.odds(0.6)
    return A((k, n), "float32", "quantized", (bits, group, symmetric, format, plain))


def quantized_linear(r: Draw):
    r.dtype = r.one("bfloat16", "bfloat16", "bfloat16", r.dtype)
    k = r.one(32, 64, 64, 128, 192, 320, 512, 4 * r.size(8, 16, zero=0))
    n, rows = r.size(16, 64, 72, zero=0), r.one((1,), r.rows(8), r.rows(64))
    if deep := r.large(1024, 2048, 4160, 8192, share=0.2):
        k = deep
    elif wide := r.large(1000, 2200):
        k, n = r.one(64, 256), wide
    elif many := r.large(300, 520):
        rows = (many,)
    weight = _quantized_weight(r, k, n, plain=r.odds(0.06))
    options = dict(dtype=r.maybe("float32", 0.3))
    bias = r.maybe(A((n,), r.weight_dtype()), 0.4)
    return dict(x=r.floats(*rows, k, huge=1e3), weight=weight, bias=bias), options


def row_linear(r: Draw):
    k, wide = r.one(256, 512, 768, 1024, r.size(256, zero=0)), r.large(600, 2800)
    k = k if wide else r.large(2048, 4096, 8192, 8448, share=0.3) or k
    activation, packed = r.maybe(r.one("gelu", "swiglu")), r.odds(0.3)
    r.dtype = "bfloat16" if packed else r.dtype
    widths = [wide or 4 * r.one(1, 2, 3, 16, 17) for _ in range(r.one(1, 1, 2, 3))]
    widths = [widths[0]] * 2 if activation == "swiglu" else widths
    kind, like = r.weight_dtype(), _quantized_weight(r, k - k % 4 or 4, 4)
    k = like.shape[0] if packed else k
    matrix = lambda n: (
        dataclasses.replace(like, shape=(k, n)) if packed else A((n, k), kind, "normal", (k**-0.5,))
    )
    single = len(widths) == 1 or activation == "swiglu"
    arrays = dict(
        x=A((*r.one((), (1,), (1, 1)), k), r.dtype),
        weights=tuple(matrix(n) for n in widths),
        biases=r.maybe(tuple(r.maybe(A((n,), r.weight_dtype()), 0.7) for n in widths)),
        norm_weight=r.maybe(A((k,), r.weight_dtype(), "normal", (0.2, 1.0))),
    )
    arrays["norm_bias"] = arrays["norm_weight"] and r.maybe(A((k,), "float32"))
    residual = r.one(r.dtype, "float32")
    arrays["residual"] = (
        A((*arrays["x"].shape[:-1], widths[0]), residual) if single and r.odds(0.5) else None
    )
    return arrays, dict(activation=activation, norm_eps=r.one(1e-5, 1e-6), centered=r.odds(0.5))


def _fp8(r: Draw) -> tuple[tuple[int, ...], int, int]:
    """Rows and the two widths of a matrix: multiples of 64, seldom of 16 or nothing."""
    if r.odds(0.2):
        return r.rows(16, 64), r.size(16, 64), r.size(16, 64)
    k, n = r.one(64, 128, 192), r.one(64, 128, 320)
    if wide := r.large(576, 1088, 2112):
        k, n = r.one((wide, n), (k, wide))
    return r.one((64,), (2, 64), (192,)), k, n


_ODD = ("spread",), ("rows of zeros",), ("some", (math.inf,)), ("some", (math.nan,))


def fp8_linear(r: Draw):
    rows, k, n = _fp8(r)
    x = A((*rows, k), r.dtype, *r.one(("normal",), ("normal",), *_ODD))
    bias = r.maybe(A((n,), r.weight_dtype()))
    row_norm = r.maybe(
        A((), "float32", "all", (x.values == "spread" and 1e5 or 3.0 * k**0.5 + 3,)), 0.4
    )
    return dict(
        x=x, weight=A((k, n), r.weight_dtype(), "normal", (0.1,)), bias=bias, row_norm=row_norm
    ), {}


def mlp_fp8(r: Draw):
    rows, c, f = _fp8(r)
    kind = r.one(r.dtype, r.dtype, "float32")
    matrix = lambda *shape: A(shape, kind, "normal", (0.1,))
    gate = r.maybe(matrix(c, f))
    bias = A((f,), r.weight_dtype()) if gate is None else None
    row_norm = r.maybe(A((), "float32", "all", (3.0 * c**0.5 + 3,)), 0.3)
    weights = dict(up=matrix(c, f), down=matrix(f, c), gate=gate, bias=bias)
    x = A((*rows, c), r.dtype, *r.one(("normal",), ("normal",), *_ODD[1:]))
    return dict(x=x, **weights, row_norm=row_norm), dict(precision="fp8")


DRAWS = {
    "encoder": (encoder,),
    "layer_norm": (layer_norm,),
    "rms_norm": (norm,),
    "rope": (rope,),
    "attention": (attention, attention, attention_packed),
    "decode_attention": (decode_attention,),
    "swiglu": (swiglu,),
    "gelu": (gelu,),
    "mlp": (mlp,),
    "cross_entropy": (cross_entropy,),
    "linear_cross_entropy": (linear_cross_entropy,),
    "vlstm": (vlstm, vlstm_packed, vlstm_gated),
    "vlstm_step": (vlstm_step,),
    "quantized_linear": (quantized_linear,),
    "row_linear": (row_linear,),
    "fp8_linear": (fp8_linear,),
}
GENERAL = ("attention", "decode_attention")  # ops with a form of its own for other GPUs
# Ops with more forms than others have more calls.
ORDER = (*DRAWS, "attention", "vlstm", "vlstm", "mlp", "quantized_linear", "layer_norm")


def scaled(r: Draw, arrays: dict) -> dict:
    """The arrays, some of those with normal values times a power of ten; gates stay below 100."""

    def change(path, a: A) -> A:
        if a.values != "normal" or np.issubdtype(a.dtype, np.integer) or r.odds(0.4):
            return a
        most = (-3, 1) if path[0].key in "if" else (-3, 2) if a.dtype == "float16" else (-8, 4)
        factor = float(f"{10 ** r.rng.uniform(*most):.2g}")
        return dataclasses.replace(a, more=tuple(factor * x for x in a.more or (1.0,)))

    return jax.tree_util.tree_map_with_path(change, arrays)


def draw(seed: int, number: int) -> Call:
    """Call `number` of this seed."""
    op = ORDER[number % len(ORDER)]
    r = Draw(seed, number)
    arrays, options = r.one(*DRAWS[op])(r)
    options = {name: value for name, value in options.items() if value is not None}
    implementation = "mosaic" if r.odds(0.8) else None
    general = op in GENERAL and r.odds(0.2)
    inside = r.maybe(r.one("vmap", "map", "checkpoint"), 0.2)
    settings = (r.x64, r.odds(1 / 12), general, inside)
    arrays = scaled(r, arrays) if r.odds(0.2) else arrays
    return Call(op, (seed, number), arrays, options, implementation, *settings)
