"""Decides how each op runs: on one of its kernels, on cuDNN or as plain jnp on XLA.

An op is one public function, one jnp reference and a literal tuple of `Form`s, in the order in
which they are tried.  The op checks its arguments and calls `run(op, forms, implementation, ...)`:

  None      takes the first form that fits: it supports the call, the device has what it needs, and
            no later form is known to be faster; logs once if the first form does not fit
  "mosaic"  takes the first of our kernels that fits, or raises NotImplementedError with all
            reasons; does not ask for a GPU, so that a CPU can interpret a kernel and lower it
  "xla"     takes the last form, the jnp reference

Forms on "hopper" need a Hopper GPU (9.0), or at least its TMA; "general" ones run on every NVIDIA
GPU since Ampere (8.0).  Only an H100 has run the general forms, so cuDNN is tried before them.
JAXLLM_KERNELS=general in the environment leaves out the forms on Hopper and on cuDNN.

`explain()` reports the decisions recorded while JAX traced, and on a GPU the kernels' compiler: one
that spills registers makes a kernel three times slower.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jaxlib
from jax import lax
from jax._src import config as jax_config

from pallas_kernels import guard

Implementation = Literal["mosaic", "xla"]
Runs = Literal["hopper", "general", "cudnn", "xla"]
# Why a form runs or does not: it fits; the caller asked for it; a setting, the device or the call
# rules it out; a later form is faster.
Kind = Literal["fits", "asked", "setting", "device", "unsupported", "slower"]
# >= 8.0; >= 8.9 (casts to fp8); >= 9.0 (TMA, 227 KB); exactly 9.0 (wgmma)
Gpu = Literal["sm_80", "sm_89", "sm_90", "sm_90a"]

log = logging.getLogger("pallas_kernels")
_never = lambda *arrays, **options: None


class Form(NamedTuple):
    """One way to run an op; its functions get the arrays and the options of the call."""

    runs: Runs
    call: Callable[..., Any]
    gpu: Gpu | None = None
    why_not: Callable[..., str | None] = _never  # why it does not support the call
    why_slower: Callable[..., str | None] = _never  # why a later form is faster; unless asked for

    @property
    def is_kernel(self) -> bool:
        return self.runs in _KERNELS


class Decision(NamedTuple):
    """How an op runs, and why: its form fits, or why an earlier form does not."""

    op: str
    runs: Runs
    kind: Kind
    why: str

    @property
    def supported(self) -> bool:
        """Whether a kernel supports the call, even if another form is faster and runs."""
        return self.runs in _KERNELS or self.kind == "slower"


class Compiler(NamedTuple):
    """The compiler of Mosaic kernels and its CUDA release."""

    name: Literal["nvJitLink", "ptxas"]
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} {self.cuda[0]}.{self.cuda[1]}"


# The first and last releases of CUDA's compilers and of JAX whose programs have been checked for
# spilled registers (tests/pallas_kernels/test_compilers.py).  The extra cuda13 keeps to them.
_CUDA, _JAX = ((13, 0), (13, 5)), ((0, 11), (0, 12))
_SMEM = 227 * 1024  # shared memory of a block from 9.0 on, except on consumer Blackwell
_KERNELS = ("hopper", "general")  # the forms that run our kernels
_NAMES = {"cudnn": "cuDNN", "xla": "XLA"}
_decisions: dict[Decision, int] = {}  # number of traced calls, in the order of the first call
_rehearsing = False  # whether ops decide as on an H100 where there is no GPU


def run(
    op: str, forms: tuple[Form, ...], implementation: Implementation | None, /, *arrays, **options
):
    """Runs `op` in the form that `choose` takes; records and logs the decision.

    Under jit arrays have no device: where a GPU is present, but the program is for the CPU, call it
    in a `jax.default_device("cpu")` context.
    """
    form, decision, _ = choose(op, forms, implementation, *arrays, **options)
    record(decision)
    if not form.is_kernel:
        return form.call(*arrays, **options)
    if jax.default_backend() == "gpu":
        _warn_of_compiler()
    how = {"asked": implementation is not None, "interpreted": interpreting()}
    return form.call(*guard.guarded(op, arrays, differentiable=True, **how), **options)


def interpreting() -> bool:
    """Whether kernels traced now are for JAX's interpreter, which needs no GPU."""
    mode = getattr(jax_config, "pallas_tpu_interpret_mode_context_manager", None)
    return mode is not None and mode.value is not None


