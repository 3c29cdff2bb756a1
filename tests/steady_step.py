"""A training step and XLA's matmuls in the steady state of a GPU: speed, clock, power, gaps.

    python tests/steady_step.py step gpt2_124m 32
    python tests/steady_step.py step llama3_1b 4 --steps 60 --train.fp8 all
    python tests/steady_step.py parts gpt2_124m 32
    python tests/steady_step.py beside gpt2_124m 32 --steps 40 --optimizer.name muon
    python tests/steady_step.py matmuls

A GPU at its power limit lowers its clock after about 0.1 s, so figures of a few calls after a pause
are better than those of a run.  `step` times 20 steps after a pause and then --steps more on random
tokens, samples nvidia-smi meanwhile, traces an eighth of that number right after them, and prints
the time between kernels and the 24 longest kernels.  `parts` prints a row of docs/performance.md
for each part of a step instead, with its longest kernels.  `beside` times the configuration as it
is and with the overrides in turns, five times --steps each.  `matmuls` repeats bfloat16 matmuls for
two seconds each, with random operands and with zeros, which take less power.
"""

import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from scripts import Parser, needs_gpu
from scripts import run as run_script

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
FIRST = "encoder_forward"  # the first kernel of a step
OURS = {  # our kernels by the part of a step that they belong to
    "matmuls of the blocks": "(swig|ge)lu_(mlp|linear)_",
    "casts to fp8, maxima, scales": "quantize_fp8|fp8_maximum|swiglu_maxima",
    "head and loss": "(linear_)?cross_entropy",
    "attention": "attention_|rope_",
    "vLSTM": "vlstm_",
    "norms with the residual": ".*(layer|rms)_norm",
    "activation": "(swig|ge)lu_",
}
PARTS = [*OURS, "AdamW, norms, copies", "biases and the rest"]


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


class Kernel(NamedTuple):
    """One kernel of a trace."""

    start: float  # ms
    end: float
    name: str
    op: str  # the path of the jax operation it computes, such as jit(_train_step)/jvp()/dot_general


def run(config: str, batch: int, steps: int, overrides: dict[str, str]) -> tuple[list[Kernel], int]:
    """Prints the speed of a training step; returns the kernels of some steps and their number."""
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

    gpu_worker.TIMED, samples, start = steps, Samples(), time.time()
    print(f"{speed():,.0f} in {steps} steps: {samples.between(start + 1, time.time())}")
    samples.process.kill()
    # No step may be running when a trace starts or stops.  While it traces, XLA launches kernels
    # one by one and not as CUDA graphs; a change inside the loop of train.grad_accum may end in a
    # segmentation fault.
    gpu_worker.TIMED = steps // 8
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            measure()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return kernels(path, int(overrides.get("train.grad_accum", 1)))


def beside(config: str, batch: int, steps: int, overrides: dict[str, str], dry: bool) -> None:
    """Prints by how much the overrides slow a training step down, in pairs of neighbouring runs."""
    from jaxllm.train.process import set_xla_flags

    set_xla_flags(deterministic=True)
    import gpu_worker

    gpu_worker.STEPS = {config: batch}
    (name,) = gpu_worker.steps()
    forms = [gpu_worker.prepare_step(name, dry, more) for more in ({}, overrides)]
    gpu_worker.TIMED = steps
    pairs = [[measure()["tokens/s"][name] for measure in forms] for _ in range(6)][1:]
    ratios = [plain / other for plain, other in pairs]
    plain, other = map(statistics.median, zip(*pairs, strict=True))
    print(f"{name}: {plain:,.0f} tokens/s, with {overrides} {other:,.0f}", flush=True)
    least, median, most = (f(ratios) for f in (min, statistics.median, max))
    print(f"    {median:.3f} x the time ({least:.3f} to {most:.3f})")


