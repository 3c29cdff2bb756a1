"""Times every op against XLA, cuDNN and the device's limits: python -m pallas_kernels.benchmark.

    python -m pallas_kernels.benchmark                      every op
    python -m pallas_kernels.benchmark gelu rope --out DIR  some ops, with results in DIR
    python -m pallas_kernels.benchmark --share              also one file to send to the project

Times are GPU times of a call's kernels (CUPTI), the median of 12 calls: three rounds of four, in
which an op and its rivals alternate, because a GPU under load lowers its clock.  Bytes count each
input and each output once, whatever a kernel really moves.  Causal attention counts half the
square, and its backward pass 2.5 times the forward pass.  The ceilings are measured in the same
run: a copy (read plus written) and an 8192^3 bfloat16 matmul.  A kernel's backward pass is timed
with what its forward pass saved; XLA's starts from the inputs and may recompute anything.  Errors
are relative root mean squares against float64, the worst of the outputs or gradients, at smaller
sizes.  The cases are the table in bench/cases.py, with one entry for each op.  All ops take several
minutes, mostly for compilation; benchmark.json is written after each case.
"""

import argparse
import functools
import json
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler
from rich.console import Console
from rich.progress import Progress

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.bench.case import A, Case
from pallas_kernels.bench.cases import CASES
from pallas_kernels.bench.report import draw, table, text
from pallas_kernels.bench.share import share
from pallas_kernels.bench.untuned import UNTUNED

_CALLS, _TURNS = 4, 3
_L2 = 100e6  # bytes; below this an H100's L2 cache (50 MB) serves part of a repeated call


def array(spec: A, sizes: dict[str, int], seed: int) -> jax.Array:
    """The array that `spec` describes; normal values repeat after a million."""
    shape = tuple(sizes[axis] for axis in spec.axes.split())
    rng = np.random.default_rng(seed)
    kind, _, below = spec.fill.partition(" ")
    if kind == "normal":
        return jnp.asarray(np.resize(rng.standard_normal(2**20).astype(spec.dtype), shape))
    if kind == "arange":
        return jnp.asarray(np.resize(np.arange(shape[-1], dtype=spec.dtype), shape))
    if kind == "documents":
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=spec.dtype) // sizes[below], shape)
    # Zipf's law with exponent 1: the share of id r is about 1 / (r log V), as in real text.
    u = rng.random(shape)
    ids = sizes[below] * u if kind == "uniform" else sizes[below] ** u - 1
    return jnp.asarray(np.clip(ids.astype(spec.dtype), 0, sizes[below] - 1))


def arrays(case: Case, sizes: dict[str, int]) -> list[jax.Array]:
    axes = case.axes(sizes)
    return [array(spec, axes, i) for i, spec in enumerate(case.arrays.values())]


def structs(case: Case, sizes: dict[str, int]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the case's arrays."""
    axes = case.axes(sizes)
    return [
        jax.ShapeDtypeStruct([axes[axis] for axis in spec.axes.split()], spec.dtype)
        for spec in case.arrays.values()
    ]


def _floating(case: Case) -> list[str]:
    """The names of the arrays that have a gradient."""
    return [n for n, a in case.arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)]


def _writes(case: Case) -> Sequence[str]:
    """The names of the arrays whose gradients the backward pass must write."""
    return _floating(case) if case.writes is None else case.writes


def small(case: Case, sizes: dict[str, int]) -> dict[str, int]:
    return sizes | {axis: min(n, sizes[axis]) for axis, n in case.small.items()}


