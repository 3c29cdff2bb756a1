"""Times every op beside XLA, cuDNN and what the device can do: python -m pallas_kernels.benchmark.

    python -m pallas_kernels.benchmark                      every op
    python -m pallas_kernels.benchmark gelu rope --out DIR  some, results in DIR

Time is the GPU time of a call's kernels (CUPTI), the median of 12 calls.  Bytes count each input
once and each output once, whatever a kernel really moves; causal attention counts half the square,
its backward pass 2.5 times the forward pass.  The ceilings are measured in the same run: a copy
(read plus written) and an 8192^3 bfloat16 matmul.  The backward pass of a kernel is timed with what
its forward pass saved; that of XLA starts from the inputs and may recompute what it likes.  Errors
are relative, root mean square, against float64, the worst of the outputs or gradients, at the sizes
`small`.  `CASES` is the table of what is run: an op joins with one entry.
"""

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

import pallas_kernels
from pallas_kernels import backend

_CALLS = 12
_L2 = 100e6  # bytes; below, an H100's second-level cache (50 MB) serves part of a repeated call


@dataclasses.dataclass(frozen=True)
class A:
    """An array of the call: its axes, by the names in `Case.sizes`, and what it holds."""

    axes: str
    dtype: str = "bfloat16"
    fill: str = "normal"  # or "arange"; "uniform V" and "zipf V": integers below the size V


@dataclasses.dataclass(frozen=True)
class Case:
    """One op with its arrays in the order of its signature, at several sizes."""

    op: str
    arrays: dict[str, A]
    sizes: tuple[dict[str, int], ...]
    small: dict[str, int]  # replaces sizes where errors are measured
    reads: tuple[str, ...] = ()  # what the backward pass must read, beside the cotangents
    writes: tuple[str, ...] | None = None  # gradients it must write (None: all floating arrays)
    options: dict = dataclasses.field(default_factory=dict)
    variant: str = ""
    flops: Callable | None = None  # of the forward pass, from the sizes; None: it moves bytes
    cudnn: Callable | None = None
    xla: bool = True  # False where the XLA form does not fit in memory