def kernels(path: Path, parts: int) -> tuple[list[Kernel], int]:
    """The kernels of the second half of a trace, up to the last step's first; how many steps.

    parts: of a step, each of which begins with FIRST.
    """
    from jaxllm.train.profiling import kernel_events

    found = []
    for event in kernel_events(path):
        start, op = event.start_ns / 1e6, dict(event.stats).get("name", "")
        found.append(Kernel(start, start + event.duration_ns / 1e6, event.name, str(op)))
    firsts = [kernel.start for kernel in sorted(found) if kernel.name.startswith(FIRST)][::parts]
    settled = firsts[len(firsts) // 2 :]  # the clock, too
    begin, end = settled[0], settled[-1]
    return sorted(kernel for kernel in found if begin <= kernel.start <= end), len(settled) - 1


def show(kernels: list[Kernel], steps: int) -> None:
    """Prints the time of a step, the share without a kernel, and the longest kernels."""
    *kernels, (last, *_) = kernels  # the next step's first kernel
    begin, busy, end = kernels[0].start, 0.0, 0.0
    for kernel in kernels:
        busy += max(0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    total, count = (last - begin) / steps, len(kernels) / steps
    print(f"{total:.2f} ms a step, {total - busy / steps:.2f} without any of {count:.0f} kernels")
    longest(kernels, steps, 24)


def longest(kernels: list[Kernel], steps: int, count: int) -> None:
    times, calls = Counter(), Counter()
    for kernel in kernels:
        times[kernel.name] += (kernel.end - kernel.start) / steps
        calls[kernel.name] += 1
    for name, ms in times.most_common(count):
        print(f"{ms:9.3f} ms {calls[name] / steps:7.1f} x  {name[:90]}")


def show_parts(kernels: list[Kernel], steps: int) -> None:
    """Prints the time of each part of a step, and of its longest kernels."""
    *kernels, _ = kernels
    by_part = defaultdict(list)
    for kernel in kernels:
        by_part[part(kernel)].append(kernel)
    ms = lambda some: sum(kernel.end - kernel.start for kernel in some) / steps
    for name in PARTS:
        print(f"| {name} | {ms(by_part[name]):.1f} |")
    print(f"| **all kernels** | {ms(kernels):.1f} |")
    for name, some in by_part.items():
        print(name)
        longest(some, steps, 8)


def part(kernel: Kernel) -> str:
    """The part of a step that a kernel belongs to, one of PARTS."""
    in_block = "run_block" in kernel.op
    if kernel.name.startswith("Mem"):  # copies and memsets
        return "biases and the rest"
    if re.search("nvjet|gemm|cublas|cutlass|splitK|matmul", kernel.name):
        return "matmuls of the blocks" if in_block else "head and loss"
    if re.match("quantize_fp8|fp8_maximum", kernel.name) and not in_block:
        return "head and loss"  # the casts of the table and of x
    for name, pattern in OURS.items():
        if re.match(pattern, kernel.name):
            return name
    if "jit(chunkwise)" in kernel.op:  # the gates, which XLA computes
        return "vLSTM"
    if in_block and re.search("/(reduce_max|sqrt|dot_general)$", kernel.op):
        return "casts to fp8, maxima, scales"
    # The optimizer has no name of its own: it is what no derivative is taken of, and ends in the
    # select that skips a bad step.  The profile names some of its kernels by what they read, and
    # none of the norms of gradients and of the copies of weights.
    outside = kernel.op.startswith("jit(_train_step)") and "jvp" not in kernel.op
    select = re.match("loop_(convert_)?select_fusion", kernel.name)
    nameless = not kernel.op and re.match("input_(reduce|concatenate)", kernel.name)
    table = kernel.op == "jit(_train_step)/jvp()/convert_element_type"  # the head's copy
    if outside or select or nameless or table:
        return "AdamW, norms, copies"
    return "biases and the rest"


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
    parser = Parser(__doc__)
    parser.add_argument("command", choices=("matmuls", "step", "parts", "beside"))
    parser.add_argument("config", nargs="?")
    parser.add_argument("batch", nargs="?", type=int)
    parser.add_argument("--steps", type=int, default=120, help="at least 4 seconds")
    parser.add_argument("--dry", action="store_true", help="for beside: tiny, on a CPU")
    arguments, rest = parser.parse_known_args()
    overrides = parser.overrides(rest)
    if arguments.command != "matmuls" and arguments.batch is None:
        parser.error(f"{arguments.command} needs a configuration and a batch size")
    if not (arguments.dry and arguments.command == "beside"):
        needs_gpu()  # XLA_FLAGS come before JAX here
    if arguments.command == "matmuls":
        return matmuls()
    if arguments.command == "parts":  # in a command buffer a kernel has no operation's name
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
        )
    if arguments.command == "beside":
        return beside(arguments.config, arguments.batch, arguments.steps, overrides, arguments.dry)
    found = run(arguments.config, arguments.batch, arguments.steps, overrides)
    (show if arguments.command == "step" else show_parts)(*found)


if __name__ == "__main__":
    run_script(main)