def cotangents(op: Callable, inputs) -> list[jax.Array]:
    """Random arrays like the outputs of `op`."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(op, *inputs))
    sizes = [{str(i): n for i, n in enumerate(y.shape)} for y in leaves]
    specs = [A(" ".join(n), y.dtype.name) for n, y in zip(sizes, leaves, strict=True)]
    return tree.unflatten(map(array, specs, sizes, range(100, 100 + len(leaves))))


def pull(op: Callable, *inputs):
    """The outputs and the function from their cotangents to the gradients of floating inputs."""
    floating = [i for i, a in enumerate(inputs) if jnp.issubdtype(a.dtype, jnp.floating)]

    def of(*some):
        full = list(inputs)
        for i, a in zip(floating, some, strict=True):
            full[i] = a
        return op(*full)

    return jax.vjp(of, *(inputs[i] for i in floating))


def both(op: Callable, dy, *inputs):
    """The outputs and the gradients."""
    y, back = pull(op, *inputs)
    return y, back(dy)


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


def compile_op(case: Case, op: Callable, inputs, keep: bool) -> dict[str, jax.stages.Compiled]:
    """Compiles a program for each direction; with keep, backward gets what "saved" returns."""
    # Without it XLA does not find the matmuls of fp8 (float8/linear.py).
    options = {"xla_gpu_enable_triton_gemm": False} if case.gpu == "sm_89" else None
    compiled = lambda f, *args: jax.jit(f).lower(*args).compile(options)
    dy = jax.eval_shape(op, *inputs)

    def written(gradients):  # without shared gradients, which XLA would copy
        named = zip(_floating(case), gradients, strict=True)
        return [g for name, g in named if name in _writes(case)]

    programs = {"forward": compiled(op, *inputs)}
    if case.forward_only:
        return programs
    if case.flops:
        programs["forward+backward"] = compiled(functools.partial(both, op), dy, *inputs)
    elif keep:
        saved = jax.jit(lambda *a: pull(op, *a)[1]).trace(*inputs)
        programs["saved"] = saved.lower().compile()
        programs["backward"] = compiled(lambda saved, dy: written(saved(dy)), saved.out_info, dy)
    else:
        programs["backward"] = compiled(lambda *a: written(both(op, *a)[1]), dy, *inputs)
    return programs


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


def bytes_moved(case: Case, sizes: dict[str, int]) -> dict[str, int]:
    """The bytes that each direction must move: each input and each output once."""
    inputs = dict(zip(case.arrays, structs(case, sizes), strict=True))
    size = {name: a.size * a.dtype.itemsize for name, a in inputs.items()}
    y = jax.eval_shape(on_xla(case), *inputs.values())
    outputs = sum(o.size * o.dtype.itemsize for o in jax.tree.leaves(y))
    read = dict(size)
    if case.op == "encoder":  # reads only the table's rows that occur
        rows = np.unique(np.asarray(array(case.arrays["tokens"], sizes, 0))).size
        read["wte"] = read["wte"] // sizes["V"] * rows
    backward = sum(size[n] for n in case.reads) + outputs + sum(size[n] for n in _writes(case))
    forward = sum(read.values()) + outputs
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}


def counted_flops(case: Case, sizes: dict[str, int]) -> dict[str, float | None]:
    """Operations by direction: the case's own count, or XLA's of the jnp form."""
    if case.flops:
        forward = case.flops(sizes)
        return {"forward": forward, "forward+backward": (1 + case.backward) * forward}
    inputs, op = structs(case, sizes), on_xla(case)
    dy = jax.eval_shape(op, *inputs)
    try:
        with jax.default_device("cpu"):  # XLA does not count operations for a GPU
            lowered = {
                "forward": jax.jit(op).lower(*inputs),
                "backward": jax.jit(lambda *a: both(op, *a)[1]).lower(dy, *inputs),
            }
    except RuntimeError:  # JAX_PLATFORMS=cuda has no CPU, so the op is not in the plot
        return {"forward": None, "backward": None}
    return {name: (low.cost_analysis() or {}).get("flops") for name, low in lowered.items()}


def public(case: Case, **options) -> Callable:
    """The public op as a function of the case's arrays, in their order."""
    op = getattr(pallas_kernels, case.op)
    options = {**case.options, **options}
    if case.forward_only:  # and so with zeros as gradients, for an op that has none
        return lambda *inputs: op(**case.arguments(jax.lax.stop_gradient(inputs)), **options)
    return lambda *inputs: op(**case.arguments(inputs), **options)


def on_xla(case: Case, **options) -> Callable:
    return public(case, **options, implementation="xla")


