"""Runs a ladder: python -m learn layer_norm.

    python -m learn                             the ladders
    python -m learn layer_norm                  every rung: on a GPU its time beside XLA and the
                                                roofline, on a CPU whether it is right
    python -m learn all                         all ladders, one after the other
    python -m learn layer_norm 2 5 --trace      two rungs, with a picture of what their warpgroups,
                                                buffers and barriers do (on a CPU)
    python -m learn check layer_norm 2 mine.py  tests your answer to an exercise (on a CPU)
    python -m learn draw                        draws the stairs again from learn/results.json

Pictures and times go to --out (default: benchmarks/learn).
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

from learn import ladder as ladders
from learn import stairs

RESULTS = ladders.HERE / "results.json"
PATIENCE = 100  # seconds that a rung may take on a CPU; ours take one or two


def listing() -> None:
    for name in ladders.names():
        found = ladders.rungs(ladders.find(name))
        print(f"{name}: {len(found)} rungs")
        for rung in [*found, *ladders.beside(ladders.find(name))]:
            print(f"    {ladders.idea(rung)}")


def interpret(ladder, rungs, out: Path, trace: bool) -> int:
    """Interprets rungs on the CPU and compares them with float64; returns the exit status."""
    from learn import record

    stored = json.loads(RESULTS.read_text()).get(ladder.name, {}).get("times", {})
    sizes, failed = ladder.sizes[0], 0
    print(
        f"{ladder.name}: interpreted at small sizes; counted and measured at {stairs.text(sizes)}"
    )
    print(f"roofline of an H100: {ladder.floor(sizes):.0f} us")
    for rung in rungs:
        number = ladders.number(rung)
        inputs = ladders.example(ladder, rung).inputs
        start, wrong = time.perf_counter(), ""
        with record.recording() as book, ended(book):
            try:
                ladders.check(ladder, rung, record.watched(book))
            except Exception as error:
                wrong, failed = f"WRONG: {why(error, book, rung)}", 1
        seconds = time.perf_counter() - start
        measured = stored.get(stairs.text(sizes), {}).get(rung.__name__.rpartition(".")[2])
        gained = f"measured {measured:.0f} us" if measured else "not measured yet"
        print(f"{ladders.idea(rung)}")
        print(f"    {wrong or 'right'} ({seconds:.0f} s); counted"
              f" {ladder.counted[number - 1](sizes):.0f} us, {gained}")  # fmt: skip
        print(f"    at {_text(inputs)}: {record.summary(book)}")
        if trace and not wrong:
            for path in pictures(book, rung, out / ladder.name, ladder.bandwidth):
                print(f"    wrote {path}")
    if len(rungs) == len(ladders.rungs(ladder)):
        able(ladder)
    return failed


KEY, SLICE = re.compile(r"HostAllocationKey\(([^)]*)\)"), re.compile(r"slice\((\d+), (\d+), 1\)")
ACCESS = re.compile(
    rf"(write|read) of {KEY.pattern}\[\(?(.*?)\)?\] from"
    r" \w+\(device_id=\d+, cluster_id=\d+, block_id=(\d+), warpgroup_id=(\d+)"
)


@contextlib.contextmanager
def ended(book):
    """Ends the program, with a line, if the kernel inside waits for what never comes."""

    def give_up():
        events = [e for e in book.events if e.kernel == book.at]
        last = {(e.wg, e.warp): e for e in events if e.block == events[-1].block}
        each = [f"warpgroup {e.wg} waits for {e.buffer}" for e in last.values() if e.kind == "wait"]
        block = ", ".join(map(str, events[-1].block)) if events else ""
        what = each and f": in block {block} {', '.join(each)}, on which too little arrives"
        print(f"not yet: the kernel has not ended after {PATIENCE} s{what or ''}", flush=True)
        os._exit(1)  # the interpreter's threads cannot be stopped

    timer = threading.Timer(PATIENCE, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def why(error: Exception, book, rung) -> str:
    """An error's cause in a line; the interpreter's come with the traces of several threads."""
    text = str(error).partition("\n-----")[0].partition("\n see current operation")[0]
    text = text.rpartition("Error details: ")[2]
    named = lambda key: book.names.get(tuple(map(int, re.findall(r"=(-?\d+)", key))), "a buffer")
    both = ACCESS.findall(text)[:2]
    if "RACE DETECTED" in text and len(both) == 2:
        (_, key, at, *one), (*_, b, wg) = both
        buffer = named(key)
        who = " and ".join(f"a {what} by block {b}, warpgroup {wg}" for what, *_, b, wg in both)
        # The interpreter numbers the blocks of a cluster; a block of the grid alone is number 0.
        if one == [b, wg] and len({e.block for e in book.events if e.buffer == buffer}) > 1:
            who = f"a {both[0][0]} and a {both[1][0]} by two blocks, or by a block and its TMA"
        return f"a race on {buffer}[{SLICE.sub(r'\1:\2', at)}]: {who}, in no order"
    text = KEY.sub(lambda key: named(key[1]), SLICE.sub(r"\1:\2", text))
    text = re.sub(r"Access\(range=\((.*?),?\), permutation=None\)", r"\1", text)
    text = re.sub(r"Warpgroup\(.*?warpgroup_id=(\d+)\)", r"warpgroup \1", text)
    lines = [line for line in text.splitlines() if line.strip()] or [repr(error)]
    causes = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    cause = (causes or lines)[-1].strip()
    if cause.endswith("is not finite"):
        cause += " (in the interpreter an element that no block writes is NaN)"
    frames = traceback.extract_tb(error.__traceback__)
    at = [f"line {frame.lineno}: " for frame in frames if frame.filename == rung.__file__]
    return at[-1] + cause if at else cause


def lower(ladder, rung) -> None:
    """Lowers a rung for a GPU at the size that is timed; raises what the hardware refuses."""
    import jax

    prepare = getattr(rung, "prepare", lambda *inputs: inputs)
    shapes = jax.eval_shape(lambda: ladder.inputs(ladder.sizes[0]))
    formula = ladder.formulas.get(ladders.number(rung), ladder.reference)
    run = jax.jit(lambda *inputs: getattr(rung, ladder.name)(*prepare(*inputs)))
    traced = run.trace(*shapes)
    ladders.check_types(ladder, traced.out_info, jax.eval_shape(formula, *shapes))
    traced.lower(lowering_platforms=("cuda",))


def _text(inputs) -> str:
    return ", ".join("x".join(map(str, a.shape)) for a in inputs)


def pictures(book, rung, folder: Path, bandwidth: float) -> list[Path]:
    """Draws the first block of every kernel of a recorded run."""
    from learn import trace

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for i in sorted({e.kernel for e in book.events}):
        events = [e for e in book.events if e.kernel == i]
        first = min(e.block for e in events)
        own = [e for e in events if e.block == first]
        bars = trace.schedule(own, book.arrivals.get(i, {}), bandwidth)
        short = rung.__name__.rpartition(".")[2]
        path = folder / (f"{short}.svg" if i == 0 else f"{short}-kernel{i + 1}.svg")
        title = f"{short}: the first block of {book.kernels[i][0]}; times of the model in trace.py"
        path.write_text(trace.draw(bars, title))
        made.append(path)
    return made


def needs_a_cpu(what: str) -> None:
    import jax

    if jax.default_backend() == "gpu":
        raise SystemExit(f"error: {what} interprets on the CPU: set JAX_PLATFORMS=cpu")


def check(name: str, number: int, path: Path) -> int:
    """Tests a file of the reader's as a rung."""
    from learn import record

    needs_a_cpu("check")
    ladder = ladders.find(name)
    pick(ladder, [number])
    own = {Path(r.__file__): ladders.number(r) for r in ladders.rungs(ladder)}
    if (other := own.get(path.resolve(), number)) != number:
        raise SystemExit(
            f"error: {path} is rung {other}, not an answer to rung {number}: name a file of yours,"
            f" or write python -m learn check {name} {other} {path}"
        )
    rung = ladders.load(path, number)
    if not hasattr(rung, name):
        raise SystemExit(f"error: {path} has no function {name}, which a rung of {name} needs")
    inputs = ladders.example(ladder, rung).inputs
    complaint, where = None, ""
    try:
        with record.recording() as book, ended(book):
            ladders.check(ladder, rung, record.watched(book))
            if not book.kernels:
                raise ValueError("no kernel ran: an answer calls mosaic.kernel")
        wanted = ladder.properties.get(number)
        complaint = wanted(book, *inputs) if wanted else None
        if not complaint:
            where = f"at {stairs.text(ladder.again)}, another size: "
            with record.recording() as book, ended(book):
                ladders.check(ladder, rung, record.watched(book), ladder.again)
            where = f"for a GPU, at {stairs.text(ladder.sizes[0])}: "
            lower(ladder, rung)
    except Exception as error:
        complaint = where + why(error, book, rung)
    print(f"not yet: {complaint}" if complaint else f"right: {path} is a rung {number} of {name}")
    return int(complaint is not None)


