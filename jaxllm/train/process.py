"""A process that trains: XLA's flags, signals, pauses, what the device can do and hold."""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from jaxllm.config import Config
from jaxllm.errors import InputError
from jaxllm.files import lock


def set_xla_flags(deterministic: bool) -> None:
    """XLA reads its flags when it first meets the GPU; of two values the later, yours, counts."""
    flags = [
        # Where Triton may not have the matmuls, cuBLASLt adds the biases in them: GPT-2 124M on an
        # H100 goes from 509 k to 529 k tokens/s.
        "--xla_gpu_enable_triton_gemm=false",
        # Merged matmuls of q, k and v have to be taken apart by copies.
        "--xla_gpu_dot_merger_threshold_mb=0",
    ]
    # On a CPU, bf16 fusions of YNNPACK take most of a step: llama3_small needs 11.4 s of one core
    # with them, 1.35 s without (JAX 0.11.2; 3.5 s and 1.2 s with 0.12.0.1).
    flags.append("--xla_cpu_experimental_ynn_fusion_type=")
    if deterministic:
        flags.append("--xla_gpu_deterministic_ops=true")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()


class StopSignals:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one stops at once."""

    def __enter__(self):
        self.received: int | None = None
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        self.received = number
        self.__exit__()

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)


@contextlib.contextmanager
def no_long_pauses() -> Iterator[None]:
    """Inside, Python's garbage collector leaves alone what was there before.

    After a step was traced and compiled these are some 400,000 objects, through which it would look
    for 0.2 s somewhere in the run, longer than many a step, while the GPU has nothing to do.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def alone(out_dir: Path) -> Iterator[None]:
    """Makes a run's directory and keeps other processes that train out of it, until this dies.

    Raises InputError.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(out_dir / ".lock", wait=False))
        except BlockingIOError as e:
            raise InputError(
                f"another process trains in out_dir {out_dir}; wait for its end, or name another"
            ) from e
        except OSError as e:
            raise InputError(f"cannot write to out_dir {out_dir}: {e.strerror}") from e
        yield


def check_kernels(config: Config) -> None:
    """Raises InputError if kernels=mosaic was asked for where they cannot run."""
    from pallas_kernels import dispatch

    if config.model.kernels == "mosaic" and (lack := dispatch.device_lacks("sm_90a")):
        raise InputError(f"model.kernels=mosaic cannot run here: {lack}; use auto or xla")
