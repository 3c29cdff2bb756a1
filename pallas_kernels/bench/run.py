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
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from pallas_kernels import dispatch
from pallas_kernels.bench.case import Case
from pallas_kernels.bench.cases import CASES
from pallas_kernels.bench.compiling import (
    both,
    bytes_moved,
    compile_op,
    counted_flops,
    decided,
    has_kernel,
    on_xla,
    public,
)
from pallas_kernels.bench.operands import arrays, cotangents, small
from pallas_kernels.bench.report import draw, table, text
from pallas_kernels.bench.share import share
from pallas_kernels.bench.timing import L2, attempt, ceilings, time_ops
from pallas_kernels.bench.untuned import UNTUNED


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
                "in_cache": moved[direction] < L2,
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


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


def main(argv: list[str] | None = None) -> int:
    names = sorted({case.op for case in CASES})
    parser = _Parser(
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
