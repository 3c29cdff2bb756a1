"""Decides how each op runs: on its Mosaic GPU kernel or as plain jnp on XLA.

Every op calls `use_kernel(name, implementation, reason)`.  `reason` comes from the op's `why_not`,
which checks shapes, dtypes and options; it is None if the kernel supports the call.

  None      runs the kernel where it is supported and not slower, and the XLA form elsewhere
            (attention falls back to cuDNN where cuDNN supports the call); logs a fallback once
  "mosaic"  runs the kernel, or raises NotImplementedError with the reason; does not check the
            platform, so that a CPU can interpret the kernel and lower it for CUDA
  "xla"     runs the jnp form

Some ops have two forms of their kernels: one for Hopper (9.0) and a general one, for every NVIDIA
GPU since Ampere (8.0).  Only an H100 has run the general one, so other GPUs take it under "mosaic",
and by default in place of XLA but not of cuDNN; JAXLLM_KERNELS=general in the environment takes it
everywhere, on Hopper as well, and by default no kernel that only Hopper has.

`explain()` reports the decisions recorded while JAX traced.  On a GPU it also names the compiler of
the kernels, because a compiler that spills registers makes a kernel three times slower.
"""

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
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
# >= 8.0; >= 8.9 (casts to fp8); >= 9.0 (TMA, 227 KB); exactly 9.0 (wgmma)
Gpu = Literal["sm_80", "sm_89", "sm_90", "sm_90a"]

log = logging.getLogger("pallas_kernels")


class Decision(NamedTuple):
    """How an op runs, and why."""

    op: str
    runs: Literal["mosaic", "cudnn", "xla"]
    why: str

    @property
    def supported(self) -> bool:
        """Whether the kernel supports the call, even if the other form is faster and runs."""
        return self.runs == "mosaic" or self.why.startswith(_FASTER)


class Compiler(NamedTuple):
    """The compiler of Mosaic kernels and its CUDA release."""

    name: Literal["nvJitLink", "ptxas"]
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} {self.cuda[0]}.{self.cuda[1]}"


# The first and last releases of CUDA's compilers and of JAX whose programs have been checked:
# kernels spill no registers, general forms few (tests/pallas_kernels/test_compilers.py).  The extra
# cuda13 keeps to them.
_CUDA, _JAX = ((13, 0), (13, 5)), ((0, 11), (0, 12))
_SMEM = 227 * 1024  # shared memory of a block from 9.0 on, except on consumer Blackwell
_FASTER = "faster, as "
_SMALL = ("sm_80", "sm_89")  # kernels for these need neither TMA nor much shared memory
_GENERAL = ", in the general form"
_NAMES = {"cudnn": "cuDNN", "xla": "XLA"}
_decisions: dict[Decision, int] = {}  # number of traced calls, in the order of the first call
_recording = True