class Truth:
    """Float64 outputs and gradients of a case at its small sizes, to compare ops with."""

    def __init__(self, case: Case, sizes: dict[str, int]):
        self.inputs = arrays(case, sizes)
        self.dy = cotangents(on_xla(case), self.inputs)
        widen = lambda x: np.asarray(x, dtype=None if x.dtype.kind in "iu" else np.float64)
        wide = [widen(x) for x in self.inputs]
        with jax.enable_x64(True):
            op = on_xla(case, **({"dtype": None} if "dtype" in case.options else {}))
            like = jax.eval_shape(op, *wide)  # fp8 stays fp8
            dy = jax.tree.map(lambda d, o: np.asarray(d).astype(o.dtype), self.dy, like)
            truth = jax.jit(functools.partial(both, op))(dy, *wide)
            self.truth = jax.tree.map(np.asarray, truth)

    def errors(self, op: Callable) -> dict[str, float]:
        """Relative root mean square errors of `op`, the worst of the outputs or gradients."""
        y, gradients = jax.jit(functools.partial(both, op))(self.dy, *self.inputs)
        worst = lambda a, t: max(map(_relative, jax.tree.leaves(a), jax.tree.leaves(t)))
        backward = worst(gradients, self.truth[1])
        return {
            "forward": worst(y, self.truth[0]),
            "backward": backward,
            "forward+backward": backward,
        }


def _relative(actual, truth) -> float:
    actual, truth = (np.asarray(a).astype(np.float64) for a in (actual, truth))
    return float(np.linalg.norm(actual - truth) / (np.linalg.norm(truth) or 1))


def decided(case: Case, sizes: dict[str, int]) -> dispatch.Decision:
    """The decision about how the op runs on this device."""
    dispatch.reset()
    jax.eval_shape(public(case), *structs(case, sizes))
    return next(d for d in dispatch.decisions() if d.op == case.op)


def has_kernel(case: Case, sizes: dict[str, int]) -> bool:
    """Whether a kernel of ours runs on this GPU, even if something else does by default."""
    if dispatch.device_lacks("sm_80"):
        return False
    with dispatch.rehearsal():
        try:
            jax.eval_shape(public(case, implementation="mosaic"), *structs(case, sizes))
        except NotImplementedError:
            return False
    return True


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


def measure(case: Case, sizes: dict[str, int], tops: dict[str, float] | None, known) -> list[dict]:
    """One record for each direction; without `tops` (no GPU) only what needs no timing.

    known: a cache of errors by ops and small sizes.
    """
    decision = decided(case, sizes)
    ops = {"xla": on_xla(case)}
    if decision.supported or has_kernel(case, sizes):
        ops = {"mosaic": public(case, implementation="mosaic")} | ops
    if case.cudnn and tops:
        ops["cudnn"] = functools.partial(case.cudnn, **case.options)
    with dispatch.rehearsal():
        key = (*ops, case.op, case.variant, *small(case, sizes).items())
        if key not in known:
            truth = functools.cache(lambda: Truth(case, small(case, sizes)))
            known[key] = attempt(lambda op: truth().errors(op), ops)
        errors, failed = known[key]
        ms = {}
        if tops:
            inputs, mosaic = arrays(case, sizes), ops.get("mosaic")
            skipped = failed if case.xla else {*failed, "xla"}
            timed = {name: op for name, op in ops.items() if name not in skipped}
            compiled = lambda op: compile_op(case, op, inputs, keep=op is mosaic)
            programs, not_compiled = attempt(compiled, timed)
            ms, not_timed = time_ops(programs, cotangents(on_xla(case), inputs), inputs)
            failed = failed | not_compiled | not_timed
        moved = bytes_moved(case, sizes)
        flops = counted_flops(case, sizes)
    if case.forward_only:
        flops = {"forward": flops["forward"]}
    records = []
    for direction in flops:
        amount, unit, top = moved[direction], "TB/s", tops and tops["copy_TB_per_s"]
        if case.flops:
            amount, unit = flops[direction], "TFLOP/s"
            top = tops and case.rate * tops["matmul_TFLOP_per_s"]
        times = {name: t[direction] for name, t in ms.items()}
        rate = {name: amount / t / 1e9 for name, t in times.items()}
        records.append(
            {
                "op": case.op,
                "variant": case.variant,
                "sizes": sizes,
                "direction": direction,
                "runs": decision.runs,
                "why": decision.why,
                "bytes": moved[direction],
                "flops": flops[direction],
                "in_cache": moved[direction] < _L2,
                "ms": times,
                "unit": unit,
                "rate": rate,
                "of_ceiling": {name: r / top for name, r in rate.items()} if top else {},
                "error": {name: e[direction] for name, e in errors.items()},
                "failed": failed,
            }
        )
    return records


