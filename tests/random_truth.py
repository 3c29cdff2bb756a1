"""The ops' formulas in float64, written without the ops' references: the truth of random calls.

JAX differentiates them.  Floating arguments are float64; integers are NumPy arrays, of any dtype.
`of` names what is not independent: packed weights are unpacked by `dequantize`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Packed
from pallas_kernels.quantized.formats import PlainWeight, dequantize


def whole(x, low: int, high: int) -> np.ndarray:
    """Integers of any dtype as int64, those outside of [low, high] at its ends."""
    return np.asarray(np.clip(np.asarray(x, object), low, high), np.int64).reshape(x.shape)


def same(x, y) -> np.ndarray:
    """Whether integers of any dtypes are equal."""
    return np.asarray(np.asarray(x, object) == np.asarray(y, object), bool)


def sigmoid_of(x):
    return 1 / (1 + jnp.exp(-jnp.abs(x))) * jnp.where(x >= 0, 1, jnp.exp(-jnp.abs(x)))


def silu_of(x):
    return x * sigmoid_of(x)


def gelu_of(x):
    small = jnp.where(jnp.abs(x) < 1e3, x, jnp.where(x > 0, 1e3, -1e3))
    u = math.sqrt(2 / math.pi) * (small + 0.044715 * small**3)
    return x * sigmoid_of(2 * u)


def encoder(tokens, wte, wpe=None, *, dtype=None):
    y = wte[whole(tokens, 0, wte.shape[0] - 1)]
    return y if wpe is None else y + wpe[: tokens.shape[1]]


def _affine(n, weight, bias):
    n = n if weight is None else n * weight
    return n if bias is None else n + bias


def layer_norm(x, weight=None, bias=None, residual=None, x_bias=None, gate=None, *, eps):
    s = _sum(x, residual, x_bias)
    z = s - s.mean(-1, keepdims=True)
    y = _affine(z / jnp.sqrt((z * z).mean(-1, keepdims=True) + eps), weight, bias)
    y = y if gate is None else y * sigmoid_of(gate)
    return y if residual is None else (y, s)


def rms_norm(x, weight=None, bias=None, residual=None, x_bias=None, *, eps):
    s = _sum(x, residual, x_bias)
    y = _affine(s / jnp.sqrt((s * s).mean(-1, keepdims=True) + eps), weight, bias)
    return y if residual is None else (y, s)


def _sum(*terms):
    return functools.reduce(lambda a, b: a if b is None else a + b, terms)


def _turn(x, positions, theta, scaling, layout="half"):
    """RoPE by complex numbers; the angle is float32, as the op promises."""
    d = x.shape[-1]
    frequency = [theta ** (-2 * i / d) for i in range(d // 2)]
    if scaling is not None:
        factor, low, high, original, yarn = scaling
        for i, f in enumerate(frequency):
            share = (original * f / (2 * math.pi) - low) / (high - low)
            if yarn is not None:
                pair = lambda n: d / 2 * math.log(original / (2 * math.pi * n)) / math.log(theta)
                first, last = max(math.floor(pair(high)), 0), min(math.ceil(pair(low)), d - 1)
                share = 1 - (i - first) / (last - first or 0.001)
            share = min(1, max(0, share))
            frequency[i] = (1 - share) * f / factor + share * f
    positions = np.asarray(positions).astype(np.float32)
    angle = positions[..., None, None] * np.array(frequency, np.float64).astype(np.float32)
    turn = np.exp(1j * angle.astype(np.float64))
    pairs = (
        x.reshape(*x.shape[:-1], 2, d // 2)
        if layout == "half"
        else x.reshape(*x.shape[:-1], d // 2, 2)
    )
    axis = -2 if layout == "half" else -1
    a, b = jnp.take(pairs, 0, axis), jnp.take(pairs, 1, axis)
    both = a * turn.real - b * turn.imag, a * turn.imag + b * turn.real
    return jnp.stack(both, axis).reshape(x.shape)


def rope(q, k=None, positions=None, *, theta, scaling=None, layout="half"):
    if isinstance(q, Packed):
        q, k, v = _parts(q)
        turned = [_turn(x, positions, theta, scaling, layout) for x in (q, k)]
        return jnp.concatenate([jax.lax.collapse(x, 2) for x in (*turned, v)], 2)
    return tuple(_turn(x, positions, theta, scaling, layout) for x in (q, k))


def _softmax(q, k, v, seen, scale=None, softcap=None):
    """q (B,T,H,D), k and v (B,S,K,D), seen (B or 1,T,S) -> out, lse (B,H,T)."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    z = jnp.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    seen = jnp.broadcast_to(jnp.asarray(seen)[:, None], z.shape)
    some = seen.any(-1)
    z = jnp.where(seen, z, -1e300)
    top = jax.lax.stop_gradient(z.max(-1, keepdims=True, initial=-1e300))
    p = jnp.where(seen, jnp.exp(z - top), 0)
    total = jnp.where(some, p.sum(-1), 1)
    out = jnp.einsum("bhts,bshd->bthd", p / total[..., None], v)
    return out, jnp.where(some, jnp.log(total) + top[..., 0], -jnp.inf)


