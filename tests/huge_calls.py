"""Runs the kernels on arrays of more than 2^31 elements: python tests/huge_calls.py [CASE ...]

It needs a GPU of 80 GB, and five minutes.  Rows (of attention and the vLSTM: batches) are
independent, so the first and the last ones of a huge call must have the bits that they have in a
call of their own; of ROUNDED, where cuBLAS's kernels or the splits of keys depend on the number of
rows, the values within rounding.  Gradients of weights, which sum over all rows, must be the sum of
two halves' gradients.  Each case runs in its own process; the exit status is 1 if one is wrong.
"""

import argparse
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from scripts import Parser, needs_gpu, one_of, run

import pallas_kernels as ops

BF16 = jnp.bfloat16


def drawn(x, n):
    """Whole numbers below n."""
    return (1e4 * x.astype(jnp.float32)).astype(jnp.int32) % n


def attention(q, k, v):
    return ops.attention(q, k, v, window=256, implementation="mosaic")


def rope(q):
    return ops.rope(q, q[:, :, :1], jnp.arange(q.shape[1]), implementation="mosaic")[0]


def loss(z):
    return ops.cross_entropy(z, drawn(z[:, 0], z.shape[1]), implementation="mosaic")


def mean_loss(x, weight):
    """Times the rows, so the gradient of a row does not depend on their number."""
    labels = drawn(x[:, 0], weight.shape[0])
    mean = ops.linear_cross_entropy(x, weight, labels, implementation="mosaic")
    return mean * x.shape[0]


def embedded(marks, table):
    return ops.encoder(
        drawn(marks[:, :, 0], table.shape[0]), table, None, dtype=BF16, implementation="mosaic"
    )


def vlstm(q, k, v, i, f):
    return ops.vlstm(q, k, v, i, f, implementation="mosaic")


def decoded(q, k, v):
    lengths = jnp.full(q.shape[0], k.shape[1], jnp.int32)
    return ops.decode_attention(q, k, v, lengths, implementation="mosaic")


mosaic = functools.partial(functools.partial, implementation="mosaic")
mlp = lambda x, up, down, gate: ops.mlp(x, up, down, gate=gate, implementation="mosaic")
fp8 = lambda x, w: ops.fp8_linear(x, w, implementation="mosaic")
ROUNDED = {"mlp", "gelu mlp", "linear_cross_entropy", "decode_attention"}
ROWS, HEADS, PADDED = 2**20 + 77, (17, 16384, 64, 128), (18, 16381, 64, 120)
# The function; shapes of the arrays that have rows, and how many of these make a piece; shapes of
# the weights; whether there is a gradient.
CASES = {
    "rms_norm": (mosaic(ops.rms_norm), [(ROWS, 2112)], 1000, [(2112,)], True),
    "layer_norm": (mosaic(ops.layer_norm), [(ROWS, 2112)], 1000, [(2112,), (2112,)], True),
    "gelu": (mosaic(ops.gelu), [(ROWS - 77, 2112)], 1024, [], True),
    "swiglu": (mosaic(ops.swiglu), [(ROWS - 77, 2112)] * 2, 1024, [], True),
    "mlp": (mlp, [(2**18 + 256, 256)], 1024, [(256, 8320), (8320, 256), (256, 8320)], True),
    "gelu mlp": (mosaic(ops.mlp), [(2**18 + 256, 256)], 1024, [(256, 8320), (8320, 256)], True),
    "fp8_linear": (fp8, [(2**18 + 256, 256)], 1024, [(256, 8320)], False),
    "cross_entropy": (loss, [(2**14 + 512, 128_256)], 512, [], True),
    "linear_cross_entropy": (mean_loss, [(2**14 + 512, 256)], 512, [(128_256, 256)], True),
    "encoder": (embedded, [(2**16 + 5, 16, 2112)], 8, [(1000, 2112)], True),
    "rope": (rope, [HEADS], 1, [], True),
    "attention": (attention, [HEADS] * 3, 1, [], True),
    "attention of groups": (attention, [HEADS, *[(17, 16384, 8, 128)] * 2], 1, [], True),
    "attention padded": (attention, [PADDED, *[(18, 16381, 8, 120)] * 2], 1, [], True),
    "vlstm": (
        vlstm,
        [*[(33, 8192, 16, 256)] * 2, (33, 8192, 16, 512), *[(33, 8192, 16)] * 2], 3, [], True,
    ),
    "decode_attention": (decoded, [(33, 1, 32, 128), *[(33, 65_664, 8, 128)] * 2], 1, [], False),
}  # fmt: skip


