"""Cases of tests that a plain `pytest` leaves out: `pytest -m slow` runs them, `-m ""` runs all."""

import pytest


def slow(*values):
    """A case that repeats at other shapes or models what quicker cases show."""
    return pytest.param(*values, marks=pytest.mark.slow)
