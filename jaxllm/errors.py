"""The exceptions that a command reports as one line and an exit status; Orbax's errors in short."""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator

_DETAILS = ". See full TensorStore details"  # a page of them follows


class InputError(ValueError):
    """Bad input, such as a key, a value or a file.

    The message is one line with the value, the limit and the fix.  A command prints it as
    `error: ...` and exits with status 2.
    """


class RunError(RuntimeError):
    """A run cannot continue: the loss is not finite, memory ran out; the exit status is 1."""


class Corruption(RunError):
    """Two computations of a step differ, or two replicas of an array (train/verify.py)."""


@contextlib.contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Turns an out-of-memory error into a RunError that ends with `advice`."""
    try:
        yield
    except MemoryError as e:
        raise RunError(f"this machine is out of memory; {advice}") from e
    except Exception as e:
        if not out_of_memory(e):
            raise
        raise RunError(f"the device is out of memory; {advice}") from e


def out_of_memory(e: Exception) -> bool:
    """Whether a device ran out of memory, which XLA reports as a RuntimeError.

    TensorStore reports a full disk with the same word, but as a ValueError, and our own RunError
    may quote it.
    """
    xla = isinstance(e, RuntimeError) and not isinstance(e, RunError)
    return xla and "RESOURCE_EXHAUSTED" in str(e)


def in_short(e: Exception) -> str:
    """An exception of Orbax or TensorStore in a line, without TensorStore's details."""
    if "No space left on device" in (words := " ".join(str(e).split())):
        return "the disk is full: free some space"
    return f"{type(e).__name__}: {words.partition(_DETAILS)[0][:200]}"


def quiet_orbax() -> None:
    """Hides what Orbax logs: every file that it touches, and failures, with tracebacks."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, functools.partial):
        sys.unraisablehook = functools.partial(_unraisable, sys.unraisablehook)


def _unraisable(before, unraisable) -> None:
    """Hides the tracebacks that Orbax's tasks print after a failure, one for each array."""
    said = str(unraisable.exc_value)
    if said != "Event loop is closed" and _DETAILS not in said:
        before(unraisable)


def error_line(message: str) -> None:
    """Prints `error: ...` on standard error, as one line."""
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
