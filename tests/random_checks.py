"""Runs random calls of the ops and compares every result and gradient with float64.

    python tests/random_checks.py --seed 20261125                 the first calls of this seed
    python tests/random_checks.py --seed 20261125 --call 7 31     these calls
    python tests/random_checks.py --line "Call('gelu', ...)"      a call as it was printed

A call is right if it raises one line of ValueError or NotImplementedError, or if

  * the XLA form in float64 is the truth (random_truth.py), and is finite wherever the truth is,
  * NaN and infinities are where the XLA form has them,
  * the error is at most RATIO times that of the XLA form in the same dtype, in the maximum and in
    the root mean square.  Few elements may be right by chance, so the error of the XLA form counts
    as at least that of a truth whose arguments are rounded once more, plus one rounding,
  * a second run has the same bits; on a GPU over memory full of NaN, then of 1e30.

On a CPU kernels are interpreted, on a GPU they run natively.  --json and --run_only are for
gpu_random.py.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import time
import traceback
import warnings
from math import inf, nan  # noqa: F401 (for --line)
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import random_draws
import random_truth
from kernel_checks import FLOOR, ON_GPU, RATIO, kernels_run_here
from random_calls import A, Call  # noqa: F401 (for --line)

import pallas_kernels
from pallas_kernels import Packed, RopeScaling  # noqa: F401 (for --line)

PACKAGE = Path(pallas_kernels.__file__).parent
FEW = 16  # elements
NO_GRADIENT = ("decode_attention", "vlstm_step", "row_linear")
CONSTANTS = ("row_norm", "weight of quantized_linear")
# Ops that compute in float32 whatever their dtype, and round once, at the end.
IN_FLOAT32 = (*("encoder", "rope", "swiglu", "cross_entropy", "vlstm_step"),)
TF32 = 2.0**-10  # relative spacing of what XLA multiplies on a GPU in place of float32
LOST = ("CUDA_ERROR", "ILLEGAL_ADDRESS", "INTERNAL: ", "device-side", "CUDNN_STATUS_EXECUTION")


class Verdict(NamedTuple):
    """right, refused (with the reason), or wrong (with what is wrong); and the form that ran."""

    outcome: str
    form: str
    why: str = ""


# ---- programs -----------------------------------------------------------------------------------


def form_of(call: Call, implementation: str | None, wide: bool = False):
    """The op as a function of the call's arrays, with comparable results."""
    options = dict(call.options)
    if wide and "dtype" in options:
        options["dtype"] = jnp.float64
    op = functools.partial(getattr(pallas_kernels, call.op), implementation=implementation)

    def run(**arrays):
        # Without a default.
        needed = {"encoder": ("wpe",), "rope": ("k",), "vlstm": ("k", "v")}.get(call.op, ())
        given = {k: a for k, a in arrays.items() if a is not None or k in needed}
        y = op(**given, **options)
        if call.op == "vlstm_step" or options.get("return_state"):
            return y[0], random_truth.true_state(y[1])
        y = y.array if isinstance(y, Packed) else y
        return jax.tree.map(lambda x: x.astype(jnp.float32) if "float8" in str(x.dtype) else x, y)

    return run


def truth_of(call: Call):
    def run(**arrays):
        given = {k: a for k, a in arrays.items() if a is not None}
        if call.op == "vlstm_step":
            given["state"] = random_truth.true_state(given["state"])
        return getattr(random_truth, call.op)(**given, **call.options)

    return run


class Arguments:
    """A call's arrays as a flat list, and which of them are floats, and have gradients."""

    def __init__(self, call: Call):
        self.call, arrays = call, call.make()
        paths, self.tree = jax.tree_util.tree_flatten_with_path(arrays)
        self.leaves = [np.asarray(leaf) for _, leaf in paths]
        self.names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
        floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in self.leaves]
        self.floats = [i for i, is_float in enumerate(floats) if is_float]
        constant = lambda name: name in CONSTANTS or f"{name} of {call.op}" in CONSTANTS
        self.differentiable = [
            i for i in self.floats
            if call.op not in NO_GRADIENT and not constant(paths[i][0][0].key)
        ]  # fmt: skip
        self.finite = all(np.isfinite(self.leaves[i].astype(np.float64)).all() for i in self.floats)

    def with_gradients(self, f):
        """run(leaves, cotangents) -> (results, {name: gradient})."""

        def run(leaves, cotangents):
            def of(d):
                full = list(leaves)
                for i, a in zip(self.differentiable, d, strict=True):
                    full[i] = a
                return f(**jax.tree.unflatten(self.tree, full))

            if not self.differentiable:
                return of([]), {}
            y, pull = jax.vjp(of, [leaves[i] for i in self.differentiable])
            names = [f"d{self.names[i]}" for i in self.differentiable]
            return y, dict(zip(names, pull(cotangents)[0], strict=True))

        return run

    def cotangents(self, f):
        """A random cotangent for each result of f."""
        with jax.enable_x64(self.call.x64):
            shapes = jax.eval_shape(lambda x: f(**jax.tree.unflatten(self.tree, x)), self.leaves)
        rng = np.random.default_rng((*self.call.seed, 1))
        return jax.tree.map(lambda o: rng.standard_normal(o.shape).astype(o.dtype), shapes)


