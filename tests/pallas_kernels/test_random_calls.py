"""Calls drawn at random by rule: every op, forward and every gradient, against float64.

Sizes are 1, primes, and a tile less one, whole, and plus one; groups of query heads are 1 to 8; ids
have integer dtypes of 1 to 4 bytes; values are normal, far from zero, large, small or zero.  A
failing test prints its seed and number: RANDOM_SEED=7 pytest -k 'rule[17]' repeats it.  On a GPU
the seed changes every day and there are 400 calls; where kernels are interpreted there are 8 with a
fixed seed, so that a pull request fails for what it changes.  RANDOM_CALLS is another number.
"""

import contextlib
import datetime
import os

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import ON_GPU, check_op

import pallas_kernels as ops
from pallas_kernels.activations.activation import gelu_reference, swiglu_reference
from pallas_kernels.activations.feed_forward import mlp_reference
from pallas_kernels.embedding import encoder_reference
from pallas_kernels.flash_attention.op import attention_reference
from pallas_kernels.losses.cross_entropy import cross_entropy_reference
from pallas_kernels.losses.linear_cross_entropy import linear_cross_entropy_reference
from pallas_kernels.mlstm.reference import chunkwise
from pallas_kernels.norms.norm import layer_norm_reference, rms_norm_reference
from pallas_kernels.quantized.op import quantized_linear_reference
from pallas_kernels.rotary import rope_reference

DAY = datetime.date.today().strftime("%Y%m%d") if ON_GPU else "20261125"
SEED = int(os.environ.get("RANDOM_SEED", DAY))
CALLS = int(os.environ.get("RANDOM_CALLS", 400 if ON_GPU else 8))
FLOATS = jnp.float32, jnp.bfloat16, jnp.float16
HALVES = jnp.bfloat16, jnp.float16
IDS = "int8", "uint8", "int16", "uint16", "int32", "uint32"


class Draw:
    """The random choices of one call."""

    def __init__(self, number: int):
        self.rng = np.random.default_rng((SEED, number))

    def one(self, choices):
        return choices[self.rng.integers(len(choices))]

    def size(self, tile: int, most: int) -> int:
        """A length near the tile's, or a short one; up to `most`."""
        sizes = [1, 2, 3, 7, 13, 31, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile + 3, 5 * tile]
        return self.one([n for n in sizes if 0 < n <= most])

    def array(self, *shape, dtype, scale=1.0, extreme=False):
        x = self.rng.standard_normal(shape) * scale
        if extreme:
            x = self.one([x, x, 1000 + x, 100 * x, 1e-3 * x, np.zeros(shape)])
        return jnp.asarray(x, dtype)

    def ids(self, below: int, *shape):
        dtype = self.one([d for d in IDS if np.iinfo(d).max >= below - 1])
        return jnp.asarray(self.rng.integers(0, below, shape).astype(dtype))

    def segments(self, b: int, t: int):
        """Sorted documents, one-token documents, or ids in any order."""
        kind = self.one(["none", "none", "sorted", "each", "any"])
        if kind == "none":
            return None
        if kind == "each":
            return jnp.broadcast_to(jnp.arange(t), (b, t))
        ids = self.rng.integers(0, 4, (b, t))
        return jnp.asarray(np.sort(ids, axis=1) if kind == "sorted" else ids)


def norm(d: Draw):
    most = 4096 if ON_GPU else 300
    shape, dtype = (d.size(4, 40), d.size(64, most)), d.one(FLOATS)
    arrays = [d.array(*shape, dtype=dtype, extreme=True), d.array(shape[1], dtype=jnp.float32)]
    if d.one([True, False]):
        arrays.append(d.array(*shape, dtype=dtype))
        run = lambda op: lambda x, w, r, **o: op(x, w, residual=r, **o)
    else:
        run = lambda op: lambda x, w, **o: op(x, w, **o)
    op, reference = d.one(
        [(ops.layer_norm, layer_norm_reference), (ops.rms_norm, rms_norm_reference)]
    )
    return run(op), run(reference), arrays, {}


def activation(d: Draw):
    shape, dtype = (d.size(4, 40), d.size(128, 1500)), d.one(FLOATS)
    x, up = (d.array(*shape, dtype=dtype, scale=3) for _ in range(2))
    if d.one([True, False]):
        return ops.swiglu, swiglu_reference, [x, up], {}
    return ops.gelu, gelu_reference, [x], {}


def mlp(d: Draw):
    n, c, f = (d.one([1, 2, 3]) * m for m in (128, 64, 128))
    dtype = d.one(HALVES)
    x, up, gate = d.array(n, c, dtype=dtype), *(d.array(c, f, dtype=dtype, scale=0.1),) * 2
    down = d.array(f, c, dtype=dtype, scale=0.1)
    if d.one([True, False]):
        run = lambda op: lambda x, up, gate, down, **o: op(x, up, down, gate=gate, **o)
        return run(ops.mlp), run(mlp_reference), [x, up, gate, down], {}
    run = lambda op: lambda x, up, bias, down, **o: op(x, up, down, bias=bias, **o)
    bias = d.array(f, dtype=jnp.float32)
    return run(ops.mlp), run(mlp_reference), [x, up, bias, down], {}


