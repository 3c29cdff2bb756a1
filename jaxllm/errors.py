"""The two exceptions that a command turns into one line and an exit status."""

import contextlib
import sys
from collections.abc import Iterator


class InputError(ValueError):
    """Bad input: a key, a value, a file.  One line that names the value, the limit and the fix.

    It is printed as `error: ...`, and the command exits with status 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on (a loss that is not finite, memory that ran out); exit status 1."""


@contextlib.contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Turns a device that is out of memory into a RunError that says what helps."""
    try:
        yield
    except MemoryError as e:
        raise RunError(f"this machine is out of memory; {advice}") from e
    except Exception as e:
        if not out_of_memory(e):
            raise
        raise RunError(f"the device is out of memory; {advice}") from e


def out_of_memory(e: Exception) -> bool:
    """Whether it was a device that had no room: XLA's error is a RuntimeError.

    TensorStore tells a full disk in the same word, but as a ValueError, and our own RunError may
    quote it.
    """
    xla = isinstance(e, RuntimeError) and not isinstance(e, RunError)
    return xla and "RESOURCE_EXHAUSTED" in str(e)


def error_line(message: str) -> None:
    """Prints `error: ...` on standard error, as one line."""
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