def _shapes(names: str, *rows) -> tuple[dict[str, int], ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


_NORMS = _shapes("N C", (32768, 768), (16384, 4096), (8192, 8192), (4096, 1600))
_GATED = _shapes("N C", (8192, 14336), (32768, 3072))
_X, _W = A("N C"), A("C", "float32")


def _cudnn(q, k, v, *, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def _norm(op: str, bias: bool, add: bool) -> Case:
    arrays = {"x": _X} | ({"residual": _X} if add else {}) | {"weight": _W}
    arrays |= {"bias": _W} if bias else {}
    writes = tuple(name for name in arrays if name != "residual")  # the gradient of x is its too
    return Case(op, arrays, _NORMS, {"N": 128}, reads=("x", "weight"), writes=writes)


def _attention(sizes, *, causal=True, xla=True, cudnn=_cudnn) -> Case:
    return Case(
        "attention",
        {"q": A("B T H D"), "k": A("B T K D"), "v": A("B T K D")},
        sizes,
        {"B": 1, "T": 384, "H": 4, "K": 2},
        options={"causal": causal},
        variant="" if causal else "full",
        flops=lambda n: 4 * n["B"] * n["H"] * n["T"] ** 2 * n["D"] / (2 if causal else 1),
        cudnn=cudnn,
        xla=xla,
    )


def _encoder(variant: str, fill: str) -> Case:
    return Case(
        "encoder",
        {"tokens": A("B T", "int32", fill), "wte": A("V C", "float32"), "wpe": A("T C", "float32")},
        _shapes("B T C V", (32, 1024, 768, 50304), (4, 8192, 4096, 128256)),
        {"B": 2, "T": 256, "C": 256, "V": 1000},
        reads=("tokens",),
        options={"dtype": jnp.bfloat16},
        variant=variant,
    )


_ATTENTION = "B T H K D"
CASES = (
    _norm("layer_norm", bias=True, add=False),
    _norm("rms_norm", bias=False, add=False),
    _norm("add_layer_norm", bias=True, add=True),
    _norm("add_rms_norm", bias=False, add=True),
    Case("gelu", {"x": _X}, _GATED, {"N": 64}, reads=("x",)),
    Case("swiglu", {"gate": _X, "up": _X}, _GATED, {"N": 64}, reads=("gate", "up")),
    Case(
        "rope",
        {"q": A("B T H D"), "k": A("B T K D"), "positions": A("T", "int32", "arange")},
        _shapes("B T H K D", (32, 1024, 12, 4, 64), (4, 4096, 32, 8, 128)),
        {"B": 1, "T": 512},
        reads=("positions",),
    ),
    _encoder("uniform ids", "uniform V"),
    _encoder("Zipf ids", "zipf V"),
    Case(
        "cross_entropy",
        {"logits": A("N V"), "labels": A("N", "int32", "uniform V")},
        _shapes("N V", (8192, 50304), (4096, 128256)),
        {"N": 64},
        reads=("logits", "labels"),
    ),
    _attention(_shapes(_ATTENTION, (32, 1024, 12, 12, 64), (4, 4096, 32, 8, 128))),
    _attention(_shapes(_ATTENTION, (4, 4096, 32, 8, 64), (1, 16384, 16, 16, 128)), xla=False),
    _attention(_shapes(_ATTENTION, (8, 2048, 16, 16, 96), (2, 4096, 8, 8, 256)), xla=False),
    _attention(_shapes(_ATTENTION, (4, 4096, 32, 8, 128)), causal=False, xla=False),
)


def array(spec: A, sizes: dict[str, int], seed: int) -> jax.Array:
    """The array that `spec` describes, made on the device."""
    shape = tuple(sizes[axis] for axis in spec.axes.split())
    kind, _, below = spec.fill.partition(" ")
    if kind == "normal":
        return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(spec.dtype))
    if kind == "arange":
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=spec.dtype), shape)
    u = jax.random.uniform(jax.random.key(seed), shape)
    # Zipf's law with exponent 1: the share of the id r is about 1 / (r log V), as in real text.
    ids = sizes[below] * u if kind == "uniform" else sizes[below] ** u - 1
    return jnp.clip(ids.astype(spec.dtype), 0, sizes[below] - 1)


@dataclasses.dataclass
class Call:
    """One op with its arrays, ready to be differentiated."""

    op: Callable
    arrays: list
    differentiable: list[int]

    def forward(self, *arrays):
        return self.op(*arrays)

    def pull(self, *arrays):
        """The outputs, and the function from their cotangents to the gradients."""

        def of(*floating):
            full = list(arrays)
            for i, a in zip(self.differentiable, floating, strict=True):
                full[i] = a
            return self.op(*full)

        return jax.vjp(of, *(arrays[i] for i in self.differentiable))

    def both(self, cotangents, *arrays):
        y, pull = self.pull(*arrays)
        return y, pull(cotangents)

    def backward(self, cotangents, *arrays):
        return self.both(cotangents, *arrays)[1]

    def cotangents(self):
        """Random ones, like the outputs."""
        y = jax.eval_shape(self.op, *self.arrays)
        keys = iter(range(100, 200))
        return jax.tree.map(
            lambda o: jax.random.normal(jax.random.key(next(keys)), o.shape, o.dtype), y
        )


def prepare(case: Case, op: Callable, sizes: dict[str, int]) -> Call:
    """`op` with the case's options and its arrays at `sizes`."""
    arrays = [array(spec, sizes, i) for i, spec in enumerate(case.arrays.values())]
    return Call(functools.partial(op, **case.options), arrays, floating(arrays))


def gpu_ms(f: Callable, *args) -> float:
    """Median GPU milliseconds of a jitted function's kernels."""
    jax.block_until_ready(f(*args))
    _, times = profiler.measure(f, iterations=_CALLS)(*args)
    return statistics.median(times)


