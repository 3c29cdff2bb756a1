"""Says what a call of an op will do and what bounds it: python -m pallas_kernels.explain.

    python -m pallas_kernels.explain attention                  at the first sizes of the benchmark
    python -m pallas_kernels.explain attention B=8 T=2048 H=10 K=10              at others
    python -m pallas_kernels.explain attention --variant full --picture plan.svg

`explain("attention", q, k, v, causal=False)` does the same for any call; arrays may be
jax.ShapeDtypeStructs.  Nothing is computed: the call is traced, our kernels are read from the
traced program (XLA's own are not listed), and the benchmark counts bytes and operations.
Without a GPU it is the plan for an H100.  On a GPU the command also measures the call and the
ceilings.

Registers are known only to the compiler: tests/compile_ahead.py of a checkout lists them.
"""

import argparse
import dataclasses
import functools
import html
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import dispatch, mosaic
from pallas_kernels.bench import compiling, operands, timing
from pallas_kernels.bench.case import A, Case
from pallas_kernels.bench.cases import CASES
from pallas_kernels.bench.traced import TracedKernel, amount, kernels_of, size_text

H100 = {"copy_TB_per_s": 2.95, "matmul_TFLOP_per_s": 800.0}  # what copies and matmuls reach
OPS = sorted({case.op for case in CASES})  # that the command takes
_NUMBERS = {bool, int, float, NoneType}


class Part(NamedTuple):
    """The forward pass of a call, or forward and backward pass together."""

    name: str
    kernels: list[TracedKernel]
    bytes: int  # that must move: each input and each result once
    flops: float | None  # None: not counted
    tensor: bool  # whether the tensor core does these; False: all operations of the jnp form
    microseconds: float | None  # measured

    def limits(self, tops: dict[str, float]) -> dict[str, float]:
        """Microseconds that the memory and the tensor core need at least."""
        found = {"memory": self.bytes / tops["copy_TB_per_s"] / 1e6}
        if self.tensor and self.flops:
            found["tensor core"] = self.flops / tops["matmul_TFLOP_per_s"] / 1e6
        return found

    def arrays(self) -> int:
        return sum(kernel.arrays * kernel.launches for kernel in self.kernels)


