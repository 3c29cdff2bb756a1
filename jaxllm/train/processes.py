"""Several processes that train one model: starts, joins, watches and stops them.

The command forks: its own process only watches, its children train.  A training process cannot
report a dead peer in one line, because JAX's coordination service then ends it with abort() and a
long log; the process that watches replaces this log by the line.
"""

import argparse
import json
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from jaxllm.config.command_line import exit_status
from jaxllm.errors import InputError, error_line
from jaxllm.terminal import lossy_stream
from jaxllm.train.process import STOPPING, handle_signals

HEARTBEAT = 30  # seconds without a sign of life after which JAX counts a process as dead
QUIET = 2.0  # seconds without output after which standard error is passed on
WAIT = 5.0  # seconds after which a process says for whom it waits
GRACE = 3.0  # seconds that the others get to end by themselves after one has failed
STOPPED = 128 + signal.SIGTERM  # exit status of processes that stopped together
ADVICE = "the run ends: continue with --resume"
# What Gloo and JAX's preemption service say about themselves.
NOISE = re.compile(r"^(\[Gloo\] |.*\bpreemption_\w+\.cc:).*\n", re.M)
# Kinds of errors, as XLA and gRPC name them, that a peer's death may have caused.
OF_PEERS = re.compile(
    r"\b(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
)
FORK = multiprocessing.get_context("fork")
FATAL = b"the JAX distributed service detected fatal errors"  # in JAX's log before it aborts