def choose(
    op: str, forms: tuple[Form, ...], implementation: Implementation | None, /, *arrays, **options
) -> tuple[Form, Decision, list[Decision]]:
    """The form in which `run` would run this call, why, and why no form before it."""
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"implementation={implementation!r} is not None, mosaic or xla")
    if implementation == "xla":
        return forms[-1], Decision(op, "xla", "asked", "asked for"), []
    refused: list[Decision] = []
    for form in forms:
        slower = next((r for r in refused if r.kind == "slower"), None)
        if form.is_kernel and slower:  # every kernel after a slower one is slower, too
            why = slower.kind, slower.why
        else:
            why = _why_not(form, forms, implementation, arrays, options)
        if why is None:
            kind, why = ("asked", "asked for") if implementation else ("fits", "supported")
            if refused and not form.is_kernel:
                # The most telling refusal: that XLA is faster than a kernel which supports the
                # call, or else the first reason why a kernel does not support it.
                kernels = [r for r in refused if r.runs in _KERNELS]
                of_call = (r for k in ("slower", "unsupported") for r in kernels if r.kind == k)
                _, _, kind, why = next(of_call, refused[0])
            return form, Decision(op, form.runs, kind, why), refused
        refused.append(Decision(op, form.runs, *why))
    why = "; ".join(dict.fromkeys(r.why for r in refused if r.runs in _KERNELS)) or "it has none"
    raise NotImplementedError(f"{op} has no Mosaic kernel for this call: {why}")


def _why_not(form: Form, forms, implementation, arrays, options) -> tuple[Kind, str] | None:
    if form.runs in ("hopper", "cudnn") and _general_asked():
        if implementation is None or any(other.runs == "general" for other in forms):
            return "setting", f"JAXLLM_KERNELS=general, and this form is for {form.runs}"
    if not form.is_kernel and implementation == "mosaic":
        return "asked", "it is no kernel of ours"
    if form.is_kernel and (reason := shard_map_why_not() or guard.sharded(arrays)):
        return "setting", reason
    sizes = (n for x in jax.tree.leaves(arrays) for n in getattr(x, "shape", ()))
    if form.runs != "xla" and any(map(jax.export.is_symbolic_dim, sizes)):
        return "unsupported", "a size is symbolic (jax.export), and kernels need numbers"
    # Without a GPU a kernel that is asked for can be interpreted, and lowered for CUDA.
    if form.gpu and (implementation is None or device_lacks("sm_80") is None):
        if lack := device_lacks(form.gpu) or elsewhere(arrays):
            return "device", lack
    if reason := form.why_not(*arrays, **options):
        return "unsupported", reason
    if implementation is None and (reason := form.why_slower(*arrays, **options)):
        return "slower", f"faster, as {reason}"
    return None


def record(decision: Decision) -> None:
    """Records a decision for `explain()`, and logs the first of each kind that runs no kernel."""
    told = decision.kind not in ("asked", "fits")  # an op without kernels fits XLA
    if decision not in _decisions and told and decision.runs not in _KERNELS:
        # On a GPU an unsupported call loses speed, a call that XLA runs faster does not.
        missed = jax.default_backend() != "cpu" and not decision.supported
        level = logging.WARNING if missed else logging.INFO
        log.log(level, "%s runs on %s: %s", decision.op, _NAMES[decision.runs], decision.why)
    _decisions[decision] = _decisions.get(decision, 0) + 1


