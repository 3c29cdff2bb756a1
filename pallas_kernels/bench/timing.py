"""GPU times of rivals in turns, and the device's ceilings."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.bench.case import A
from pallas_kernels.bench.operands import array

_CALLS, _TURNS = 4, 3
L2 = 100e6  # bytes; below this an H100's L2 cache (50 MB) serves part of a repeated call


def gpu_ms(f: Callable, *args) -> list[float]:
    """GPU milliseconds of the kernels, for each of a few calls of a jitted or compiled function."""
    jax.block_until_ready(f(*args))
    _, times = profiler.measure(f, iterations=_CALLS)(*args)
    if times is None:
        raise RuntimeError("CUPTI saw no kernel")
    return times


def wall_ms(f: Callable, *args, calls: int) -> float:
    """Wall milliseconds for each of `calls` calls in a row, including launches and gaps."""
    result = jax.block_until_ready(f(*args))
    start = time.perf_counter()
    for _ in range(calls):
        result = f(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls * 1e3


def time_ops(programs: dict[str, dict], dy, inputs) -> tuple[dict[str, dict], dict[str, str]]:
    """GPU milliseconds of each op's directions, in turns, and why an op has none."""
    calls, failed = attempt(lambda own: _arguments(own, dy, inputs), programs)
    times = {name: {direction: [] for direction in own} for name, own in calls.items()}
    for name in [*times] * _TURNS:
        if name in failed:
            continue
        try:
            for direction, args in calls[name].items():
                times[name][direction] += gpu_ms(programs[name][direction], *args)
        except Exception as e:  # e.g. out of memory: the other ops still run
            failed[name] = _line(e)
            del times[name]
    return {n: {d: statistics.median(ms) for d, ms in t.items()} for n, t in times.items()}, failed


def _arguments(programs: dict, dy, inputs) -> dict[str, tuple]:
    """The arguments of each direction of an op."""
    args = {d: inputs if d == "forward" else (dy, *inputs) for d in programs if d != "saved"}
    if "saved" in programs:
        args["backward"] = programs["saved"](*inputs), dy
    return args


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (read plus written) and bfloat16 matmul rate in TFLOP/s."""
    spec, sizes = A("N N"), {"N": 2**15}
    x = array(spec, sizes, 0)
    median_ms = lambda f, *args: statistics.median(gpu_ms(jax.jit(f), *args))
    # A copy is not always a kernel, so it needs the wall time.
    ms = min(wall_ms(jax.jit(jnp.copy), x, calls=_CALLS * _TURNS), median_ms(jnp.negative, x))
    a = x[:8192, :8192] + 0
    return {
        "copy_TB_per_s": 2 * x.nbytes / ms / 1e9,
        "matmul_TFLOP_per_s": 2 * 8192**3 / median_ms(jnp.matmul, a, a) / 1e9,
    }


def _line(e: Exception) -> str:
    first = str(e).partition("\n")[0]
    return f"{type(e).__name__}: {first[:200]}"


def attempt(f: Callable, rivals: dict[str, Any]) -> tuple[dict, dict[str, str]]:
    """Applies f to each rival; returns the results and why others failed (shape, memory)."""
    results, failed = {}, {}
    for name, rival in rivals.items():
        try:
            results[name] = f(rival)
        except Exception as e:
            failed[name] = _line(e)
    return results, failed
