"""A training step and XLA's matmuls in the steady state of a GPU: speed, clock, power, gaps.

    python tests/steady_step.py step gpt2_124m 32
    python tests/steady_step.py step llama3_1b 4 --steps 60 --train.fp8 all
    python tests/steady_step.py matmuls

A GPU at its power limit lowers its clock after about 0.1 s, so figures of a few calls after a pause
are better than those of a run.  `step` times 20 steps after a pause and then --steps more on random
tokens, samples nvidia-smi meanwhile, traces half a second from the middle, and prints the time
between kernels and the 24 longest kernels.  `matmuls` repeats bfloat16 matmuls for two seconds
each, with random operands and with zeros, which take less power.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
POWER_LIMIT = 4  # bit of the reasons: NVML's SwPowerCap
MATMULS = [  # N, K, columns: a square, and those of gpt2_124m and llama3_1b
    (8192, 8192, 8192),
    (32768, 768, 3072),
    (32768, 3072, 768),
    (8192, 2048, 8192),
    (8192, 8192, 2048),
]
CALLS = 16  # of a matmul in one program
SECONDS = 2.0


class Samples:
    """Clock (MHz), power (W) and whether the power limit holds the clock, every 50 ms."""

    def __init__(self):
        words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms=50"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.rows: list[tuple[float, float, float, bool]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout or ():
            clock, power, reasons = line.split(",")
            limited = bool(int(reasons, 16) & POWER_LIMIT)
            self.rows.append((time.time(), float(clock), float(power), limited))

    def between(self, start: float, end: float) -> str:
        _, clocks, powers, limited = zip(*(r for r in self.rows if start < r[0] < end), strict=True)
        mean = f"{statistics.mean(clocks):.0f} MHz, {statistics.mean(powers):.0f} W"
        return f"{mean}, held by the power limit in {statistics.mean(limited):.0%} of samples"


def step(config: str, batch: int, steps: int, overrides: dict[str, str]) -> None:
    """Prints the figures of a training step."""
    from jaxllm.train.process import set_xla_flags

    set_xla_flags(deterministic=True)
    import gpu_worker
    import jax

    gpu_worker.STEPS = {config: batch}
    (name,) = gpu_worker.steps()
    measure = gpu_worker.prepare_step(name, False, overrides)
    gpu_worker.TIMED = 20
    measure()  # compiles
    time.sleep(1)
    speed = lambda: measure()["tokens/s"][name]
    print(f"{name}: {speed():,.0f} tokens/s in 20 steps after a pause", flush=True)

    # Trace from another thread while the steps run.
    gpu_worker.TIMED, samples = steps, Samples()
    with tempfile.TemporaryDirectory() as folder:

        def trace():
            time.sleep(3)  # the clock has settled
            jax.profiler.start_trace(folder)
            time.sleep(0.5)
            jax.profiler.stop_trace()

        tracer, start = threading.Thread(target=trace), time.time()
        tracer.start()
        print(f"{speed():,.0f} in {steps} steps: {samples.between(start + 1, time.time())}")
        tracer.join()
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = kernels(path)
    samples.process.kill()
    show(events)


def kernels(path: Path) -> list[tuple[float, float, str]]:
    """(start, end, name) of a trace's kernels, ms, from the first whole step to the last one."""
    from jaxllm.train.profiling import kernel_events

    events = [
        (event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6, event.name)
        for event in kernel_events(path)
    ]
    firsts = [start for start, _, name in events if name.startswith("encoder_forward")]
    return sorted(e for e in events if min(firsts) <= e[0] <= max(firsts))


def show(events: list[tuple[float, float, str]]) -> None:
    """Prints the time of a step, the share without a kernel, and the longest kernels."""
    steps = sum(name.startswith("encoder_forward") for *_, name in events) - 1
    *events, (last, *_) = events  # the next step's first kernel
    begin, busy, end = events[0][0], 0.0, 0.0
    times, calls = Counter(), Counter()
    for at, until, name in events:
        busy += max(0, until - max(at, end))
        end = max(end, until)
        times[name] += (until - at) / steps
        calls[name] += 1
    total = (last - begin) / steps
    count = len(events) / steps
    print(f"{total:.2f} ms a step, {total - busy / steps:.2f} without any of {count:.0f} kernels")
    for name, ms in times.most_common(24):
        print(f"{ms:9.3f} ms {calls[name] / steps:7.1f} x  {name[:90]}")


def matmuls() -> None:
    """Prints TFLOP/s after a pause and in the steady state."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"
    import jax
    import jax.numpy as jnp

    @jax.jit
    def products(a, b):
        for _ in range(CALLS):
            b, y = jax.lax.optimization_barrier((b, a @ b))  # so that none is dropped or shared
        return y[0, 0]

    samples = Samples()
    for n, k, columns in MATMULS:
        for kind in ("random", "zeros"):
            scale = float(kind == "random")
            a, b = (
                scale * jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
                for shape in ((n, k), (k, columns))
            )
            products(a, b).block_until_ready()
            time.sleep(1)
            begin, running, rates = time.time(), products(a, b), []
            while time.time() < begin + SECONDS:
                clock, ahead = time.perf_counter(), products(a, b)
                running.block_until_ready()
                flops = 2 * n * k * columns * CALLS
                rates.append((time.time(), flops / (time.perf_counter() - clock) / 1e12))
                running = ahead
            steady = statistics.median(rate for at, rate in rates if at > begin + SECONDS / 2)
            now = samples.between(begin + SECONDS / 2, begin + SECONDS)
            print(f"{n} x {k} x {columns}, {kind}: {steady:.0f} TFLOP/s; {now}", flush=True)
    samples.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("matmuls")
    one = commands.add_parser("step")
    one.add_argument("config")
    one.add_argument("batch", type=int)
    one.add_argument("--steps", type=int, default=120, help="at least 4 seconds")
    arguments, rest = parser.parse_known_args()
    if arguments.command == "matmuls":
        return matmuls()
    names = (word.removeprefix("--") for word in rest[::2])
    overrides = dict(zip(names, rest[1::2], strict=True))
    step(arguments.config, arguments.batch, arguments.steps, overrides)


if __name__ == "__main__":
    main()