def _visible(t: int, s: int, window, causal=True):
    """(T, S): the last query has the last key's position."""
    back = (np.arange(t)[:, None] + s - t) - np.arange(s)[None]
    seen = back >= 0 if causal else np.ones((t, s), bool)
    return seen if window is None else seen & (back < window)


def attention(
    q, k=None, v=None, segment_ids=None,
    *, causal=True, window=None, return_lse=False, scale=None, softcap=None,
):  # fmt: skip
    if isinstance(q, Packed):
        q, k, v = _parts(q)
    t, s = q.shape[1], k.shape[1]
    seen = _visible(t, s, window, causal)[None]
    if segment_ids is not None:
        pair = isinstance(segment_ids, tuple)
        of_q, of_k = segment_ids if pair else (segment_ids[:, s - t :], segment_ids)
        seen = seen & same(of_q[:, :, None], of_k[:, None])
    out, lse = _softmax(q, k, v, seen, scale, softcap)
    return (out, lse) if return_lse else out


def decode_attention(
    q, k, v, lengths, new=None, k_scale=None, v_scale=None,
    *, window=None, theta=None, scaling=None, scale=None, softcap=None,
):  # fmt: skip
    t, s = q.shape[1], k.shape[1]
    lengths = whole(lengths, 0, s)
    if theta is not None:
        q, key = (_turn(x, lengths[:, None] - 1, theta, scaling) for x in (q, new[0]))
        new = key, new[1]
    if new is not None:
        at = (np.arange(s) == np.maximum(lengths, 1)[:, None] - 1)[..., None, None]
        scales = [1 if x is None else x[:, None, :, None] for x in (k_scale, v_scale)]
        k, v = (jnp.where(at, n / x, c) for c, n, x in zip((k, v), new, scales, strict=True))
    cache = k, v
    k, v = (x if y is None else x * y[:, None, :, None] for x, y in ((k, k_scale), (v, v_scale)))
    back = (lengths[:, None] - t + np.arange(t))[:, :, None] - np.arange(s)
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    out, _ = _softmax(q, k, v, seen, scale, softcap)
    return out if new is None else (out, *cache)


def swiglu(gate, up):
    return silu_of(gate) * up


def gelu(x, bias=None):
    return gelu_of(x if bias is None else x + bias)


def mlp(x, up, down, gate=None, bias=None, row_norm=None, *, precision=None):
    return (gelu(x @ up, bias) if gate is None else swiglu(x @ gate, x @ up)) @ down


