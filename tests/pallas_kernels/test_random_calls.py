"""Random calls of every op, interpreted: the day's calls, and what finds the next fault.

A failure prints its call; `python tests/random_checks.py --seed N --call K` repeats it.  The seed
is the date, or RANDOM_SEED; RANDOM_CALLS is the number of calls.  On a GPU `.ci/gpu` runs hundreds.
"""

import dataclasses
import os
import re
import time
from math import inf, nan  # noqa: F401 (for eval)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_calls
import random_checks
import random_truth
from cases import random_seed
from kernel_checks import NO_KERNEL
from random_calls import A, Call
from random_draws import DRAWS, ORDER, draw

import pallas_kernels
from pallas_kernels import Packed, RopeScaling  # noqa: F401 (for eval)

SMALL = 60_000  # elements of a call that an interpreter runs in about two seconds
SECONDS = 10  # of the processor, so that busy neighbors leave out no call


def small_call(seed: int, place: int) -> Call:
    """The first small call of the op that has this place in ORDER, seen as a ring."""
    calls = (draw(seed, place % len(ORDER) + i * len(ORDER)) for i in range(100))
    return next(call for call in calls if call.cost < SMALL)


def test_the_calls_of_the_day():
    """One of each op, and some more; as many as there is time for, from another op every day."""
    seed, clock, wrong = random_seed(), time.process_time(), []
    for place in range(seed, seed + int(os.environ.get("RANDOM_CALLS", len(ORDER)))):
        if time.process_time() - clock > SECONDS:
            break
        call = small_call(seed, place)
        if call.inside == "vmap":  # XLA's form may then be wrong on a CPU (random_checks.RIGHT)
            call = dataclasses.replace(call, inside=None)
        verdict = random_checks.judge(call)
        print(f"{call.seed}: {verdict}")
        if verdict.outcome == "wrong":
            where = "--seed {} --call {}".format(*call.seed)
            wrong.append(f"{where}: {verdict.form} {verdict.why}\n    {call}")
    assert not wrong, "\n".join(wrong)


def test_every_op_is_drawn():
    assert set(DRAWS) == set(pallas_kernels.__all__) - NO_KERNEL
    missing = {op for op in DRAWS if not hasattr(random_truth, op)}  # the day's calls may skip it
    assert not missing, f"tests/random_truth.py has no formula of {missing}"


def test_a_line_is_the_call():
    for number in range(3 * len(ORDER)):
        call = draw(7, number)
        assert draw(7, number) == call
        assert eval(str(call)) == call
    made, again = call.make(), eval(str(call)).make()
    jax.tree.map(np.testing.assert_array_equal, made, again)


def test_the_rules_reach_the_corners():
    """Among some hundred calls there is every dtype, group of heads, format and kind of value."""
    calls = [draw(7, number) for number in range(80 * len(ORDER))]
    arrays = [a for call in calls for a in jax.tree.leaves(call.arrays)]
    assert {a.dtype for a in arrays} >= {*random_calls.INTEGERS, "bfloat16", "float16", "float32"}
    assert {n for a in arrays for n in a.shape} >= {0, 1, 2, 3, 5, 7, 11, 13, 63, 64, 65, 127, 129}
    heads = {
        call.arrays["q"].shape[2] // call.arrays["k"].shape[2]
        for call in calls
        if call.op == "attention" and isinstance(call.arrays["q"], A)
    }
    assert heads == {1, 2, 3, 4, 5, 6, 7, 8}
    packed = {a.more[:4] for a in arrays if a.values == "quantized"}
    assert {more[0] for more in packed} == {8, 4, 2, 1}
    assert {more[1] for more in packed} == {None, 32, 64, 128}
    assert {more[3] for more in packed} == {"int", "fp8", "2:4"}
    assert {a.values for a in arrays} == set(random_calls._VALUES)
    for setting in ("x64", "strict", "general"):
        assert {getattr(call, setting) for call in calls} == {True, False}
    assert {call.inside for call in calls} == {None, "vmap", "map", "checkpoint"}
    queries = [call.arrays["q"] for call in calls if call.op == "attention"]
    assert max(q.shape[0] * q.shape[2] for q in queries if isinstance(q, A)) > 132  # processors
    keys = {call.arrays["k"].shape[1] for call in calls if call.op == "decode_attention"}
    assert {8, 1032} <= keys
    columns = {call.arrays["logits"].shape[-1] for call in calls if call.op == "cross_entropy"}
    assert {12416, 57472} <= columns
    windows = {call.options.get("window") for call in calls if call.op == "attention"}
    assert {None, 1, 2, 64, 1000} <= windows