def shard_map_why_not() -> str | None:
    """Why the surrounding `shard_map` rules out kernels, or None.

    Kernel results carry no varying-axes types, so a `shard_map` that checks them would take one
    device's part of a weight's gradient for the whole and not sum the parts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not (axes := mesh.manual_axes):
        return None
    # axis_index has such a type only where shard_map checks them.
    checked = jax.eval_shape(lambda: lax.axis_index(axes)).manual_axis_type is not None
    why = "the shard_map around it checks varying types: pass check_vma=False"
    return why if checked else None


def device_lacks(gpu: Gpu) -> str | None:
    """Why the default device cannot run a kernel that needs `gpu`, or None."""
    return None if rehearses() else elsewhere(()) or _device_lacks(gpu)


def rehearses() -> bool:
    """Whether ops decide as on an H100, without a GPU."""
    return _rehearsing and jax.default_backend() != "gpu"


def elsewhere(arrays: tuple) -> str | None:
    """Why a call with these arrays does not run on the GPU that the process has, or None.

    The call runs where its arrays are committed, else on the default device.
    """
    if jax.default_backend() != "gpu":
        return None
    for x in jax.tree.leaves(arrays):
        x = x.to_concrete_value() if isinstance(x, jax.core.Tracer) else x
        if isinstance(x, jax.Array) and x.committed:
            (platform,) = {device.platform for device in x.devices()}
            return None if platform == "gpu" else f"the arrays are on the {platform}"
    default = jax.config.jax_default_device
    platform = getattr(default, "platform", default)
    return "jax_default_device is the cpu" if platform == "cpu" else None


@functools.cache
def _device_lacks(gpu: Gpu) -> str | None:
    if (platform := jax.default_backend()) != "gpu":
        return f"the platform is {platform}, not gpu"
    capability = str(getattr(jax.devices()[0], "compute_capability", None))
    try:
        have = float(capability)
    except ValueError:
        return f"compute capability {capability} is not an NVIDIA GPU's"
    need = int(gpu[3:5]) / 10
    if have < need or (gpu == "sm_90a" and have != need):
        exactly = "" if gpu == "sm_90a" else " or newer"
        return f"the GPU has compute capability {have}, the kernel needs {need}{exactly}"
    # Kernels that use TMA need a full SM; consumer Blackwell (12.0) has TMA but only 99 KB.
    smem = getattr(jax.devices()[0], "shared_memory_per_block_optin", _SMEM)
    if gpu not in ("sm_80", "sm_89") and smem < _SMEM:
        return f"the GPU has {smem // 1024} KB of shared memory for a block, the kernel needs 227"
    return None


def _general_asked() -> bool:
    if (asked := os.environ.get("JAXLLM_KERNELS", "")) not in ("", "general"):
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
    nvidia = importlib.util.find_spec("nvidia")  # XLA prefers pip's CUDA to PATH's
    places = nvidia.submodule_search_locations if nvidia else None
    found = [str(path) for place in places or () for path in Path(place).glob("*/bin/ptxas")]
    if (ptxas := found[0] if found else shutil.which("ptxas")) is None:
        return None
    output = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"V(\d+)\.(\d+)", output)
    return version and Compiler("ptxas", (int(version[1]), int(version[2])))


def slow_compiler() -> str | None:
    """Why the compiler may make kernels slow, with the fix, or None."""
    if (used := compiler()) is None:  # Mosaic finds one itself or raises its own error
        return None
    if _CUDA[0] <= used.cuda <= _CUDA[1] and _JAX[0] <= jax.__version_info__[:2] <= _JAX[1]:
        return None
    known = "CUDA {}.{} to {}.{} and JAX {}.{} to {}.{}".format(*sum(_CUDA + _JAX, ()))
    return f"known to be fast with {known}: see Install in README.md"


@functools.cache  # once in a process
def _warn_of_compiler() -> None:
    if why := slow_compiler():
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
        f"{d.op:<{width}}  {d.runs:<7}  {d.why} ({n} call{'s' if n > 1 else ''} traced)"
        for d, n in _decisions.items()
    ]
    if jax.default_backend() == "gpu" and any(d.runs in _KERNELS for d in _decisions):
        why = slow_compiler()
        may = f" may be slow; {why}" if why else ""
        lines.append(f"kernels compiled by {compiler() or 'ptxas'} (JAX {jax.__version__}){may}")
    return "\n".join(lines)


def decisions(every: bool = False) -> list[Decision]:
    """What `explain()` prints, in the order of first calls; every: once for each traced call."""
    return [d for d, calls in _decisions.items() for _ in range(calls if every else 1)]


def reset() -> None:
    """Clears all decisions; what JAX has traced and cached is not reported again."""
    _decisions.clear()


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """A context whose decisions are forgotten; without a GPU, ops decide in it as on an H100."""
    global _rehearsing
    before, outer = dict(_decisions), _rehearsing
    _rehearsing = True
    try:
        yield
    finally:
        _rehearsing = outer
        _decisions.clear()
        _decisions.update(before)