def time_call(call: Call, directions: tuple[str, ...], saved: bool) -> dict[str, float]:
    """GPU milliseconds in each direction; saved: the backward pass gets the forward pass's pull."""
    dy = call.cotangents()
    ms = {"forward": gpu_ms(jax.jit(call.forward), *call.arrays)}
    if "forward+backward" in directions:
        ms["forward+backward"] = gpu_ms(jax.jit(call.both), dy, *call.arrays)
    elif saved:
        pull = jax.jit(lambda *a: call.pull(*a)[1])(*call.arrays)
        ms["backward"] = gpu_ms(jax.jit(lambda pull, dy: pull(dy)), pull, dy)
    else:
        ms["backward"] = gpu_ms(jax.jit(call.backward), dy, *call.arrays)
    return ms


def bytes_moved(case: Case, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes that each direction cannot avoid: each input once and each output once."""
    structs = abstract(case, sizes)
    size = {n: s.size * s.dtype.itemsize for n, s in zip(case.arrays, structs, strict=True)}
    y = jax.eval_shape(_on_xla(case), *structs)
    outputs = sum(o.size * o.dtype.itemsize for o in jax.tree.leaves(y))
    read = dict(size)
    if case.op == "encoder":  # of the table, the rows that occur
        rows = np.unique(np.asarray(array(case.arrays["tokens"], sizes, 0))).size
        read["wte"] = read["wte"] // sizes["V"] * rows
    writes = case.writes
    if writes is None:
        writes = [n for n, s in zip(case.arrays, structs, strict=True) if s.dtype.kind not in "iu"]
    backward = sum(size[n] for n in case.reads) + outputs + sum(size[n] for n in writes)
    forward = sum(read.values()) + outputs
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}


def counted_flops(case: Case, sizes: dict[str, int], direction: str) -> float:
    """XLA's own count of the jnp form's operations: where the op stands under the roofline."""
    structs = abstract(case, sizes)
    call = Call(_on_xla(case), structs, floating(structs))
    if direction == "forward":
        lowered = jax.jit(call.forward).lower(*structs)
    else:
        y = jax.eval_shape(call.op, *structs)
        lowered = jax.jit(call.backward).lower(y, *structs)
    return lowered.cost_analysis()["flops"]


def abstract(case: Case, sizes: dict[str, int]) -> list[jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: [array(spec, sizes, 0) for spec in case.arrays.values()])


def floating(arrays) -> list[int]:
    return [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]


def _on_xla(case: Case) -> Callable:
    return functools.partial(getattr(pallas_kernels, case.op), **case.options, backend="xla")


def errors(case: Case, sizes: dict[str, int], **ops: Callable) -> dict[str, dict[str, float]]:
    """Relative error of each op against float64, forward and backward, at the small sizes."""
    sizes = sizes | {axis: min(n, sizes[axis]) for axis, n in case.small.items()}
    calls = {name: prepare(case, op, sizes) for name, op in ops.items()}
    first = next(iter(calls.values()))
    dy = first.cotangents()
    widen = lambda x: (
        np.asarray(x).astype(np.float64) if x.dtype.kind not in "iu" else np.asarray(x)
    )
    wide, wide_dy = jax.tree.map(widen, (first.arrays, dy))
    with jax.enable_x64(True):
        options = {k: v for k, v in case.options.items() if k != "dtype"}  # of the result: float64
        op = functools.partial(getattr(pallas_kernels, case.op), **options, backend="xla")
        truth = jax.jit(Call(op, wide, first.differentiable).both)(wide_dy, *wide)
        truth = jax.tree.map(np.asarray, truth)
    result = {}
    for name, call in calls.items():
        actual = jax.jit(call.both)(dy, *call.arrays)
        result[name] = {
            direction: max(map(_relative, jax.tree.leaves(a), jax.tree.leaves(t)))
            for direction, a, t in zip(("forward", "backward"), actual, truth, strict=True)
        }
    return result


def _relative(actual, truth) -> float:
    norm = np.linalg.norm(truth)
    return float(np.linalg.norm(np.asarray(actual).astype(np.float64) - truth) / (norm or 1))


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (read plus written) and bfloat16 matmul rate in TFLOP/s."""
    x = jax.random.normal(jax.random.key(0), (2**30,), jnp.bfloat16)
    a = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
    copy = gpu_ms(jax.jit(lambda x: -x), x)  # XLA turns a plain copy into what is no kernel
    again = jax.jit(jnp.copy)
    again(x).block_until_ready()
    start = time.perf_counter()
    for _ in range(
        _CALLS
    ):  # one after the other: the device is never idle, the clock on the wall does
        y = again(x)
    y.block_until_ready()
    copy = min(copy, (time.perf_counter() - start) / _CALLS * 1e3)
    matmul = gpu_ms(jax.jit(jnp.matmul), a, a)
    return {
        "copy_TB_per_s": 2 * x.nbytes / copy / 1e9,
        "matmul_TFLOP_per_s": 2 * 8192**3 / matmul / 1e9,
    }


def measure(case: Case, sizes: dict[str, int], tops: dict[str, float] | None) -> list[dict]:
    """One record for each direction; without `tops` (no GPU) only what needs no clock."""
    public = getattr(pallas_kernels, case.op)
    backend.forget()
    jax.eval_shape(functools.partial(public, **case.options), *abstract(case, sizes))
    decision = next(d for d in backend.decisions() if d.op == case.op)
    ops = {"xla": functools.partial(public, backend="xla")}
    if decision.runs == "mosaic":
        ops = {"mosaic": functools.partial(public, backend="mosaic")} | ops
    directions = ("forward", "forward+backward" if case.flops else "backward")
    with backend.silenced():
        error = errors(case, sizes, **ops)
        moved = bytes_moved(case, sizes)
        if case.cudnn:
            ops["cudnn"] = case.cudnn
        if not case.xla:
            del ops["xla"]
        ms, failed = {}, {}
        for name, op in ops.items() if tops else ():
            try:
                ms[name] = time_call(prepare(case, op, sizes), directions, name == "mosaic")
            except Exception as e:  # a rival that lacks this shape, or memory: measure the others
                failed[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
    records = []
    for direction in directions:
        amount, unit, top = moved[direction], "TB/s", "copy_TB_per_s"
        flops = None
        if case.flops:
            amount = flops = case.flops(sizes) * (3.5 if "+" in direction else 1)
            unit, top = "TFLOP/s", "matmul_TFLOP_per_s"
        times = {name: t[direction] for name, t in ms.items()}
        rate = {name: amount / t / 1e9 for name, t in times.items()}
        records.append(
            dict(
                op=case.op,
                variant=case.variant,
                sizes=sizes,
                direction=direction,
                runs=decision.runs,
                why=decision.why,
                bytes=moved[direction],
                flops=flops or counted_flops(case, sizes, direction),
                in_cache=moved[direction] < _L2,
                ms=times,
                unit=unit,
                rate=rate,
                of_ceiling={name: r / tops[top] for name, r in rate.items()} if tops else {},
                error={name: e[direction.split("+")[-1]] for name, e in error.items()},
                failed=failed,
            )
        )
    return records


def run(ops, out: Path, cases: tuple[Case, ...] = CASES) -> dict:
    """Measures the named ops (none: all); shows a table, writes benchmark.json and roofline.png."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console() if sys.stdout.isatty() else Console(width=150)
    device = jax.devices()[0]
    result = {
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "platform": device.client.platform_version,
        "command": "python -m pallas_kernels.benchmark " + " ".join(ops),
        "date": time.strftime("%Y-%m-%d"),
        "not_measured": None,
        "ceilings": None,
        "records": [],
    }
    if jax.default_backend() == "gpu":
        result["ceilings"] = ceilings()
    else:
        result["not_measured"] = (
            f"no times, rates and ceilings: the platform is {jax.default_backend()}, not gpu;"
            " errors are those of the jnp forms"
        )
    todo = [(case, sizes) for case in cases if not ops or case.op in ops for sizes in case.sizes]
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(todo))
        for case, sizes in todo:
            bar.update(task, description=f"{case.op} {_size(sizes)}")
            if hasattr(pallas_kernels, case.op):
                result["records"] += measure(case, sizes, result["ceilings"])
            jax.clear_caches()  # compiled programs hold device memory
            bar.advance(task)
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmark.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, out / "roofline.png")
    console.print(table(result))
    if result["not_measured"]:
        console.print(f"Not measured: {result['not_measured']}.")
    for r in result["records"]:
        for name, why in r["failed"].items() if r["direction"] == "forward" else ():
            console.print(f"{r['op']} {_size(r['sizes'])}: {name} failed, {why}", markup=False)
    console.print(f"Wrote {out}/benchmark.json and {out}/roofline.png")
    return result


def table(result: dict):
    """The records as a rich table."""
    from rich.table import Table

    tops = result["ceilings"]
    title = f"{result['device']}, JAX {result['versions']['jax']}"
    if tops:
        title += ", copy {copy_TB_per_s:.2f} TB/s, matmul {matmul_TFLOP_per_s:.0f} TFLOP/s".format(
            **tops
        )
    view = Table(title=title, caption="*: partly served by the cache   error: relative, RMS")
    view.add_column("op")
    view.add_column("shape")
    view.add_column("direction")
    view.add_column("runs")
    for name in ("ms", "rate", "of ceiling", "x XLA", "x cuDNN", "error", "XLA's error"):
        view.add_column(name, justify="right")
    for r in result["records"]:
        mine = r["ms"].get("mosaic")
        times = lambda rival, r=r, mine=mine: (
            f"{r['ms'][rival] / mine:.2f}" if mine and rival in r["ms"] else "-"
        )
        view.add_row(
            " ".join(filter(None, (r["op"], r["variant"]))),
            _size(r["sizes"]),
            r["direction"],
            r["runs"],
            f"{mine:.4f}" if mine else "-",
            f"{r['rate']['mosaic']:.3g} {r['unit']}" if mine else "-",
            f"{r['of_ceiling']['mosaic']:.0%}{'*' * r['in_cache']}" if mine else "-",
            times("xla"),
            times("cudnn"),
            f"{r['error']['mosaic']:.1e}" if "mosaic" in r["error"] else "-",
            f"{r['error']['xla']:.1e}",
        )
    return view


def draw(result: dict, path: Path) -> None:
    """The roofline: operations a byte against operations a second, kernels and XLA forms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.set_title(f"{result['device']}: {result['not_measured'] or 'roofline'}", fontsize=9)
    if result["ceilings"]:
        copy, matmul = result["ceilings"].values()
        x = np.geomspace(0.1, 1e4, 200)
        axes.plot(x, np.minimum(copy * x, matmul), color="black", label="copy and matmul ceilings")
    for name, marker in (("mosaic", "o"), ("xla", "x"), ("cudnn", "+")):
        points = [
            (r["flops"] / r["bytes"], r["flops"] / r["ms"][name] / 1e9, r)
            for r in result["records"]
            if name in r["ms"] and r["flops"]
        ]
        if points:
            axes.scatter(*zip(*(p[:2] for p in points), strict=True), marker=marker, label=name)
        for x, y, r in points if name == "mosaic" else ():
            axes.annotate(f"{r['op']} {r['direction']}", (x, y), fontsize=5)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=150)


def _size(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}{n}" for axis, n in sizes.items())


def main(argv: list[str] | None = None) -> int:
    names = sorted({case.op for case in CASES})
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.benchmark", description=__doc__)
    parser.add_argument("op", nargs="*", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder for results")
    arguments = parser.parse_args(argv)
    for op in arguments.op:
        if op not in names:
            print(f"error: {op!r} is not one of {', '.join(names)}", file=sys.stderr)
            return 2
    result = run(arguments.op, arguments.out)
    return int(any("mosaic" in r["failed"] for r in result["records"]))


if __name__ == "__main__":
    sys.exit(main())