def run(ops, out: Path, cases: Sequence[Case] = CASES) -> dict:
    """Measures the named ops (none: all), shows a table, writes benchmark.json and roofline.png."""
    console = Console() if sys.stdout.isatty() else Console(width=170)
    device = jax.devices()[0]
    result: dict[str, Any] = {
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "platform": device.client.platform_version,
        "command": " ".join(["python -m pallas_kernels.benchmark", *ops]),
        "date": time.strftime("%Y-%m-%d"),
        "not_measured": None,
        "ceilings": None,
        "records": [],
    }
    if jax.default_backend() == "gpu":
        result["ceilings"] = ceilings()
    else:
        result["not_measured"] = (
            f"times, rates and ceilings, because the platform is {jax.default_backend()}, not gpu"
            " (the errors are the jnp forms')"
        )
    known = {}
    chosen = [case for case in cases if not ops or case.op in ops]
    todo = [(case, sizes) for case in chosen for sizes in case.sizes]
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(todo))
        for case, sizes in todo:
            bar.update(task, description=f"{case.op} {text(sizes)}")
            records = measure(case, sizes, result["ceilings"], known)
            for r in records if result["ceilings"] else ():  # a run takes minutes: show progress
                ms = ", ".join(f"{name} {t:.4f} ms" for name, t in r["ms"].items())
                bar.console.print(f"{r['op']} {text(sizes)} {r['direction']}: {ms}", markup=False)
            result["records"] += records
            (out / "benchmark.json").write_text(json.dumps(result, indent=1) + "\n")
            bar.advance(task)
    draw(result, out / "roofline.png")
    console.print(table(result))
    if result["not_measured"]:
        console.print(f"Not measured: {result['not_measured']}.", soft_wrap=True)
    for r in result["records"]:
        for name, why in r["failed"].items() if r["direction"] == "forward" else ():
            console.print(f"{r['op']} {text(r['sizes'])}: {name} failed, {why}", markup=False)
    console.print(f"Wrote {out}/benchmark.json and {out}/roofline.png", soft_wrap=True)
    return result


def main(argv: list[str] | None = None) -> int:
    names = sorted({case.op for case in CASES})
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.benchmark",
        description=__doc__,
        formatter_class=lambda prog, **options: argparse.RawDescriptionHelpFormatter(
            prog, width=min(100, shutil.get_terminal_size().columns), **options
        ),
    )
    parser.add_argument("op", nargs="*", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks"),
        metavar="DIR",
        help="folder for results (default: %(default)s)",
    )
    parser.add_argument("--untuned", action="store_true", help="run shapes no kernel was tuned for")
    parser.add_argument(
        "--share",
        action="store_true",
        help="also write one file with the device, versions and figures, to send to the project",
    )
    arguments = parser.parse_args(argv)
    for op in arguments.op:
        if op not in names:
            print(f"error: {op!r} is not one of {', '.join(names)}", file=sys.stderr)
            return 2
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"error: --out {arguments.out} cannot be created: {e.strerror}", file=sys.stderr)
        return 2
    result = run(arguments.op, arguments.out, UNTUNED if arguments.untuned else CASES)
    if arguments.share:
        print(f"Wrote {share(result, arguments.out)}: attach it to an issue of the project")
    return int(any("mosaic" in r["failed"] for r in result["records"]))
