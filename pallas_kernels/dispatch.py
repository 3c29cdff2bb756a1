"""The only place that decides how an op runs: on our Mosaic GPU kernel or as plain jnp on XLA.

Every op calls `use_kernel(name, implementation, reason)`, where `reason` is what its own `why_not`
said about the shapes, dtypes and options (None: the kernel can take this call).

  None      the kernel where it is supported, the XLA form elsewhere (for attention cuDNN's, where
            that takes the call) and where that is faster; says so once in the log
  "mosaic"  the kernel, or NotImplementedError with the reason; never asks for the platform, so that
            a CPU can interpret the kernel and lower it for CUDA
  "xla"     the jnp form

`explain()` reports every decision that was taken while JAX traced, not a guess, and on a GPU what
compiles the kernels: where a compiler lets registers spill, a kernel takes three times as long.
"""

import contextlib
import ctypes
import functools
import importlib.util
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import jax
import jaxlib
from jax import lax

Implementation = Literal["mosaic", "xla"]
Gpu = Literal["sm_80", "sm_90", "sm_90a"]  # 8.0 or newer; 9.0 (TMA, 227 KB) or newer; 9.0 (wgmma)

log = logging.getLogger("pallas_kernels")


class Decision(NamedTuple):
    """How one op was run, and why."""

    op: str
    runs: Literal["mosaic", "cudnn", "xla"]
    why: str

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel runs, or could but for the speed of the other form."""
        return self.runs == "mosaic" or self.why.startswith(_FASTER)


class Compiler(NamedTuple):
    """What makes the programs of Mosaic kernels, of which release of CUDA."""

    name: Literal["nvJitLink", "ptxas"]
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} {self.cuda[0]}.{self.cuda[1]}"


# The release of CUDA, and of JAX, with which all kernels are known to be fast: attention's need
# setmaxnreg, which jaxlib's nvJitLink ignores from 0.12 on.  The extra cuda13 keeps to them.
_CUDA, _JAX = (13, 0), (0, 11)
_SMEM = 227 * 1024  # bytes that a block may have from 9.0 on, but for consumer Blackwell
_FASTER = "faster, as "
_NAMES = {"cudnn": "cuDNN", "xla": "XLA"}
_decisions: dict[Decision, int] = {}  # in the order taken, with how often
_silenced = False


def decide(
    op: str,
    implementation: Implementation | None,
    reason: str | None,
    gpu: Gpu = "sm_80",
    otherwise: Literal["cudnn", "xla"] = "xla",
    slower: str | None = None,
) -> Decision:
    """How `op` has to run.  Only `use_kernel`, which every op calls, records and logs it.

    reason: why the kernel cannot take this call, or None.  gpu: what the kernel needs.
    otherwise: what the op takes under None in place of its kernel.
    slower: why the kernel, which could run, is slower than that, or None; counts under None only.
    Raises NotImplementedError under "mosaic" with a reason, ValueError for another name.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"implementation={implementation!r} is not None, mosaic or xla")
    if implementation == "xla":
        return Decision(op, "xla", "asked for")
    reason = shard_map_lacks() or reason
    if implementation == "mosaic":
        if reason is not None:
            raise NotImplementedError(f"{op} has no Mosaic kernel for this call: {reason}")
        return Decision(op, "mosaic", "asked for")
    if reason := device_lacks(gpu) or reason:
        return Decision(op, otherwise, reason)
    if slower:
        return Decision(op, otherwise, _FASTER + slower)
    return Decision(op, "mosaic", "supported")


def use_kernel(
    op: str,
    implementation: Implementation | None,
    reason: str | None,
    gpu: Gpu = "sm_80",
    otherwise: Literal["cudnn", "xla"] = "xla",
    slower: str | None = None,
) -> bool:
    """True if `op` has to run on its kernel, False for its jnp form; `decide` has the arguments."""
    decision = decide(op, implementation, reason, gpu, otherwise, slower)
    if not _silenced:
        told = decision in _decisions or decision.why == "asked for"
        if not told and decision.runs != "mosaic":
            # On a GPU a kernel that cannot run costs speed; one that is slower costs nothing.
            missed = jax.default_backend() != "cpu" and not decision.has_kernel
            level = logging.WARNING if missed else logging.INFO
            log.log(level, "%s runs on %s: %s", op, _NAMES[decision.runs], decision.why)
    tell(decision)
    if decision.runs == "mosaic" and jax.default_backend() == "gpu":
        _warn_of_compiler()
    return decision.runs == "mosaic"


def tell(decision: Decision) -> None:
    """Records a decision for `explain()`; `use_kernel` does so by itself."""
    if not _silenced:
        _decisions[decision] = _decisions.get(decision, 0) + 1


