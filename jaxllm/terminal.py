"""Standard streams that never end a run, Ctrl-C before anything slow starts, progress bars."""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

PAUSE = 5.0  # seconds between lines where there is no bar


def counted(number: int, what: str) -> str:
    """A number with the name of what it counts, in the singular for one."""
    return f"{number:,} {what}{'s' * (number != 1)}"


class _Lossy(io.FileIO):
    """A stream that accepts all text; text that a full disk or closed terminal refuses is lost."""

    def write(self, content):
        with contextlib.suppress(OSError):
            if (written := super().write(content)) is not None:
                return written
        return len(content)


def lossy_stream(number: int, encoding: str) -> io.TextIOWrapper:
    """A text stream to a file descriptor that never raises; it escapes what `encoding` lacks."""
    raw = io.BufferedWriter(_Lossy(number, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)


def protect_streams(lossy: bool) -> None:
    """Makes printing safe, whatever standard output and standard error are.

    A character that the encoding lacks is escaped; a closed stream becomes /dev/null, or the next
    file would get its descriptor.  Standard error never raises; undecodable input is kept escaped.
    lossy: standard output never raises either: a run outlives its reader and its terminal.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # open takes the lowest free number
            os.open(os.devnull, os.O_RDWR)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream, errors = getattr(sys, name), "backslashreplace" if number else "surrogateescape"
        if stream is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", errors=errors))
        elif stream is not getattr(sys, f"__{name}__"):  # of a test
            continue
        elif name == "stderr" or (lossy and number):
            setattr(sys, name, lossy_stream(number, stream.encoding))
        else:
            stream.reconfigure(errors=errors)


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once, as it ends a program that does not handle it.

    KeyboardInterrupt would wait for XLA's compiler, end imports in a page of traceback, or be
    swallowed by a callback of JAX.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or a test's
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interactive(console) -> bool:
    """Whether a rich console can show a bar; with FORCE_COLOR rich believes that a pipe can."""
    return console.is_interactive and console.file.isatty() and console.width > 0


@contextlib.contextmanager
def progress_bar(what: str, total: int, size: bool = True) -> Iterator[Callable[[int], None]]:
    """Shows progress on standard error; yields a function that sets how much of `total` is done.

    size: total is in bytes.
    """
    from rich import progress
    from rich.console import Console

    if is_interactive(console := Console(stderr=True)):
        sizes = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        columns = [progress.TextColumn("{task.description}"), progress.BarColumn()]
        columns += sizes if size else [progress.MofNCompleteColumn()]
        columns += [progress.TimeRemainingColumn()]
        with progress.Progress(*columns, console=console, transient=True) as bar:
            console.show_cursor()  # rich hides it, and Ctrl-C would leave it hidden
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=min(done, total))
        return
    print(what, file=sys.stderr, flush=True)
    printed = time.monotonic()

    def line(done: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= PAUSE:
            printed = time.monotonic()
            print(f"{what}: {min(done / max(total, 1), 1):.0%}", file=sys.stderr, flush=True)

    yield line