def places(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What jax.distributed.initialize takes in each process that `jaxllm train` runs.

    Empty: this process trains by itself.  {}: JAX finds the others in the cluster's environment.
    """
    count = options.processes
    place = partial(dict, num_processes=count, cluster_detection_method="deactivate")
    if options.process is not None:
        return [place(process_id=options.process, coordinator_address=options.coordinator)]
    if count is not None and count > 1:
        with socket.create_server(("localhost", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        both = dict(coordinator_address=address, coordinator_bind_address=address)
        return [place(process_id=i, local_device_ids=i, **both) for i in range(count)]
    return [{}] if options.config.mesh.distributed else []


@dataclass
class _Child:
    """A training process, as seen by the one that watches."""

    process: multiprocessing.process.BaseProcess
    errors: int  # the reading end of its standard error
    held: bytes = b""  # what it wrote there and we have not yet passed on
    status: int | None = None  # exit status, or minus the signal that killed it; None: it runs
    ended: bool = False  # the watching process killed it


def watch(where: list[dict], train: Callable[[], int]) -> int:
    """Forks a process for each place, which joins its peers and calls `train`.

    Returns their exit status.  If one fails, ends the others and prints one line that names it.
    """
    with tempfile.TemporaryFile() as names:
        children = [_fork(place, train, names) for place in where]
        received: list[int] = []

        def stop(number, _):
            received.append(number)
            for child in [c for c in children if c.status is None]:
                child.ended = len(received) > 1
                (child.process.kill if child.ended else child.process.terminate)()

        with handle_signals(stop):
            _wait(children)
            for child in children:  # our own signal kills a process that has not joined its peers
                child.ended |= bool(received) and child.status == -signal.SIGTERM
            status = _report(children, names)
    return 128 + received[0] if received and status != 0 else status


def _fork(place: dict, train: Callable[[], int], names: IO) -> _Child:
    errors, writer = os.pipe()
    process = FORK.Process(target=_train_and_exit, args=(place, train, names, writer))
    process.start()
    os.close(writer)
    return _Child(process, errors)


def _wait(children: list[_Child]) -> None:
    """Waits until all processes have exited; passes on what they write to standard error.

    The text is held until a process is quiet, so that its last words can be replaced.  After FATAL
    it is held until the process has ended, which may take longer on a busy machine.
    """
    written, failed = time.monotonic(), None
    while running := [c for c in children if c.status is None]:
        ready, _, _ = select.select([c.errors for c in running], [], [], 0.2)
        for child in running:
            if child.errors in ready:
                child.held += os.read(child.errors, 1 << 16)
                written = time.monotonic()
            child.status = child.process.exitcode
            if child.status is not None:
                _read_rest(child)
            if child.status not in (None, 0, STOPPED):
                failed = failed or time.monotonic()
        now = time.monotonic()
        if failed is None and now - written > QUIET:
            _pass_on([c for c in children if FATAL not in c.held])
        if failed is not None and now - failed > GRACE:
            for child in [c for c in running if c.status is None and not c.ended]:
                child.process.kill()
                child.ended = True


def _read_rest(child: _Child) -> None:
    """Reads the rest of what a process wrote before it exited."""
    os.set_blocking(child.errors, False)  # a grandchild may keep it open
    with open(child.errors, "rb", buffering=0) as pipe:
        child.held += pipe.read() or b""


def _pass_on(children: list[_Child]) -> None:
    """Prints the text that was held back, equal texts of several processes once."""
    held = (NOISE.sub("", c.held.decode(errors="replace")) for c in children)
    for text in dict.fromkeys(text for text in held if text.strip()):
        sys.stderr.write(text)
    sys.stderr.flush()
    for child in children:
        child.held = b""


def _report(children: list[_Child], names: IO) -> int:
    """Says in one line which process died, if one did; returns the joint exit status."""
    names.seek(0)
    peers = json.loads(names.read() or "[]")
    culprits = [c for c in children if not c.ended and FATAL not in c.held]
    if killed := [c for c in culprits if (c.status or 0) < 0]:
        _pass_on(killed)
        first = killed[0]
        cause = signal.Signals(-(first.status or 0)).name
        memory = " (is the machine out of memory?)" if cause == "SIGKILL" else ""
        place = f"(pid {first.process.pid} on {socket.gethostname()})"
        name = next((peer for peer in peers if peer.endswith(place)), f"process {place}")
        error_line(f"{name} was killed by {cause}{memory}; {ADVICE}")
        return 1
    if failed := [c for c in culprits if c.status not in (0, STOPPED)]:
        _pass_on(failed)
        return failed[0].status or 1
    if aborted := [c for c in children if FATAL in c.held]:
        dead = _dead_peer(aborted[0].held.decode(errors="replace"), peers)
        if not peers:
            error_line("the processes did not meet; start all of them with one --coordinator")
        elif dead is None:
            _pass_on(aborted)
        else:
            error_line(f"{dead} died or lost its connection; {ADVICE}")
        return 1
    _pass_on(children)
    return max(1 if c.ended else c.status or 0 for c in children)


def _dead_peer(log: str, peers: list[str]) -> str | None:
    """Names the dead process from the log of JAX's coordination service."""
    silent = re.search(r"stopped sending heartbeats\):\s+(\d+)", log)
    if silent and int(silent[1]) < len(peers):
        return peers[int(silent[1])]
    return peers[0] if peers and "Failed to send RPC to coordination service" in log else None


def _train_and_exit(place: dict, train: Callable[[], int], names: IO, errors: int) -> None:
    """Runs in a child, with `errors` as standard error: joins the peers, trains and exits."""
    # From here on only Gloo writes to descriptor 1, in partial lines, which _pass_on drops.
    sys.stdout = lossy_stream(os.dup(1), getattr(sys.stdout, "encoding", "utf-8"))
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    # The process that watches turns all signals into one SIGTERM.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # join() returns when the watching process dies; then this process exits, too.
    # pyrefly: ignore[missing-attribute]
    end = lambda: (multiprocessing.parent_process().join(), os._exit(1))
    threading.Thread(target=end, daemon=True).start()

    def run() -> int:
        try:
            _join(place, names)
            return train()
        except Exception as e:
            if OF_PEERS.search(str(e)):  # if a peer is dead, JAX ends this process meanwhile
                time.sleep(HEARTBEAT + 15)
            raise

    status = 1
    try:
        if (status := exit_status(run)) in (0, STOPPED):
            import jax

            jax.distributed.shutdown()  # waits for the others
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # Python's own exit would wait for processes that fail


def _join(place: dict, names: IO) -> None:
    """Joins the peers, and writes their names to the file `names`.

    Raises InputError if there are none.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    index = place.get("process_id")
    missed = f"process 0 at {place['coordinator_address']}" if index else "the other processes"
    text = f"process {index} waits for {missed}, up to five minutes"
    waits = threading.Timer(WAIT, print, (text,), {"file": sys.stderr, "flush": True})
    waits.daemon = True
    if index is not None:
        waits.start()
    try:
        jax.distributed.initialize(**place, heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as e:
        raise InputError(
            f"mesh.distributed=true finds no other processes ({e}); start the run with Slurm or"
            " another cluster that JAX supports, or with --processes"
        ) from e
    finally:
        waits.cancel()
    try:
        jax.local_devices()
    except RuntimeError as e:
        raise InputError(
            f"process {jax.process_index()} of {jax.process_count()} cannot use its devices ({e});"
            " start at most one process per GPU"
        ) from e
    if jax.process_index() != 0:
        sys.stdout = open(os.devnull, "w")  # only the first one prints
    name = f"process {jax.process_index()} (pid {os.getpid()} on {socket.gethostname()})".encode()
    rows = multihost_utils.process_allgather(np.frombuffer(name[:128].ljust(128), np.uint8))
    peers = [bytes(row).decode(errors="replace").strip() for row in np.reshape(rows, (-1, 128))]
    os.pwrite(names.fileno(), json.dumps(peers).encode(), 0)  # processes may share the file


def stops_after(step: int) -> int | None:
    """SIGTERM if one process has received it and all are to stop after this step, else None.

    JAX's preemption service, which `jax.distributed` starts, handles the signal.  Call this after
    every step.
    """
    from jax.experimental import multihost_utils

    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None