def decide(
    op: str,
    implementation: Implementation | None,
    reason: str | None,
    gpu: Gpu = "sm_80",
    fallback: Literal["cudnn", "xla"] = "xla",
    slower: str | None = None,
    general: bool = False,
) -> Decision:
    """Decides how `op` runs, without recording or logging it (`use_kernel` does both).

    reason: why the kernel does not support this call, or None.
    gpu: the GPU that the kernel needs.
    fallback: what runs in place of the kernel if implementation is None.
    slower: why the kernel is slower than `fallback`, or None; used if implementation is None.
    general: the kernel is in its general form, which the decision says.
    Raises NotImplementedError for "mosaic" with a reason, ValueError for an unknown implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"implementation={implementation!r} is not None, mosaic or xla")
    if implementation == "xla":
        return Decision(op, "xla", "asked for")
    reason = shard_map_why_not() or reason
    if implementation == "mosaic":
        if reason is not None:
            raise NotImplementedError(f"{op} has no Mosaic kernel for this call: {reason}")
        return Decision(op, "mosaic", "asked for" + general * _GENERAL)
    if _general_asked() and gpu not in _SMALL:
        reason = reason or f"JAXLLM_KERNELS=general, and this kernel is for {gpu}"
    if reason := device_lacks(gpu) or reason:
        return Decision(op, fallback, reason)
    if slower:
        return Decision(op, fallback, _FASTER + slower)
    return Decision(op, "mosaic", "supported" + general * _GENERAL)


def use_kernel(
    op: str,
    implementation: Implementation | None,
    reason: str | None,
    gpu: Gpu = "sm_80",
    fallback: Literal["cudnn", "xla"] = "xla",
    slower: str | None = None,
    general: bool = False,
) -> bool:
    """Whether `op` runs on its kernel; records and logs the decision.  Arguments as in `decide`."""
    decision = decide(op, implementation, reason, gpu, fallback, slower, general)
    if _recording:
        logged = decision in _decisions or decision.why == "asked for"
        if not logged and decision.runs != "mosaic":
            # On a GPU an unsupported call loses speed, a call that XLA runs faster does not.
            missed = jax.default_backend() != "cpu" and not decision.supported
            level = logging.WARNING if missed else logging.INFO
            log.log(level, "%s runs on %s: %s", op, _NAMES[decision.runs], decision.why)
    record(decision)
    if decision.runs == "mosaic" and jax.default_backend() == "gpu":
        _warn_of_compiler()
    return decision.runs == "mosaic"


def record(decision: Decision) -> None:
    """Records a decision for `explain()`; `use_kernel` calls it."""
    if _recording:
        _decisions[decision] = _decisions.get(decision, 0) + 1


def shard_map_why_not() -> str | None:
    """Why the surrounding `shard_map` rules out kernels, or None.

    Kernel results carry no varying-axes types, so a `shard_map` that checks them would take one
    device's part of a weight's gradient for the whole and not sum the parts.
    """
    try:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or not (axes := mesh.manual_axes):
            return None
        # axis_index has such a type only where shard_map checks them.
        checked = jax.eval_shape(lambda: lax.axis_index(axes)).manual_axis_type is not None
    except AttributeError as e:  # XLA is better than gradients that are not summed
        return f"JAX {jax.__version__} does not say whether shard_map checks varying types ({e})"
    if not checked:
        return None
    return "the shard_map around it checks varying types: pass check_vma=False"


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
        return f"compute capability {capability} is not that of an NVIDIA GPU"
    need = int(gpu[3:5]) / 10
    if have < need or (gpu == "sm_90a" and have != need):
        exactly = "" if gpu == "sm_90a" else " or newer"
        return f"the GPU has compute capability {have}, the kernel needs {need}{exactly}"
    # Kernels that use TMA need a full SM; consumer Blackwell (12.0) has TMA but only 99 KB.
    smem = getattr(jax.devices()[0], "shared_memory_per_block_optin", _SMEM)
    if gpu not in _SMALL and smem < _SMEM:
        return f"the GPU has {smem // 1024} KB of shared memory for a block, the kernel needs 227"
    return None


def general_form(
    implementation: Implementation | None, rival: bool = True, gpu: Gpu = "sm_90a"
) -> bool:
    """Whether ops with two forms of their kernels run the general one; Hopper's on a CPU.

    gpu: what the other form needs.
    rival: cuDNN runs this call, too.  An H100 is the only GPU that has run the general form, so
    elsewhere the default takes it only in place of XLA, unless JAXLLM_KERNELS asks for it.
    """
    if (asked := _general_asked()) or implementation == "xla":
        return asked
    others = device_lacks("sm_80") is None and device_lacks(gpu) is not None
    return others and (implementation == "mosaic" or not rival)


def _general_asked() -> bool:
    asked = os.environ.get("JAXLLM_KERNELS", "")
    if asked not in ("", "general"):
        raise ValueError(f"JAXLLM_KERNELS={asked} is not general: set that, or unset it")
    return bool(asked)


def xla_flag(name: str) -> bool | None:
    """The value of a boolean flag in XLA_FLAGS, the last one if it is there twice, or None."""
    flag = rf"(?<!\S)--{name}(?:=(\S*))?(?!\S)"
    values = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    return values[-1].lower() in ("", "true", "1") if values else None


@functools.cache
def compiler() -> Compiler | None:
    """The compiler of Mosaic kernels in this process, on a GPU, or None if none is found.

    jaxlib uses ptxas before 0.12; from 0.12 on it uses nvJitLink if that loads, ptxas otherwise.
    """
    if [int(number) for number in jaxlib.__version__.split(".")[:2]] >= [0, 12]:
        for release in (13, 12):
            try:  # pip's library is loaded already: JAX loads cuSOLVER, which needs it
                library = ctypes.CDLL(f"libnvJitLink.so.{release}")
            except OSError:
                continue
            major, minor = ctypes.c_uint(), ctypes.c_uint()
            if library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
                return Compiler("nvJitLink", (major.value, minor.value))
    nvidia = importlib.util.find_spec("nvidia")  # XLA prefers pip's CUDA to that of PATH
    places = nvidia.submodule_search_locations if nvidia else None
    found = [str(path) for place in places or () for path in Path(place).glob("*/bin/ptxas")]
    ptxas = found[0] if found else shutil.which("ptxas")
    if ptxas is None:
        return None
    output = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"V(\d+)\.(\d+)", output)
    return version and Compiler("ptxas", (int(version[1]), int(version[2])))


def slow_compiler() -> str | None:
    """Why the compiler may make kernels slow, with the fix, or None."""
    used = compiler()
    if used is None:  # Mosaic finds one itself or raises its own error
        return None
    if _CUDA[0] <= used.cuda <= _CUDA[1] and _JAX[0] <= jax.__version_info__[:2] <= _JAX[1]:
        return None
    (cuda, last_cuda), (old, new) = (["{}.{}".format(*v) for v in pair] for pair in (_CUDA, _JAX))
    cure = "see Install in README.md"
    return f"known to be fast with CUDA {cuda} to {last_cuda} and JAX {old} to {new}: {cure}"


@functools.cache
def _warn_of_compiler() -> None:
    """Warns once in a process if the kernels may be slow."""
    why = slow_compiler()
    if why is not None:
        log.warning(
            "kernels compiled by %s (JAX %s) may be slow; %s", compiler(), jax.__version__, why
        )


def explain() -> str:
    """One line for each op and each way it has run since the start or `reset()`.

    On a GPU the last line names the compiler of the kernels, if any ran.
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
    """The decisions that `explain()` prints, in the order of their first calls."""
    return list(_decisions)


def reset() -> None:
    """Clears all decisions, so that `explain()` reports only what is traced from here on.

    JAX does not trace cached functions again, so their decisions do not reappear.
    """
    _decisions.clear()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """A context in which decisions are neither recorded nor logged."""
    global _recording
    before, _recording = _recording, False
    try:
        yield
    finally:
        _recording = before


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """A context for tracing calls that will not run: without a GPU ops decide as on an H100.

    Decisions made inside are forgotten at its end.
    """
    global device_lacks
    before, lacks = dict(_decisions), device_lacks
    if jax.default_backend() != "gpu":
        device_lacks = lambda gpu: None
    try:
        yield
    finally:
        device_lacks = lacks
        _decisions.clear()
        _decisions.update(before)
