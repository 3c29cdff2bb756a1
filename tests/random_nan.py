"""Puts a NaN into one element of a random call: every result that depends on it must be NaN, too.

What depends on the element is what its value changes in the truth (random_truth.py).  Where XLA's
form loses the NaN as well, nothing is wrong.
"""

import copy

import jax
import numpy as np
from random_calls import Call
from random_forms import Arguments, leaves_of, on_cpu, true_program, wide
from random_memory import actual, results

OTHERS = 0.37, -0.91  # what is added to the element
LEAST = 1e-3  # of the largest value: what changes by less may be an underflow


def places(given: Arguments) -> list[int]:
    """The arrays that may get a NaN: floats of two bytes or more, and no bound or packed weight."""
    return [
        i for i in given.floats
        if given.leaves[i].size and given.leaves[i].dtype.itemsize > 1
        and given.names[i] != "row_norm" and not given.names[i].startswith("weight.")
    ]  # fmt: skip


def lost(call: Call, given: Arguments, cotangents, names: list[str]) -> str | None:
    """What is finite in spite of a NaN on which it depends, or None."""
    rng = np.random.default_rng((*call.seed, 3))
    if not (chosen := places(given)):
        return None
    which = chosen[rng.integers(len(chosen))]
    at = tuple(int(rng.integers(n)) for n in given.leaves[which].shape)
    dependent = _dependent(call, given, cotangents, which, at)
    damaged = copy.copy(given)
    damaged.leaves = [np.array(a) if i == which else a for i, a in enumerate(given.leaves)]
    damaged.leaves[which][at] = np.nan
    _, (mine, _) = actual(call, damaged, cotangents)
    hidden = lambda y: [
        int((d & np.isfinite(wide(x))).sum()) for d, x in zip(dependent, y, strict=True)
    ]
    if not any(found := hidden(mine)):
        return None
    with on_cpu():
        theirs = hidden(results(call, "xla", damaged, cotangents, False)[0])
    for name, own, xla, d in zip(names, found, theirs, dependent, strict=True):
        if own > xla:
            where = f"{given.names[which]}[{', '.join(map(str, at))}]"
            return f"{name}: {own} of {d.sum()} elements hide the NaN in {where} (XLA: {xla})"
    return None


def _dependent(call: Call, given: Arguments, cotangents, which: int, at) -> list[np.ndarray]:
    """For each result and gradient, whether its elements depend on this one."""
    floats = [wide(given.leaves[i]) for i in given.floats]
    place = given.floats.index(which)
    now = floats[place][at] if np.isfinite(floats[place][at]) else 0.0
    with jax.enable_x64(True), on_cpu(), np.errstate(all="ignore"):
        program, wide_cotangents = true_program(call, given), jax.tree.map(wide, cotangents)
        values = []
        for more in (0.0, *OTHERS):
            floats[place] = floats[place].copy()
            floats[place][at] = now + more
            values.append(leaves_of(program(floats, wide_cotangents)))
    before, *after = values
    least = [LEAST * np.abs(y[np.isfinite(y)]).max(initial=0) + 1e-9 for y in before]
    moves = lambda y, others, least: np.all([np.abs(y - other) > least for other in others], axis=0)
    return [moves(y, others, tiny) for y, tiny, *others in zip(before, least, *after, strict=True)]
