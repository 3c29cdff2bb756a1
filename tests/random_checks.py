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
  * a second run has the same bits, except on cuDNN; on a GPU over memory full of NaN, then of 1e30,
  * in every fourth call, a NaN in one element is in all that depends on it (random_nan.py).

On a CPU kernels are interpreted, on a GPU they run natively.  --json and --run_only are for
gpu_random.py.
"""

# ruff: noqa: E402 (XLA's flags come before JAX)

import contextlib
import json
import os
import time
import traceback
import warnings
from math import inf, nan  # noqa: F401 (for --line)
from pathlib import Path
from typing import NamedTuple

# Without wrong fusions on the CPU (jaxllm/train/process.py); JAX may start at an import.
RIGHT = "--xla_cpu_experimental_ynn_fusion_type="
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{RIGHT} {os.environ.get('XLA_FLAGS', '')}".strip()

import jax
import jax.numpy as jnp
import numpy as np
import random_draws
import random_nan
from random_calls import A, Call  # noqa: F401 (for --line)
from random_forms import Arguments, form_of, in_float64, on_cpu, truths
from random_memory import actual, results
from random_ratios import (
    against_reference,
    against_truth,
    cancelled,
    in_range,
    named,
    of_leaf,
    spacing,
)
from scripts import Parser, run

import pallas_kernels
from pallas_kernels import Packed, RopeScaling, dispatch  # noqa: F401 (for --line)

PACKAGE = Path(pallas_kernels.__file__).parent
LOST = ("CUDA_ERROR", "ILLEGAL_ADDRESS", "INTERNAL: ", "device-side", "CUDNN_STATUS_EXECUTION")


class Verdict(NamedTuple):
    """right, refused (with the reason), or wrong (with what is wrong); and the form that ran."""

    outcome: str
    form: str
    why: str = ""


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
    main = max((given.leaves[i].dtype for i in given.floats), key=lambda d: jnp.finfo(d).eps)
    coarse = spacing(call, main)
    truth, errors = truths(call, given, cotangents, {coarse, float(np.finfo(np.float32).eps)})
    exact = in_float64(call, given, cotangents)
    names = named(given, reference, cotangents)
    dtypes = [x.dtype for x in xla]
    own = [errors[of_leaf(call, coarse)][i] for i in range(len(names))]
    # Where one gradient leaves its dtype's range, another may be the difference of such numbers.
    fit = all(in_range(truth[i], dtypes[i]) for i, name in enumerate(names) if name[0] == "d")
    for i, name in enumerate(names):
        wide_form = None if exact is None else exact[i]
        is_result = name.startswith("y")
        finite = given.finite and (is_result or fit)
        why = against_truth(xla[i], wide_form, truth[i], own[i], finite, is_result)
        if why:
            return Verdict("wrong", "xla", f"{name}: {why}")
    lost = cancelled(given, names, truth, coarse)
    dispatch.reset()
    try:
        form, (first, second) = actual(call, given, cotangents)
    except Exception as e:
        if any(word in str(e) for word in LOST):
            raise
        return refused(e)._replace(form=call.implementation or "default")
    # cuDNN, for other GPUs than Hopper, adds its gradients in any order.
    same_bits = all(decision.runs != "cudnn" for decision in dispatch.decisions())
    for i, name in enumerate(names):
        if (first[i].shape, first[i].dtype) != (truth[i].shape, dtypes[i]):
            why = f"is {first[i].dtype} {first[i].shape}, not {dtypes[i]} {truth[i].shape}"
        elif same_bits and first[i].tobytes() != second[i].tobytes():
            why = f"two runs differ in {int((first[i] != second[i]).sum())} elements"
        else:
            # An infinity in x makes at least its row NaN, and on XLA all rows.
            by_row = call.arrays.get("row_norm") is not None
            free = by_row or not (fit or name.startswith("y"))
            why = against_reference(first[i], xla[i], truth[i], own[i] + lost[i], free)
        if why:
            return Verdict("wrong", form, f"{name}: {why}")
    if call.seed[1] % 4 == 0 and (why := random_nan.lost(call, given, cotangents, names)):
        return Verdict("wrong", form, why)
    return Verdict("right", form)


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
    parser = Parser(__doc__)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--call", type=int, nargs="+", default=range(len(random_draws.ORDER)))
    parser.add_argument("--line", help="a call as it was printed")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per message")
    parser.add_argument("--run_only", action="store_true", help="compare nothing")
    a = parser.parse_args(argv)
    calls = {number: random_draws.draw(a.seed, number) for number in a.call}
    if a.line:
        try:
            calls = {0: eval(a.line)}  # the user's own line
        except Exception as error:
            parser.error(f"--line {a.line} is no call as it was printed: {error}")
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
    run(main)