def compiled(function, arguments):
    import jax

    return jax.jit(function).lower(*arguments).compile()


def measure(ladder, rungs, ceilings: dict, turns: int = 3) -> dict:
    """Microseconds of every rung and of XLA at every size, in turns; checks them first."""
    import jax

    from pallas_kernels.bench.timing import gpu_ms

    native = lambda function, arguments: jax.block_until_ready(jax.jit(function)(*arguments))
    for rung in rungs:
        ladders.check(ladder, rung, native)
        print(f"{ladder.name} {rung.__name__.rpartition('.')[2]}: right", flush=True)
    cases = {}  # compiled before anything is timed
    for sizes in ladder.sizes:
        inputs = ladder.inputs(sizes)
        calls = {"xla": (ladder.reference, inputs)}
        for rung in rungs:
            calls[rung.__name__.rpartition(".")[2]] = ladders.call(ladder, rung, inputs)
        cases[stairs.text(sizes)] = (
            sizes,
            {
                name: (compiled(function, arguments), arguments)
                for name, (function, arguments) in calls.items()
            },
        )
    times, floors = {}, {}
    copy, matmul = ceilings["copy_TB_per_s"] * 1e6, ceilings["matmul_TFLOP_per_s"] * 1e6
    for key, (sizes, calls) in cases.items():
        taken = {name: [] for name in calls}
        for name in [*calls] * turns:
            function, arguments = calls[name]
            taken[name] += gpu_ms(function, *arguments)
        times[key] = {name: statistics.median(ms) * 1e3 for name, ms in taken.items()}
        floors[key] = max(ladder.bytes(sizes) / copy, ladder.flops(sizes) / matmul)
        print(f"{ladder.name} {key}: roofline {floors[key]:.1f} us")
        for name, us in times[key].items():
            print(f"    {name:<28} {us:9.1f} us  {floors[key] / us:.2f} of it", flush=True)
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "times": times,
        "floors": floors,
    }