# ---- the truth ----------------------------------------------------------------------------------


def wide(x):
    return np.asarray(x).astype(np.float64)


def truths(call: Call, given: Arguments, cotangents, spacings):
    """The truth, and for each of these relative spacings the errors of arguments so rounded."""
    f = given.with_gradients(truth_of(call))
    floats = [wide(given.leaves[i]) for i in given.floats]

    def run(floats, cotangents):
        leaves = list(given.leaves)  # integers stay NumPy arrays
        for i, a in zip(given.floats, floats, strict=True):
            leaves[i] = a
        return f(leaves, cotangents)

    rng = np.random.default_rng((*call.seed, 2))
    rounded = lambda eps: lambda x: x * (1 + eps * rng.uniform(-0.5, 0.5, x.shape))
    with jax.enable_x64(True), on_cpu(), np.errstate(all="ignore"):
        program = jax.jit(run)
        arguments = floats, jax.tree.map(wide, cotangents)
        truth = leaves_of(program(*arguments))
        errors = {eps: [np.zeros(t.shape) for t in truth] for eps in spacings}
        for eps in [*spacings] * 2:
            other = leaves_of(program(*jax.tree.map(rounded(eps), arguments)))
            errors[eps] = [
                np.maximum(e, np.abs(o - t))
                for e, o, t in zip(errors[eps], other, truth, strict=True)
            ]
    return truth, errors


def on_cpu():
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def leaves_of(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(jax.block_until_ready(tree))]


def in_float64(call: Call, given: Arguments, cotangents):
    """The XLA form with floats of float64, None if it rounds to 8 bits all the same."""
    if random_truth.is_rounded(call.make()):
        return None
    leaves = [wide(a) if i in given.floats else a for i, a in enumerate(given.leaves)]
    with jax.enable_x64(True), on_cpu():
        f = given.with_gradients(form_of(call, "xla", wide=True))
        return leaves_of(jax.jit(f)(leaves, jax.tree.map(wide, cotangents)))


# ---- the results --------------------------------------------------------------------------------


