"""Cases of tests that a plain `pytest` leaves out, and those that it draws.

`pytest -m slow` runs what it leaves out, `-m ""` runs all.
"""

import os
import shutil
import time

import pytest


def slow(*values):
    """A case that repeats at other shapes or models what quicker cases show."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_interpreted(*values):
    """A case that a GPU runs at once, and that repeats for the interpreter what others show."""
    return pytest.param(*values) if shutil.which("nvidia-smi") else slow(*values)


def once_an_op(cases) -> list:
    """Cases of the benchmark: all but the first of each op are slow."""
    first = {case.op: case for case in reversed(cases)}
    return [case if case is first[case.op] else slow(case) for case in cases]


# Of a test in which saves fail: Orbax's thread also prints its failure on standard error, and
# abandons its coroutines.
failing_saves = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:coroutine:RuntimeWarning",
)


def random_seed() -> int:
    """The seed of the random calls: another one every day."""
    return int(os.environ.get("RANDOM_SEED", time.strftime("%Y%m%d")))