def able(ladder) -> list:
    """The modules beside the rungs that run here; prints why the others do not."""
    reasons = {module: module.why_not() for module in ladders.beside(ladder)}
    for module, reason in reasons.items():
        if reason:
            print(f"{ladders.idea(module)}\n    not run: {reason}")
    return [module for module, reason in reasons.items() if not reason]


def time_on_gpu(chosen, numbers: list[int], out: Path) -> None:
    """Times ladders and writes results.json and the stairs under `out`."""
    from pallas_kernels.bench.timing import ceilings

    tops = ceilings()
    results = json.loads(RESULTS.read_text())
    for ladder in chosen:
        rungs = pick(ladder, numbers) + ([] if numbers else able(ladder))
        results[ladder.name] = measure(ladder, rungs, tops)
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(ladder, results, out)
    print(f"wrote {out}/results.json and the stairs")


def draw(ladder, results: dict, out: Path) -> None:
    folder = out / ladder.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stairs.svg").write_text(stairs.draw(ladder, results.get(ladder.name, {})))


def pick(ladder, numbers: list[int]):
    found = ladders.rungs(ladder)
    for number in numbers:
        if number not in range(1, len(found) + 1):
            raise SystemExit(f"error: {ladder.name} has rungs 1 to {len(found)}, not {number}")
    return [rung for rung in found if not numbers or ladders.number(rung) in numbers]


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["check"]:
        if len(words) != 4 or not words[2].isdecimal():
            raise SystemExit("error: write python -m learn check LADDER RUNG FILE")
        return check(known(words[1]), int(words[2]), Path(words[3]))
    parser = argparse.ArgumentParser(
        prog="python -m learn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="a ladder, `all`, or draw")
    parser.add_argument("rung", nargs="*", type=int, help="numbers of rungs (default: all)")
    parser.add_argument("--trace", action="store_true", help="draw what the warpgroups do")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/learn"), metavar="DIR", help="for results"
    )
    arguments = parser.parse_args(words)
    if arguments.name is None:
        listing()
        return 0
    if arguments.name == "draw":
        for name in ladders.names():
            draw(ladders.find(name), json.loads(RESULTS.read_text()), ladders.HERE)
        return 0
    all_ = ladders.names() if arguments.name == "all" else [known(arguments.name)]
    chosen = [ladders.find(name) for name in all_]

    import jax

    on_gpu = jax.default_backend() == "gpu"
    if arguments.trace:
        needs_a_cpu("--trace")
    if on_gpu or arguments.trace:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise SystemExit(f"error: --out {arguments.out}: {e.strerror}: name a folder") from e
    if on_gpu:
        time_on_gpu(chosen, arguments.rung, arguments.out)
        return 0
    return max(
        interpret(ladder, pick(ladder, arguments.rung), arguments.out, arguments.trace)
        for ladder in chosen
    )


def known(name: str) -> str:
    if name not in ladders.names():
        raise SystemExit(f"error: no ladder {name}: there are {', '.join(ladders.names())}")
    return name


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SystemExit as end:  # a line for bad input
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            sys.exit(2)
        raise
