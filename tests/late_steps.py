"""Steps whose metrics are read one step late, as train.py reads them."""

import time
from collections.abc import Iterable


def take(program, state, batches: Iterable):
    """A step for each batch: (state, the metrics of each, seconds between two readings).

    The last metrics are read after all, so there is one time fewer than steps.
    """
    metrics, seconds, running = [], [], None
    clock = time.perf_counter()
    for batch in batches:
        state, new = program(state, batch)
        if running is not None:
            metrics.append({key: float(value) for key, value in running.items()})
            seconds.append(time.perf_counter() - clock)
            clock = time.perf_counter()
        running = new
    metrics.append({key: float(value) for key, value in running.items()})
    return state, metrics, seconds
