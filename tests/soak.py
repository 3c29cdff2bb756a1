"""Repeats calls thousands of times and compares their bits: python tests/soak.py [--seconds 300]

It needs a GPU.  Two runs of a kernel rarely show a race.  Here PROCESSES share the GPU, which
switches between them in the middle of kernels, and a further one loads it with matmuls of random
length.  Each repeats first the random calls of a seed (random_draws.py), then the calls of
pallas_kernels.benchmark, at the sizes of real models: the kernels, forward and backward.  The exit
status is 1 if a result or gradient of any run differs from the first run's.
"""

import argparse
import contextlib
import functools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from scripts import Parser, needs_gpu, run

PROCESSES = 14
RUNS, EACH = 5000, 1.0  # of a call at most; the seconds that its runs take at most


@jax.jit
def differences(a, b):
    """The number of arrays whose bits differ."""
    bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum((jnp.any(bits(x) != bits(y)).astype(jnp.int32) for x, y in pairs), jnp.int32(0))


def repeat(program: Callable, arguments: tuple) -> tuple[int, int]:
    """(runs, runs that differ from the first) of a compiled program."""
    first = jax.block_until_ready(program(*arguments))
    runs, different, end = 0, 0, time.monotonic() + EACH
    while runs < RUNS and time.monotonic() < end:
        some = [differences(first, program(*arguments)) for _ in range(20)]
        different += sum(bool(n) for n in some)
        runs += len(some)
    return runs, different


def random_calls(seed: int, share: int) -> Iterator[tuple[str, int, int]]:
    """(call, runs, different runs), without end; calls that no kernel takes are left out."""
    import random_draws
    from random_forms import Arguments, form_of
    from random_memory import settings_of

    for number in range(share, sys.maxsize, PROCESSES):
        call = random_draws.draw(seed, number)
        with contextlib.suppress(ValueError, NotImplementedError), settings_of(call):
            given = Arguments(call)
            cotangents = given.cotangents(form_of(call, "xla"))
            arguments = jax.device_put((given.leaves, cotangents))
            f = given.with_gradients(form_of(call, "mosaic"))
            yield (
                f"{call.op} {seed} {number}",
                *repeat(jax.jit(f).lower(*arguments).compile(), arguments),
            )


def benchmark_calls(share: int) -> Iterator[tuple[str, int, int]]:
    from pallas_kernels.bench.cases import CASES
    from pallas_kernels.bench.compiling import both, on_xla, public
    from pallas_kernels.bench.operands import arrays, cotangents

    calls = [(case, sizes) for case in CASES for sizes in case.sizes]
    for case, sizes in calls[share::PROCESSES]:
        if sizes.get("B", 1) * sizes.get("S", 0) > 10**6:  # several of them would fill the memory
            continue
        inputs = arrays(case, sizes)
        arguments = cotangents(on_xla(case), inputs), *inputs
        program = (
            jax.jit(functools.partial(both, public(case, implementation="mosaic")))
            .lower(*arguments)
            .compile()
        )
        yield f"{case.op} {case.variant} {sizes}", *repeat(program, arguments)


def work(seed: int, share: int, end: float) -> int:
    """The calls of one process: one line for each, until `end`; and the benchmark's."""
    wrong = 0
    for calls, until in ((random_calls(seed, share), end), (benchmark_calls(share), float("inf"))):
        for name, runs, different in calls:
            wrong += different
            print(f"{different} of {runs} runs differ: {name}", flush=True)
            if time.time() > until:
                break
    return int(wrong > 0)


def load() -> None:
    """Matmuls in bursts of random length, until the process is killed."""
    x = jnp.ones((4096, 4096), jnp.bfloat16)
    multiply = jax.jit(lambda x: x @ x)
    while True:
        jax.block_until_ready([multiply(x) for _ in range(random.randrange(1, 40))])
        time.sleep(random.random() / 50)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--seconds", type=float, default=150, help="of random calls")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # one process's part, or load
    a = parser.parse_args()
    if a.share is not None:
        return load() if a.share == "load" else work(a.seed, int(a.share), time.time() + a.seconds)
    needs_gpu()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    command = [sys.executable, *sys.argv, "--seed", str(a.seed), "--share"]
    loading = subprocess.Popen([*command, "load"])
    shares = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(PROCESSES)
    ]
    lines = [line for share in shares for line in share.communicate()[0].splitlines()]
    loading.kill()
    calls = [line.split(maxsplit=6) for line in lines]
    for call in calls:
        if int(call[0]):
            print(*call)
    print(f"{len(calls)} calls, {sum(int(call[2]) for call in calls):,} runs")
    return int(any(share.returncode for share in shares) or not calls)


if __name__ == "__main__":
    run(main)
