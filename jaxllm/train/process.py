"""Prepares the training process: XLA flags, signals, garbage collection."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator

_OFTEN = gc.get_threshold()
_SAME = 1.0  # seconds within which two signals count as one
# A closed terminal or ssh session sends SIGHUP, `sbatch --signal=USR1` SIGUSR1.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def handle_signals(handler: Callable) -> contextlib.ExitStack:
    """Handles the signals that stop a run; closing the result restores their handlers.

    SIGHUP stays ignored where it is, under nohup.
    """
    before = contextlib.ExitStack()
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for number in [s for s in STOPPING if not (ignored and s == signal.SIGHUP)]:
        before.callback(signal.signal, number, signal.signal(number, handler))
    return before


def set_xla_flags(deterministic: bool) -> None:
    """Sets XLA's flags, which it reads when the backend starts.

    Flags that the user has set come last, so they win.
    """
    import jax  # imported late: it takes seconds, and a bad path should fail before it

    flags = [
        # Without Triton matmuls, cuBLASLt fuses the biases into them: GPT-2 124M on an H100 goes
        # from 509 k to 529 k tokens/s.
        "--xla_gpu_enable_triton_gemm=false",
        # Merging the matmuls of q, k and v would need copies to split the result.
        "--xla_gpu_dot_merger_threshold_mb=0",
        # On a CPU, bf16 fusions of YNNPACK take most of a step: llama3_small needs 11.4 s of one
        # core with them, 1.35 s without (JAX 0.11.2; 3.5 s and 1.2 s with 0.12.0.1).  With them the
        # gradient of a vLSTM's v shared across a vmap is random.  xla_cpu_experimental_onednn_
        # custom_call would halve the time, but gradients through SiLU become wrong, too.
        "--xla_cpu_experimental_ynn_fusion_type=",
    ]
    if jax.__version_info__ >= (0, 12):
        # XLA's own kernels for small all-reduces call ncclGetPeerDevicePointer, which is in NCCL
        # from 2.29 on.  JAX accepts the 2.28.9 that PyTorch 2.11 requires; the step would fail.
        flags.append("--xla_gpu_experimental_use_collective_kernels=")
    if deterministic:
        flags.append("--xla_gpu_deterministic_ops=true")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()


class StopSignals(contextlib.ExitStack):
    """The signals of STOPPING request a stop after the current step; a second stops at once.

    A second signal within one second counts as the first: `timeout` sends its signal to uv and to
    us, and uv passes the signal on.
    """

    def __enter__(self):
        self.received: int | None = None
        self.at = 0.0
        self.enter_context(handle_signals(self._handle))
        return self

    def after(self, step: int) -> int | None:
        """The signal received so far, or None."""
        return self.received

    def _handle(self, number, frame):
        if self.received is None:
            self.received, self.at = number, time.monotonic()
        elif time.monotonic() - self.at > _SAME:
            name = signal.Signals(number).name
            # Not print(), which the signal may have interrupted.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{name} again: stopped without saving this step\n".encode())
            self.close()
            interrupt = number == signal.SIGINT  # also in a shell's background, which ignores it
            signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)
            signal.raise_signal(number)


@contextlib.contextmanager
def no_long_pauses() -> Iterator[None]:
    """Makes Python's garbage collector ignore all objects that exist on entry.

    After tracing and compiling a step there are about 400,000 objects.  Scanning them would take
    0.2 s, longer than many steps, while the GPU is idle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_OFTEN)  # a start raises it
    try:
        yield
    finally:
        gc.unfreeze()