def _losses(z, labels, vocab, ignore):
    """The loss of every row: 0 where ignored, NaN where the label is not in the vocabulary."""
    vocab = z.shape[-1] if vocab is None else vocab
    ignored = same(labels, ignore)
    inside = same(labels, whole(labels, 0, vocab - 1))
    column = whole(labels, 0, vocab - 1)
    z = z[..., :vocab]
    top = jax.lax.stop_gradient(z.max(-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    lse = jnp.log(jnp.exp(z - top).sum(-1)) + top[..., 0]
    loss = lse - jnp.take_along_axis(z, jnp.asarray(column)[..., None], -1)[..., 0]
    return jnp.where(ignored, 0, loss * np.where(inside | ignored, 1, np.nan)), ignored


def cross_entropy(logits, labels, *, vocab_size=None, ignore_index):
    return _losses(logits, labels, vocab_size, ignore_index)[0]


def linear_cross_entropy(
    x, weight, labels, scale, *, vocab_size=None, ignore_index, transposed, reduction,
    softcap=None, fp8=False, chunk=None,
):  # fmt: skip
    z = x @ (weight if transposed else weight.T)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    loss, ignored = _losses(z, labels, vocab_size, ignore_index)
    count = max(1, ignored.size - ignored.sum()) if reduction == "mean" else 1
    return loss.sum() / count * jnp.asarray(scale, jnp.float32).astype(jnp.float64)


def vlstm_step(q, k, v, i, f, state, *, gate, normalize):
    """One position from the true state (C e^m, n e^m), which float64 holds without a stabiliser."""
    c, n = state
    forget, admit = (
        sigmoid_of(f)[..., None],
        (jnp.exp(i) if gate == "exp" else sigmoid_of(i))[..., None],
    )
    c = forget[..., None] * c + (admit * k)[..., None] * v[..., None, :]
    n = forget * n + admit * k
    q = q * q.shape[-1] ** -0.5
    l = jnp.maximum(jnp.abs((q * n).sum(-1)), 1) if normalize else jnp.ones(i.shape)
    return (q[..., None] * c).sum(-2) / l[..., None], (c, n)


def true_state(state):
    """(C e^m, n e^m) of (C, n, m)."""
    c, n, m = state
    half = jnp.exp(m / 2)[..., None]  # e^m alone may overflow
    return c * half[..., None] * half[..., None], n * half * half


def vlstm(
    q, k=None, v=None, i=None, f=None, segment_ids=None, initial_state=None, norm_weight=None,
    *, gate, normalize, return_state=False, chunk_size=None, norm_eps=1e-6,
):  # fmt: skip
    q, k, v, *o = _parts(q) if isinstance(q, Packed) else (q, k, v)
    (b, t, heads, dqk), dv = q.shape, v.shape[-1]
    start = np.zeros((b, t), bool)
    if segment_ids is not None:
        start[:, 1:] = ~same(segment_ids[:, 1:], segment_ids[:, :-1])
    zero = jnp.zeros((b, heads, dqk, dv)), jnp.zeros((b, heads, dqk))
    state = zero if initial_state is None else true_state(initial_state)

    def position(state, x):
        *x, start = x
        c, n = state
        state = jnp.where(start[:, None, None, None], 0, c), jnp.where(start[:, None, None], 0, n)
        h, state = vlstm_step(*x, state, gate=gate, normalize=normalize)
        return state, h

    along = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, i, f, jnp.asarray(start))]
    state, h = jax.lax.scan(position, state, along)
    h = jnp.moveaxis(h, 0, 1)
    h = h if norm_weight is None else layer_norm(h, norm_weight, gate=o[0], eps=norm_eps)
    return (h, state) if return_state else h


def _parts(packed: Packed) -> list[jax.Array]:
    ends = np.cumsum([heads * width for heads, width in packed.parts])
    parts = zip(jnp.split(packed.array, ends[:-1], axis=2), packed.parts, strict=True)
    return [x.reshape(*x.shape[:2], *part) for x, part in parts]


def quantized_linear(x, weight, bias=None, *, dtype=None):
    y = x @ dequantize(weight, jnp.float64)
    return y if bias is None else y + bias


def row_linear(
    x, weights, biases=None, norm_weight=None, norm_bias=None, residual=None,
    *, activation=None, norm_eps, centered,
):  # fmt: skip
    if norm_weight is not None:
        x = (layer_norm if centered else rms_norm)(x, norm_weight, norm_bias, eps=norm_eps)
    matrix = lambda w: w.T if isinstance(w, jax.Array) else dequantize(w, jnp.float64)
    ys = [x @ matrix(w) for w in weights]
    ys = [y if b is None else y + b for y, b in zip(ys, biases or [None] * len(ys), strict=True)]
    if activation == "gelu":
        ys = [gelu_of(y) for y in ys]
    elif activation == "swiglu":
        ys = [silu_of(ys[0]) * ys[1]]
    return tuple(y if residual is None else y + residual for y in ys)


def fp8_linear(x, weight, bias=None, row_norm=None):
    return _affine(x @ weight, None, bias)


def is_rounded(call_arrays) -> bool:
    """Whether the op rounds to 8 bits even if all else is float64."""
    leaves = jax.tree.leaves(call_arrays, is_leaf=lambda x: isinstance(x, PlainWeight))
    return any(
        isinstance(x, PlainWeight) or "float8" in str(x.dtype) for x in leaves if x is not None
    )