def shard_map_lacks() -> str | None:
    """Why no kernel can run where JAX traces now, or None.

    The results of kernels carry no types of varying axes: `shard_map` would take the part of a
    weight's gradient that one device made for the whole, and not sum it.
    """
    try:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or not (axes := mesh.manual_axes):
            return None
        # Only where shard_map checks such types has the index of a device one.
        checked = jax.eval_shape(lambda: lax.axis_index(axes)).manual_axis_type is not None
    except AttributeError as e:  # no kernel is better than gradients that nobody sums
        return f"JAX {jax.__version__} does not tell what a shard_map around it checks ({e})"
    if not checked:
        return None
    return "the shard_map around it checks types that vary, pass it check_vma=False"


@functools.cache
def device_lacks(gpu: Gpu) -> str | None:
    """Why the default device cannot run a kernel that needs `gpu`, or None."""
    platform = jax.default_backend()
    if platform != "gpu":
        return f"the platform is {platform}, not gpu"
    capability = str(getattr(jax.devices()[0], "compute_capability", None))
    try:
        have = float(capability)
    except ValueError:
        return f"compute capability {capability} is not one of an NVIDIA GPU"
    need = int(gpu[3:5]) / 10
    if have < need or (gpu == "sm_90a" and have != need):
        exactly = "" if gpu == "sm_90a" else " or newer"
        return f"the GPU has compute capability {have}, the kernel needs {need}{exactly}"
    # Kernels that stream through TMA fill an SM; consumer Blackwell (12.0) has TMA but 99 KB.
    smem = getattr(jax.devices()[0], "shared_memory_per_block_optin", _SMEM)
    if gpu != "sm_80" and smem < _SMEM:
        return f"the GPU has {smem // 1024} KB of shared memory for a block, the kernel needs 227"
    return None


@functools.cache
def compiler() -> Compiler | None:
    """What compiles Mosaic kernels in this process, on a GPU; None where nothing is found.

    jaxlib takes ptxas before 0.12, from then on nvJitLink where it loads, and ptxas elsewhere.
    """
    if [int(number) for number in jaxlib.__version__.split(".")[:2]] >= [0, 12]:
        for release in (13, 12):
            try:  # pip's is in memory already: JAX loads cuSOLVER, which needs it
                library = ctypes.CDLL(f"libnvJitLink.so.{release}")
            except OSError:
                continue
            major, minor = ctypes.c_uint(), ctypes.c_uint()
            if library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
                return Compiler("nvJitLink", (major.value, minor.value))
    nvidia = importlib.util.find_spec("nvidia")  # pip's CUDA, which XLA takes before the path's
    places = nvidia.submodule_search_locations if nvidia else None
    found = [str(path) for place in places or () for path in Path(place).glob("*/bin/ptxas")]
    ptxas = found[0] if found else shutil.which("ptxas")
    if ptxas is None:
        return None
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"V(\d+)\.(\d+)", said)
    return version and Compiler("ptxas", (int(version[1]), int(version[2])))


def slow_compiler() -> str | None:
    """Why kernels may be slow for what compiles them, with the cure, or None."""
    made = compiler()
    if made is None:  # Mosaic knows one, or ends with an error of its own
        return None
    if made.cuda == _CUDA and jax.__version_info__[:2] == _JAX:
        return None
    known = "known to be fast with CUDA {}.{} and JAX {}.{}: see Install in README.md"
    return known.format(*_CUDA, *_JAX)


@functools.cache
def _warn_of_compiler() -> None:
    """Once in a process, where the kernels may be slow."""
    why = slow_compiler()
    if why is not None:
        log.warning(
            "kernels compiled by %s (JAX %s) may be slow; %s", compiler(), jax.__version__, why
        )


def explain() -> str:
    """One line for each op and way it has run since the start or `forget()`.

    On a GPU, where kernels are among them, a last line tells what compiles these.
    """
    if not _decisions:
        return "no op has been traced yet"
    width = max(len(d.op) for d in _decisions)
    lines = [
        f"{d.op:<{width}}  {d.runs:<6}  {d.why} ({n} call{'s' if n > 1 else ''} traced)"
        for d, n in _decisions.items()
    ]
    if jax.default_backend() == "gpu" and any(d.runs == "mosaic" for d in _decisions):
        why = slow_compiler()
        may = f" may be slow; {why}" if why else ""
        lines.append(f"kernels compiled by {compiler() or 'ptxas'} (JAX {jax.__version__}){may}")
    return "\n".join(lines)


def decisions() -> list[Decision]:
    """The decisions that `explain()` prints, in the order they were first taken."""
    return list(_decisions)


def forget() -> None:
    """Forgets all decisions, so that `explain()` speaks of what is traced from here on.

    What JAX has cached is not traced again, and so not told again.
    """
    _decisions.clear()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Inside, decisions are neither recorded nor logged (an op that calls another op)."""
    global _silenced
    before, _silenced = _silenced, True
    try:
        yield
    finally:
        _silenced = before