def normal(seed, shape):
    """Made row by row: float32 of all would not fit."""
    keys = jax.random.split(jax.random.key(seed), shape[0])
    draw = lambda key: jax.random.normal(key, shape[1:], BF16)
    return jax.jit(lambda keys: jax.lax.map(draw, keys, batch_size=min(256, shape[0])))(keys)


def results(f, gradient, rows, weights):
    """The result and all gradients, those of the weights last."""

    def run(*arrays):
        if not gradient:
            return f(*arrays)
        y, pull = jax.vjp(f, *arrays)
        return y, *pull(jnp.ones_like(y) if y.ndim < 2 else y)

    return jax.tree.leaves(jax.jit(run)(*rows, *weights))


def check(name: str) -> str:
    """What is wrong, or nothing."""
    f, row_shapes, piece, weight_shapes, gradient = CASES[name]
    rows = [normal(n, shape) for n, shape in enumerate(row_shapes)]
    weights = [normal(50 + n, shape) * 0.1 for n, shape in enumerate(weight_shapes)]
    count, of_weights = rows[0].shape[0], len(weights) if gradient else 0
    part = lambda begin, end: results(f, gradient, [x[begin:end] for x in rows], weights)
    split = lambda found: (found[: len(found) - of_weights], found[len(found) - of_weights :])
    take = lambda xs, begin: [np.asarray(x[begin : begin + piece]) for x in xs if x.ndim]
    by_row, sums = split(results(f, gradient, rows, weights))
    assert max(x.size for x in (*rows, *by_row)) > 2**31 or "mlp" in name or "linear" in name
    kept = {at: take(by_row, at) for at in (0, count - piece)}
    sums = [np.asarray(x.astype(jnp.float32)) for x in sums]
    del by_row
    wrong = []
    for at, expected in kept.items():
        own = take(split(part(at, at + piece))[0], 0)
        for n, (x, y) in enumerate(zip(expected, own, strict=True)):
            if x.tobytes() != y.tobytes():
                x, y = x.astype(np.float32), y.astype(np.float32)
                apart = np.abs(x - y).max() / np.abs(y).max()
                if name in ROUNDED and apart < 0.01:
                    continue
                wrong.append(
                    f"result {n} of rows {at}...: {np.mean(x != y):.2g} of it, {apart:.2g}"
                )
    half = count // 2 // 256 * 256 if count > 512 else count // 2
    halves = [split(part(*ends))[1] for ends in ((0, half), (half, count))] if of_weights else []
    for n, (x, *two) in enumerate(zip(sums, *halves, strict=True)):
        y = sum(np.asarray(z.astype(jnp.float32)) for z in two)
        apart = np.sqrt(np.mean((x - y) ** 2)) / np.sqrt(np.mean(y**2))
        if not apart < 0.02:
            wrong.append(f"gradient of weight {n}: {apart:.2g} apart")
    return "; ".join(wrong)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(check(arguments.one) or "right", flush=True)
        return 0
    for name in arguments.cases:
        one_of("case", name, CASES)
    needs_gpu()
    failed = False
    for name in arguments.cases or CASES:
        ran = subprocess.run(
            [sys.executable, __file__, "--one", name], capture_output=True, text=True
        )
        said = (ran.stdout or ran.stderr).strip().splitlines()
        failed |= said[-1:] != ["right"]
        print(f"{name}: {said[-1] if said else ran.returncode}", flush=True)
    return failed


if __name__ == "__main__":
    run(main)