def rope(d: Draw):
    b, t, k = d.one([1, 2]), d.size(32, 200), d.one([1, 2])
    h, width, dtype = k * d.one([1, 2, 3]), d.one([16, 64, 80, 128]), d.one(FLOATS)
    q, key = d.array(b, t, h, width, dtype=dtype), d.array(b, t, k, width, dtype=dtype)
    options = {"layout": d.one(["half", "interleaved"]), "theta": d.one([100.0, 500_000.0])}
    return ops.rope, rope_reference, [q, key, d.ids(2**7, t)], options


def attention(d: Draw):
    most = 700 if ON_GPU else 140
    b, t, k = d.one([1, 1, 2]), d.size(64, most), d.one([1, 2])
    h, width = k * d.one([1, 2, 3, 4, 5, 8]), d.one([8, 32, 64, 64, 96, 128, 200, 256])
    s = t + d.one([0, 0, 1, 8, 64])
    shapes = (b, t, h, width), (b, s, k, width), (b, s, k, width)
    dtype = d.one(HALVES)
    options = {"causal": d.one([True, True, False]), "return_lse": d.one([True, False])}
    if options["causal"]:
        options["window"] = d.one([None, None, 1, 20, 64, 1000])
    options["softcap"] = d.one([None, None, 5.0, 50.0])
    options["segment_ids"] = d.segments(b, s)
    arrays = [d.array(*shape, dtype=dtype) for shape in shapes]
    return ops.attention, attention_reference, arrays, options


def vlstm(d: Draw):
    b, t, heads = d.one([1, 2]), d.size(64, 300 if ON_GPU else 130), d.one([1, 2, 3])
    dqk, dv, dtype = d.one([16, 64, 128]), d.one([16, 64, 128]), d.one(HALVES)
    arrays = [d.array(b, t, heads, w, dtype=dtype) for w in (dqk, dqk, dv)]
    arrays += [d.array(b, t, heads, dtype=jnp.float32, scale=s) for s in (3, 3)]
    options = {"gate": d.one(["exp", "sigmoid"]), "segment_ids": d.segments(b, t)}
    # The gates' gradients are sums that cancel; test_vlstm.py has their bound.
    options["differentiable"] = [0, 1, 2]
    return ops.vlstm, chunkwise, arrays, options


def encoder(d: Draw):
    b, t, c, v = d.one([1, 2, 3, 9]), d.size(32, 100), d.size(64, 300), d.one([2, 100, 300])
    arrays = [d.ids(v, b, t), *(d.array(n, c, dtype=d.one(FLOATS)) for n in (v, t + 2))]
    return ops.encoder, encoder_reference, arrays, {}


def cross_entropy(d: Draw):
    n, v = d.size(8, 60), d.size(128, 700)
    logits = d.array(n, v, dtype=d.one(FLOATS), scale=4)
    return ops.cross_entropy, cross_entropy_reference, [logits, d.ids(v, n)], {}


def head(d: Draw):
    n, v, c, dtype = d.size(64, 200), d.size(128, 300), d.size(16, 70), d.one(FLOATS)
    arrays = [d.array(n, c, dtype=dtype), d.array(v, c, dtype=jnp.float32), d.ids(v, n)]
    options = {"softcap": d.one([None, 20.0]), "reduction": d.one(["mean", "sum"])}
    return ops.linear_cross_entropy, linear_cross_entropy_reference, arrays, options


def quantized(d: Draw):
    rows, k, n = d.size(64, 300 if ON_GPU else 70), 64 * d.one([1, 2, 3]), 64 * d.one([1, 2, 4])
    bits = d.one([8, 4, 2, 1])
    group = d.one([None, 64])
    weight = ops.quantize(d.array(k, n, dtype=jnp.float32), bits=bits, group=group)
    run = lambda op: lambda x, **o: op(x, weight, **o)
    x = d.array(rows, k, dtype=jnp.bfloat16)
    return run(ops.quantized_linear), run(quantized_linear_reference), [x], {}


class Refused(Exception):
    """No kernel supports the call, and the op says why."""


def check(op, reference, *arrays, **options):
    try:
        check_op(op, reference, *arrays, kernels=(), **options)
    except NotImplementedError as e:
        if "has no Mosaic kernel for this call: " in str(e):
            raise Refused from e
        raise


KINDS = (
    norm, activation, mlp, rope, attention, attention, attention, vlstm, vlstm,
    encoder, cross_entropy, head, quantized,
)  # fmt: skip


@pytest.mark.parametrize("number", range(CALLS))
def test_a_call_drawn_by_rule(number):
    d = Draw(number)
    kind = KINDS[(number + SEED) % len(KINDS)]
    op, reference, arrays, options = kind(d)
    shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
    shown = {
        k: v if not hasattr(v, "shape") else f"{v.dtype}{list(v.shape)}" for k, v in options.items()
    }
    print(f"RANDOM_SEED={SEED} number {number}: {kind.__name__}({shapes}, {shown})")
    with contextlib.suppress(Refused):
        check(op, reference, *arrays, **options)