class CallPlan(NamedTuple):
    """What a call will do; str() is the text, `picture()` an SVG."""

    call: str
    decision: dispatch.Decision
    device: str
    sms: int
    tops: dict[str, float]
    parts: list[Part]

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.device}"]
        lines.append(f"  {self.decision.op} runs on {self.decision.runs}: {self.decision.why}")
        for part in self.parts:
            lines += ["", part.name, *(f"  {line}" for line in self._about(part))]
        return "\n".join(lines)

    def _about(self, part: Part) -> Iterator[str]:
        limits = part.limits(self.tops)
        bound = max(limits, key=lambda name: limits[name])
        if not part.kernels:
            yield "kernel    none of ours"
        for kernel in part.kernels:
            yield f"kernel    {kernel}"
            if kernel.tiles:
                yield f"          tiles {', '.join(kernel.tiles)}"
        yield f"work      {size_text(part.bytes)} must move; {_flops(part)}"
        floor = ", ".join(f"{name} {us:.1f} us" for name, us in limits.items())
        yield f"floor     {limits[bound]:.1f} us ({floor})"
        if part.microseconds:
            share = limits[bound] / part.microseconds
            yield f"measured  {part.microseconds:.1f} us: {share:.2f} of the floor's speed"
        for i, reason in enumerate(self._why(part, bound)):
            yield f"{'why' if i == 0 else '':<10}{reason}"

    def _why(self, part: Part, bound: str) -> Iterator[str]:
        """What bounds the call, and what else may keep it from its floor."""
        copy, matmul = self.tops["copy_TB_per_s"], self.tops["matmul_TFLOP_per_s"]
        if part.tensor and part.flops:
            yield (
                f"{bound}: {part.flops / part.bytes:.0f} operations for each byte, and from"
                f" {matmul / copy:.0f} on the tensor core is the limit"
            )
        else:
            yield f"{bound}: at {copy:.2f} TB/s, what a copy reaches"
            most = (part.flops or 0) / matmul / 1e6  # if all were the tensor core's
            known = [case.flops for case in CASES if self.call.startswith(f"{case.op}(")]
            if any(known) or most > part.limits(self.tops)["memory"]:
                yield "the tensor core may be the limit: its share of the operations is not known"
        if part.kernels and part.arrays() > 1.1 * part.bytes:
            yield (
                f"the arrays of the kernels are {part.arrays() / part.bytes:.1f} times what must"
                f" move, {part.arrays() / copy / 1e6:.1f} us: kernels leave results for each other,"
                " read an array again, or only a part of it"
            )
        few = dict.fromkeys(k.name for k in part.kernels if k.blocks < self.sms)
        if few:
            yield f"fewer blocks than the {self.sms} SMs: {', '.join(few)}"
        if part.bytes < timing.L2:
            yield "a repeated call may find a part of its arrays in the L2 cache and beat the floor"

    def picture(self) -> str:
        """Bars of all times, as SVG: limits, the kernels' arrays at a copy's speed, measured."""
        rows = []
        for part in self.parts:
            bars = [(name, us, "#9aa5b1") for name, us in part.limits(self.tops).items()]
            if part.kernels:
                us = part.arrays() / self.tops["copy_TB_per_s"] / 1e6
                bars.append(("arrays of the kernels", us, "#d0d7de"))
            if part.microseconds:
                bars.append(("measured", part.microseconds, "#2a9d8f"))
            rows += [(part.name, None, ""), *bars]
        return _draw(f"{self.call} on {self.device}", rows)


def explain(op: str, *arrays, measure: bool = False, **options) -> CallPlan:
    """The plan of a call of `op`, a public op by its name.

    arrays, options: the call's; an array may be a jax.ShapeDtypeStruct.
    measure: also times the call, with random arrays, and the ceilings; it needs a GPU.
    Raises what the op raises for arguments that it does not take.
    """
    takes = lambda name: inspect.signature(getattr(pallas_kernels, name)).parameters
    ops = [name for name in pallas_kernels.__all__ if "implementation" in takes(name)]
    if op not in ops:
        raise ValueError(f"op={op!r} is not one of {', '.join(ops)}")
    bound = inspect.signature(getattr(pallas_kernels, op)).bind(*arrays, **options)
    parameters, given = bound.signature.parameters, bound.arguments.items()
    taken = {name: _as_taken(parameters[name].annotation, x) for name, x in given}
    return plan(*_case(op, taken), measure)


def plan(case: Case, sizes: dict[str, int], measure: bool = False) -> CallPlan:
    """The plan of a case of the benchmark."""
    on_gpu = jax.default_backend() == "gpu"
    if measure and not on_gpu:
        raise ValueError(f"measure=True needs a GPU, and the platform is {jax.default_backend()}")
    op, structs = compiling.public(case), operands.structs(case, sizes)
    with dispatch.rehearsal():
        names = {"forward": (op, *structs)}
        if not case.forward_only:
            dy = jax.eval_shape(op, *structs)
            names["forward and backward"] = functools.partial(compiling.both, op), dy, *structs
        decision = compiling.decided(case, sizes)
        traced = {name: jax.make_jaxpr(f)(*a).jaxpr for name, (f, *a) in names.items()}
        moved, flops = compiling.bytes_moved(case, sizes), _counted(case, sizes)
        taken, tops = _measured(case, op, sizes) if measure else ({}, H100)
    # A call of fp8 whose sizes fp8 does not take multiplies in the arrays' dtype.
    rate = case.rate if "f8_e4m3fn" in str(traced["forward"]) else 1
    tops = tops | {"matmul_TFLOP_per_s": rate * tops["matmul_TFLOP_per_s"]}
    moved["forward and backward"] = moved["forward+backward"]
    parts = [
        Part(name, kernels_of(jaxpr), moved[name], flops[name], bool(case.flops), taken.get(name))
        for name, jaxpr in traced.items()
    ]
    shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in structs)
    extra = "".join(f", {name}={value!r}" for name, value in case.options.items())
    device = jax.devices()[0].device_kind if on_gpu else "an H100 (here is no GPU)"
    return CallPlan(f"{case.op}({shown}{extra})", decision, device, mosaic.sm_count(), tops, parts)