def fill_memory(value: int) -> None:
    """Fills free memory of the GPU with this 32-bit pattern, in blocks of many sizes."""
    sizes = [1 << 28, *(1 << bits for bits in range(26, 7, -1) for _ in range(6))]
    kept = [jnp.full(size // 4, value, jnp.uint32) for size in sizes]
    jax.block_until_ready(kept)


# With an allocation for each array, as under compute-sanitizer, nothing would stay poisoned.
POISONED = ON_GPU and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "platform"
POISONS = (0xFFFFFFFF, 0x7149F2CA)  # NaN in all formats; 1e30, in halves 1e30 and -8e30 (bfloat16)


def results(call: Call, implementation, given: Arguments, cotangents, poison: bool):
    """The leaves of two runs of one program."""
    f = given.with_gradients(form_of(call, implementation))
    runs = []
    with jax.enable_x64(call.x64):
        program = jax.jit(f).lower(given.leaves, cotangents).compile()
        for value in POISONS:
            if poison:
                fill_memory(value)
            arguments = jax.device_put((given.leaves, cotangents))
            runs.append(leaves_of(program(*arguments)))
            del arguments
    return runs


def actual(call: Call, given: Arguments, cotangents) -> tuple[str, Any]:
    """(form, runs) of the call; under "mosaic" what the kernel refuses runs by default."""
    if call.implementation == "mosaic":
        with contextlib.suppress(NotImplementedError):
            with kernels_run_here():
                return "mosaic", results(call, "mosaic", given, cotangents, POISONED)
    return "default", results(call, None, given, cotangents, POISONED)


def refused(e: Exception) -> Verdict:
    """An exception as a verdict: the op may refuse in one line, but JAX may not raise."""
    text = f"{type(e).__name__}: {e}"
    *_, (frame, _) = traceback.walk_tb(e.__traceback__)
    ours = Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
    if ours and isinstance(e, ValueError | NotImplementedError) and "\n" not in str(e):
        return Verdict("refused", "", text)
    return Verdict("wrong", "", text.partition("\n")[0][:300])


@contextlib.contextmanager
def undisturbed():
    """No warnings of overflows; JAX leaves its frames in tracebacks, so one sees who raised."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@undisturbed()
def judge(call: Call) -> Verdict:
    """Runs a call and compares it."""
    given, reference = Arguments(call), form_of(call, "xla")
    try:
        cotangents = given.cotangents(reference)
        with on_cpu():
            xla = results(call, "xla", given, cotangents, False)[0]
    except Exception as e:
        return refused(e)._replace(form="xla")
    main = min((given.leaves[i].dtype for i in given.floats), key=lambda d: d.itemsize)
    coarse = _spacing(call, main)
    truth, errors = truths(call, given, cotangents, {coarse, float(np.finfo(np.float32).eps)})
    exact = in_float64(call, given, cotangents)
    names = named(given, reference, cotangents)
    dtypes = [x.dtype for x in xla]
    own = [errors[_of_leaf(call, coarse)][i] for i in range(len(names))]
    for i, name in enumerate(names):
        wide_form = None if exact is None else exact[i]
        is_result = name.startswith("y")
        why = against_truth(xla[i], wide_form, truth[i], own[i], given.finite, is_result)
        if why:
            return Verdict("wrong", "xla", f"{name}: {why}")
    lost = _cancelled(given, names, truth, coarse)
    try:
        form, (first, second) = actual(call, given, cotangents)
    except Exception as e:
        if any(word in str(e) for word in LOST):
            raise
        return refused(e)._replace(form=call.implementation or "default")
    for i, name in enumerate(names):
        if (first[i].shape, first[i].dtype) != (truth[i].shape, dtypes[i]):
            why = f"is {first[i].dtype} {first[i].shape}, not {dtypes[i]} {truth[i].shape}"
        elif first[i].tobytes() != second[i].tobytes():
            why = f"two runs differ in {int((first[i] != second[i]).sum())} elements"
        else:
            why = against_reference(first[i], xla[i], truth[i], own[i] + lost[i])
        if why:
            return Verdict("wrong", form, f"{name}: {why}")
    return Verdict("right", form)


def _spacing(call: Call, dtype) -> float:
    """The relative spacing of numbers in which an op multiplies."""
    if call.op == "fp8_linear" or call.options.get("fp8") or "precision" in call.options:
        return 2.0**-2  # of e5m2
    return max(float(jnp.finfo(dtype).eps), TF32 if ON_GPU else 0)


def _of_leaf(call: Call, coarse: float) -> float:
    norm = call.op in ("layer_norm", "rms_norm") and call.arrays.get("residual") is None
    return float(np.finfo(np.float32).eps) if norm or call.op in IN_FLOAT32 else coarse


def _cancelled(given: Arguments, names, truth, coarse: float) -> list[float]:
    """Errors of results and gradients that are small differences of larger numbers."""
    call, lost = given.call, []
    most = lambda kind: max(
        (_largest(t[np.isfinite(t)]) for t, n in zip(truth, names, strict=True) if n[0] == kind),
        default=0.0,
    )
    largest = {kind: most(kind) for kind in "yd"}  # of results, of gradients
    for name in names:
        error = 4 * FLOOR * largest[name[0]] + float(np.finfo(np.float32).eps) * _logit(given)
        if call.op.startswith("vlstm") and name == "df":  # sums of q dq and of k dk
            error += coarse / 8 * max(largest.values())
        lost.append(error)
    return lost


def _logit(given: Arguments) -> float:
    """The largest logit of a loss, whose rounding is all that a label that is certain leaves."""
    call, arrays = given.call, dict(zip(given.names, given.leaves, strict=True))
    most = lambda name: np.abs(wide(arrays[name]))[np.isfinite(wide(arrays[name]))].max(initial=0)
    if call.op == "cross_entropy":
        return float(most("logits"))
    if call.op == "linear_cross_entropy":
        x, weight = most("x"), most("weight")
        logit = x * weight * arrays["x"].shape[-1] ** 0.5
        logit = min(call.options.get("softcap") or math.inf, logit)
        rows = 1 if call.options["reduction"] == "mean" else arrays["labels"].size
        return max(logit, 1) * rows * max(x, weight, 1)
    return 0.0


def named(given: Arguments, f, cotangents) -> list[str]:
    """A name for each result and gradient."""
    y = [f"y{jax.tree_util.keystr(p)}" for p, _ in jax.tree_util.tree_leaves_with_path(cotangents)]
    return y + sorted(f"d{given.names[i]}" for i in given.differentiable)


def _rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _largest(x) -> float:
    return float(np.abs(x).max(initial=0))


def against_truth(xla, exact, truth, error, finite: bool, is_result: bool) -> str | None:
    """What is wrong with the XLA form, or None."""
    inside = np.isfinite(truth) & (np.abs(truth) <= float(jnp.finfo(xla.dtype).max) / 2)
    if finite and (bad := inside & ~np.isfinite(wide(xla))).any():
        return f"the XLA form has {bad.sum()} elements that are not finite, where the truth is"
    if is_result and (bad := ~np.isfinite(truth) & np.isfinite(wide(xla))).any():
        return f"the XLA form has {bad.sum()} finite elements, where the truth is not finite"
    if exact is None:
        return None
    ok = inside & np.isfinite(exact)
    if finite and not np.array_equal(ok, inside):
        return "the XLA form in float64 is not finite, where the truth is"
    wrong, most = _largest((exact - truth)[ok]), _largest(truth[ok])
    allowed = 1e-7 * most + 1e-12 + 2 * _largest(error[ok & np.isfinite(error)]) + 1e-290
    return (
        None if wrong <= allowed else f"the XLA form in float64 is off by {wrong:.3g} of {most:.3g}"
    )


def against_reference(actual, xla, truth, error) -> str | None:
    """What is wrong with a result, or None."""
    info = jnp.finfo(xla.dtype)
    actual, xla = wide(actual), wide(xla)
    finite_truth = np.isfinite(truth)
    clear = ~finite_truth | (np.abs(truth) <= float(info.max) / 2)  # else rounding may overflow
    same = (
        (np.isfinite(actual) & np.isfinite(xla))
        | (actual == xla)
        | (np.isnan(actual) & np.isnan(xla))
    )
    if (bad := clear & ~same).any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        return f"{bad.sum()} elements, first {at}: {actual[at]:.4g}, XLA has {xla[at]:.4g}"
    ok = clear & finite_truth & np.isfinite(xla) & np.isfinite(actual)
    a, x, t = actual[ok], xla[ok], truth[ok]
    e = np.where(np.isfinite(error), error, 0)[ok]
    most = _largest(t)
    floor = (FLOOR + float(info.eps) / 2) * most + float(info.smallest_subnormal)
    floor += float(np.finfo(np.float32).tiny)
    for what, norm in (("max", _largest), ("rms", _rms)):
        mine, theirs = norm(a - t), max(norm(x - t), norm(e))
        # The reference's error in a few numbers may be small by luck.
        if mine > (RATIO if t.size >= FEW else 2 * RATIO) * theirs + floor:
            ratio = f"{mine / max(theirs, 1e-300):.3g} x XLA's {theirs:.3g}"
            return f"{what} error {mine:.3g} is {ratio} (largest value {most:.3g})"
    return None


# ---- the command --------------------------------------------------------------------------------


@undisturbed()
def run_only(call: Call) -> Verdict:
    """Runs a call without comparing it."""
    given = Arguments(call)
    try:
        cotangents = given.cotangents(form_of(call, "xla"))
        form, _ = actual(call, given, cotangents)
    except (ValueError, NotImplementedError) as e:
        return refused(e)
    return Verdict("right", form)


def report(say, number: int, call: Call, check) -> bool:
    """Checks a call and prints two messages; returns whether the process can go on."""
    say(begin=number, line=str(call))
    clock, lost = time.monotonic(), False
    try:
        verdict = check(call)
    except Exception as e:
        traceback.print_exc()
        text = f"{type(e).__name__}: {str(e).partition(chr(10))[0][:300]}"
        verdict, lost = Verdict("wrong", "", text), any(word in str(e) for word in LOST)
    say(end=number, **verdict._asdict(), seconds=round(time.monotonic() - clock, 2))
    return not lost


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--call", type=int, nargs="+", default=range(len(random_draws.ORDER)))
    parser.add_argument("--line", help="a call as it was printed")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per message")
    parser.add_argument("--run_only", action="store_true", help="compare nothing")
    a = parser.parse_args(argv)
    calls = {number: random_draws.draw(a.seed, number) for number in a.call}
    if a.line:
        calls = {0: eval(a.line)}  # the user's own line
    wrong = 0

    def say(**message):
        nonlocal wrong
        wrong += message.get("outcome") == "wrong"
        if a.json:
            print(json.dumps(message), flush=True)
        elif "begin" in message:
            print(f"{message['begin']}: {message['line']}", flush=True)
        else:
            print("    {outcome} {form} {why} ({seconds} s)".format(**message), flush=True)

    for number, call in calls.items():
        if not report(say, number, call, run_only if a.run_only else judge):
            break
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