def test_values_are_what_their_kind_says():
    make = lambda *more, shape=(50,), dtype="uint8": A(shape, dtype, *more).make((0,))
    assert set(make("ids", (0, 3))) == {0, 1, 2}
    assert make("ids", (0, 70_000)).max() <= 255
    assert -100 not in make("ids", (0, 3, -100)).astype(int)
    assert -100 in make("ids", (0, 3, -100), dtype="int8")
    wide = A((4, 90), "int64", "segments", (2, 1, 1 + 2**32)).make((0,))
    assert set(wide.ravel()) == {1, 1 + 2**32}
    assert (np.diff(wide, axis=1) < 0).any()  # an id comes back
    assert np.isinf(make("some", (np.inf,), dtype="float32")).any()
    assert np.abs(make("offset", dtype="float32") - 1000).max() < 10


X = A((3, 65), "float32")
NORM = Call("rms_norm", (1, 2), {"x": X, "weight": A((65,), "float32")}, {"eps": 1e-5})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda y: y * 1.001, r"y: max error \S+ is \S+ x XLA's"),
        (lambda y: y.at[1, 2].set(jnp.nan), r"y: 1 elements, first \(1, 2\): nan, XLA has"),
        (lambda y: y.astype(jnp.bfloat16), r"ValueError"),  # from jax.vjp
        (lambda y: 1 // 0, r"ZeroDivisionError"),
    ],
)
def test_a_wrong_kernel_is_found(monkeypatch, change, why):
    op = pallas_kernels.rms_norm

    def wrong(*args, implementation=None, **options):
        y = op(*args, implementation="xla", **options)
        return y if implementation == "xla" else change(y)

    monkeypatch.setattr(pallas_kernels, "rms_norm", wrong)
    verdict = random_checks.judge(dataclasses.replace(NORM, implementation=None))
    assert (verdict.outcome, verdict.form) == ("wrong", "default")
    assert re.match(why, verdict.why)


def test_a_kernel_that_hides_a_nan_is_found(monkeypatch):
    op, call = pallas_kernels.rms_norm, dataclasses.replace(NORM, seed=(1, 4), implementation=None)
    assert random_checks.judge(call).outcome == "right"

    def wrong(*args, implementation=None, **options):
        y = op(*args, implementation="xla", **options)
        return y if implementation == "xla" else jnp.where(jnp.isnan(y), 0, y)

    monkeypatch.setattr(pallas_kernels, "rms_norm", wrong)
    verdict = random_checks.judge(call)
    assert verdict.outcome == "wrong"
    assert re.match(r"y: \d+ of \d+ elements hide the NaN in (x|weight)\[", verdict.why)


@pytest.mark.parametrize("inside", ["vmap", "map", "checkpoint"])
def test_a_transformation_has_the_results_of_the_call(inside):
    arrays = NORM.make()
    run = lambda inside: random_checks.form_of(dataclasses.replace(NORM, inside=inside), "xla")
    np.testing.assert_array_equal(run(inside)(**arrays), run(None)(**arrays))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda y, x: y * (1 + 1e-6), "y: the XLA form in float64 is off by"),
        (lambda y, x: y + jnp.where(x.dtype == jnp.float32, jnp.nan, 0), "y: the XLA form has 195"),
    ],
)
def test_a_wrong_reference_is_found(monkeypatch, change, why):
    op = pallas_kernels.rms_norm
    wrong = lambda x, *args, **options: change(op(x, *args, **options), x)
    monkeypatch.setattr(pallas_kernels, "rms_norm", wrong)
    verdict = random_checks.judge(dataclasses.replace(NORM, implementation=None))
    assert (verdict.outcome, verdict.form) == ("wrong", "xla")
    assert verdict.why.startswith(why)


def test_a_refusal_has_one_line():
    call = dataclasses.replace(NORM, arrays={"x": X, "weight": A((64,), "float32")})
    assert random_checks.judge(call).outcome == "refused"


def test_a_kernel_may_not_refuse_by_an_error_of_jax(monkeypatch):
    op = pallas_kernels.rms_norm

    def wrong(*args, implementation=None, **options):
        if implementation != "xla":
            raise ValueError("Only interpret mode is supported on CPU backend.")
        return op(*args, implementation=implementation, **options)

    monkeypatch.setattr(pallas_kernels, "rms_norm", wrong)
    assert random_checks.judge(NORM).outcome == "wrong"


def test_the_command_repeats_a_line(capsys):
    assert random_checks.main(["--line", str(dataclasses.replace(NORM, implementation=None))]) == 0
    assert "right default" in capsys.readouterr().out
    assert random_checks.main(["--seed", "1", "--call", "2", "--run_only", "--json"]) == 0
    begin, end = capsys.readouterr().out.splitlines()
    assert '"begin": 2' in begin
    assert '"outcome": "right"' in end