def _as_taken(annotation, x):
    """An argument as the op takes it: Python's number for an option, and dtypes that JAX has."""
    if _NUMBERS.issuperset(get_args(annotation) or [annotation]) and getattr(x, "ndim", 1) == 0:
        return x.item()
    dtype = lambda leaf: jax.dtypes.canonicalize_dtype(leaf.dtype)
    struct = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype(leaf)) if _is_array(leaf) else leaf
    return jax.tree.map(struct, x)


def _case(op: str, arguments: dict[str, Any]) -> tuple[Case, dict[str, int]]:
    """A case of the benchmark for any call, and its sizes.

    It is the benchmark's own case if that counts the call's work.  Otherwise the case has the
    forward pass alone, and XLA counts the operations of the jnp form.
    """
    trees = {name: x for name, x in arguments.items() if jax.tree.leaves(x) and _is_array(x)}
    options = {name: x for name, x in arguments.items() if name not in trees}
    for case in (case for case in CASES if case.op == op and not case.pack):
        sizes = _sizes(case, trees)
        same = _all_options(op, options) == _all_options(op, case.options)
        if sizes and (same or not case.flops):
            given = lambda names: tuple(name for name in names if name in trees)
            return dataclasses.replace(
                case,
                arrays={
                    n: dataclasses.replace(case.arrays[n], dtype=x.dtype.name)
                    for n, x in trees.items()
                },
                reads=given(case.reads),
                writes=case.writes and given(case.writes),
                options=options,
            ), sizes
    leaves, tree = jax.tree.flatten([*trees.values()])
    arrays, sizes = {}, {}
    for i, leaf in enumerate(leaves):
        axes = {f"a{i}_{n}": size for n, size in enumerate(leaf.shape)}
        fill = "normal" if jnp.issubdtype(leaf.dtype, jnp.floating) else "arange"
        arrays[f"a{i}"] = A(" ".join(axes), leaf.dtype.name, fill)
        sizes |= axes
    pack = lambda **named: dict(zip(trees, tree.unflatten(named.values()), strict=True))
    return Case(op, arrays, (sizes,), {}, options=options, forward_only=True, pack=pack), sizes


def _is_array(tree) -> bool:
    return all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(tree))


def _all_options(op: str, options: dict) -> dict:
    """The options of a call that may change its work, with the op's defaults."""
    parameters = inspect.signature(getattr(pallas_kernels, op)).parameters.values()
    given = {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY} | options
    return {name: x for name, x in given.items() if name not in ("implementation", "scale")}


def _sizes(case: Case, arrays: dict[str, Any]) -> dict[str, int]:
    """The sizes at which these arrays are the case's, or some of them; empty if there are none."""
    sizes = {}
    for name, x in arrays.items():
        axes = case.arrays[name].axes.split() if name in case.arrays else []
        shape = getattr(x, "shape", ())
        pairs = dict(zip(axes, shape, strict=False))
        if not axes or len(pairs) != len(shape) or sizes | pairs != pairs | sizes:
            return {}
        sizes |= pairs
    return sizes if set(sizes) >= set(case.sizes[0]) else {}


def _counted(case: Case, sizes: dict[str, int]) -> dict[str, float | None]:
    """The operations of both parts: the benchmark's count, or XLA's of the jnp form."""
    flops = compiling.counted_flops(case, sizes)
    if "forward+backward" in flops:
        both = flops["forward+backward"]
    else:
        both = flops["forward"] and flops["backward"] and flops["forward"] + flops["backward"]
    return {"forward": flops["forward"], "forward and backward": both}


def _measured(case: Case, op, sizes) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of both parts, and the ceilings."""
    inputs = operands.arrays(case, sizes)
    programs = {"op": compiling.compile_op(case, op, inputs, keep=True)}
    ms, failed = timing.time_ops(programs, operands.cotangents(op, inputs), inputs)
    if failed:
        raise RuntimeError(f"{case.op} was not timed: {failed['op']}")
    taken = ms["op"]
    both = taken.get("forward+backward", taken["forward"] + taken.get("backward", 0))
    us = {"forward": taken["forward"] * 1e3, "forward and backward": both * 1e3}
    return us, timing.ceilings()


def _flops(part: Part) -> str:
    if not part.flops:
        return "operations are not counted"
    names = {1e12: "trillion", 1e9: "billion", 1e6: "million", 1e3: "thousand"}
    count = amount(part.flops, names)
    return f"{count} operations" + ("" if part.tensor else " in the jnp form, as XLA counts")


def _draw(title: str, rows: list[tuple[str, float | None, str]]) -> str:
    """Horizontal bars; a row without a number is a heading."""
    longest = max((us for _, us, _ in rows if us), default=1)  # arrays may be empty
    height = 40 + 24 * len(rows)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {height}"'
        f' font-family="sans-serif" font-size="13">\n<rect width="1000" height="{height}"'
        f' fill="white"/>\n<text x="10" y="20" font-size="14">{html.escape(title)}</text>'
    ]
    for i, (name, us, colour) in enumerate(rows):
        y = 48 + 24 * i
        if us is None:
            out.append(f'<text x="10" y="{y}" font-weight="bold">{name}</text>')
            continue
        wide = 640 * us / longest
        out.append(
            f'<text x="170" y="{y}" text-anchor="end">{name}</text><rect x="180" y="{y - 14}"'
            f' width="{wide:.1f}" height="18" fill="{colour}"/>'
            f'<text x="{186 + wide:.1f}" y="{y}">{us:.1f} us</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("op", choices=OPS, metavar="op", help=f"one of {', '.join(OPS)}")
    parser.add_argument("size", nargs="*", metavar="AXIS=N", help="B=8, for example")
    parser.add_argument("--variant", default=None, help="of the benchmark's table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw an SVG")
    given = parser.parse_intermixed_args(argv)
    cases = [case for case in CASES if case.op == given.op]
    named = {case.variant: case for case in reversed(cases)}
    case = cases[0] if given.variant is None else named.get(given.variant)
    if case is None:
        parser.error(
            f"--variant {given.variant}: {given.op} has"
            f" {', '.join(sorted(filter(None, named))) or 'none, omit it'}"
        )
    sizes = dict(case.sizes[0])
    for word in given.size:
        axis, _, size = word.partition("=")
        n = int(size) if size.isdecimal() and len(size) < 11 else 0
        if axis not in sizes or not 0 < n < 2**31:  # JAX counts in 32 bits
            axes = ", ".join(sizes)
            parser.error(
                f"{word:.40} is not AXIS=N with an axis of {axes} and N from 1 to 2^31 - 1"
            )
        sizes[axis] = n
    try:
        found = plan(case, sizes, measure=jax.default_backend() == "gpu")
        if given.picture:
            given.picture.write_text(found.picture())
    except (ValueError, OSError) as e:  # the op rejects these sizes; the file cannot be written
        print("error:", *str(e).split(), file=sys.stderr)
        return 2
    try:
        print(found)
        if given.picture:
            print(f"\nwrote {given.picture}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has exited, as in `| head`; Python flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
