"""Compiles the steps of a run, and keeps in the user's cache what the next start can reuse.

It keeps the times of XLA's matmul kernels, JAX's compiled programs, keyed by their text, and whole
steps, keyed by everything that determines their text.  A second start therefore neither traces nor
lowers its step, which took most of a start's time: 13 of 24 s for gpt2_124m on an H100 (JAX
0.12.0.1, 2026-11-25).
"""

import contextlib
import hashlib
import logging
import os
import pickle
import sys
import sysconfig
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.extend.backend import get_compile_options
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from jaxllm.data.cache import cache_folder, digest, source_digest
from jaxllm.errors import in_short
from jaxllm.files import write_whole
from jaxllm.train.estimate import equations
from jaxllm.train.step import Trainer
from pallas_kernels import dispatch

log = logging.getLogger("jaxllm")
BLOCKS = 3  # blocks of the step whose matmuls are timed: a first, a middle and a last one
# What JAX, XLA, Mosaic, Flax and our dispatch read from the environment.
_READ = ("JAX", "XLA", "MOSAIC", "NVIDIA_TF32", "FLAX", "LD_LIBRARY_PATH")


def find_or_compile(
    trainer: Trainer,
    trace: Callable[[Trainer], jax.stages.Traced],
    timings: Path | None,
    lowered: Callable[[], None] = lambda: None,
) -> jax.stages.Compiled:
    """The compiled program of a trainer's step: loaded from an earlier start, or compiled now.

    The ops' decisions are recorded (`dispatch.explain()`) in either case.
    trace: its name is part of the step's key.  timings, lowered: as for `compile_autotuned`.
    """
    path, before = _path_of_step(trainer, trace.__name__), Counter(dispatch.decisions(every=True))
    if path is not None and path.exists():
        lowered()
        if (program := read(path, trainer, timings)) is not None:
            return program
    few, config, lower = None, trainer.config, lambda: trace(trainer).lower()
    if timings is not None and not timings.exists() and config.model.n_layers > BLOCKS:
        config = config.with_model(n_layers=BLOCKS)
        few = _without_kernels(trace(Trainer(config, trainer.mesh, trainer.packing)))
        lower = dispatch.rehearsal()(lower)  # only the trace above records how ops run
    program = compile_autotuned(lower, timings, few, lowered)
    if path is not None:
        write(path, program, Counter(dispatch.decisions(every=True)) - before, timings)
    return program


def _path_of_step(trainer: Trainer, name: str) -> Path | None:
    """The step's file in our cache, or None if the step is not kept.

    Several processes that time kernels share the times: if one of them found its step, the others
    would be left waiting.  Dumps that the user asks for are written only by compiling.
    """
    times_together = jax.process_count() > 1 and not trainer.config.train.deterministic
    if jax.default_backend() != "gpu" or times_together or not cache_is_used():
        return None
    parts = step_parts(trainer, name)
    session = not hasattr(sys.modules["__main__"], "__file__")  # its code is in no file
    if session or "dump" in str(parts["environment"]).lower():
        return None
    return cache_folder(None) / "compiled" / f"{digest(parts)}.step"


def cache_is_used() -> bool:
    """Whether the user's JAX settings allow compiled programs to be cached."""
    config = jax.config
    return bool(config.jax_compilation_cache_dir and config.jax_enable_compilation_cache)


def step_parts(trainer: Trainer, name: str) -> dict[str, Any]:
    """Everything that determines the compiled program of a step, except the times of matmuls."""
    devices = list(trainer.mesh.devices.flat)
    sizes = "device_kind", "compute_capability", "core_count", "shared_memory_per_block_optin"
    arrays = jax.tree.leaves_with_path((trainer.abstract_state(), trainer.abstract_batch()))
    installed = {path.name for folder in sys.path for path in Path(folder).glob("*.dist-info")}
    scripts, newest = _modules()
    return {
        "step": name,
        "sources": [source_digest(), *scripts],
        "installed": [sys.version, newest, *sorted(installed)],
        "compilers": [devices[0].client.platform_version, str(dispatch.compiler())],
        "process": [jax.process_index(), jax.process_count()],
        "devices": [[d.id, *(str(getattr(d, size, None)) for size in sizes)] for d in devices],
        "config": trainer.config.model_dump(mode="json"),
        "packing": repr(trainer.packing),
        "arrays": [f"{jax.tree_util.keystr(path)} {x}" for path, x in arrays],
        "settings": {key: repr(value) for key, value in sorted(jax.config.values.items())},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_READ)},
    }


def _modules() -> tuple[list[str], int]:
    """(digests of loaded modules neither ours nor installed, newest time of the installed ones).

    A script may replace a layer or an op before it starts a run, or bring its own pallas_kernels.
    """
    ours, stdlib = str(Path(__file__).parents[2]), os.path.dirname(os.__file__)
    counted = tuple(os.path.join(ours, name, "") for name in ("jaxllm", "pallas_kernels"))
    # Both commands are digested, whichever started this process, so that they share steps.
    commands = (ours, "train.py"), (sysconfig.get_path("scripts"), "jaxllm")
    scripts, newest = [], 0
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for path in {*modules, *(os.path.join(*command) for command in commands)}:
        if path is None or path.startswith(counted) or not os.path.isfile(path):
            continue
        if "-packages" in path or path.startswith(stdlib):  # site-packages, dist-packages
            newest = max(newest, os.stat(path).st_mtime_ns)
        else:
            scripts.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
    return sorted(scripts), newest


def write(
    path: Path, program: jax.stages.Compiled, decisions: Counter, timings: Path | None
) -> None:
    """Keeps a step, with the decisions of its ops and the matmul times that it was compiled with.

    Keeps nothing if our code has been edited since this process imported it.
    """
    if source_digest.__wrapped__() != source_digest():
        return
    times = timings.read_bytes() if timings is not None and timings.exists() else None
    try:
        content = pickle.dumps((serialize_executable.serialize(program), decisions, times))
        write_new(path, _checksum(path, content) + content)
    except Exception as e:  # whatever JAX or pickle raises, or a full disk
        log.warning("the compiled step is not kept: %s", in_short(e))


def _checksum(path: Path, content: bytes | memoryview) -> bytes:
    """A checksum that covers the file's name, so another step's file under this name fails."""
    return hashlib.sha256(path.name.encode() + content).digest()


def read(path: Path, trainer: Trainer, timings: Path | None) -> jax.stages.Compiled | None:
    """A kept step, or None if there is none for these matmul times; deletes a damaged file.

    A new run takes the step's times; a resumed run has the times its program was compiled with.
    """
    try:
        content = memoryview(path.read_bytes())
        if path.stat().st_uid != os.getuid():  # a pickle may run any code
            raise ValueError("it belongs to another user")
        if _checksum(path, content[32:]) != content[:32]:
            raise ValueError("its checksum differs")
        serialized, decisions, times = pickle.loads(content[32:])
        if timings is not None and timings.exists() and timings.read_bytes() != times:
            return None
        devices = list(trainer.mesh.devices.flat)
        program = serialize_executable.deserialize_and_load(*serialized, execution_devices=devices)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # no folder of ours
        return None
    except Exception as e:  # whatever JAX or pickle raises for a damaged file
        with contextlib.suppress(OSError):
            path.unlink()
        log.warning("%s cannot be read, compiling again: %s", path, in_short(e))
        return None
    if timings is not None and times is not None:
        write_new(timings, times)
    for decision in Counter(decisions).elements():
        dispatch.record(decision)
    return program


def _without_kernels(traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lowers a program with empty calls in place of our kernels, to time its matmuls.

    XLA compiles the same matmuls (tests/accumulated_step.py); lowering takes 0.3 s, not 4.
    """

    def empty(ctx, *arrays, input_output_aliases, **_):
        aliases = dict(input_output_aliases)
        return jax.ffi.ffi_lowering("kernel", operand_output_aliases=aliases)(ctx, *arrays)

    called = {equation.primitive for equation in equations(traced.jaxpr.jaxpr)}
    rules: Any = tuple((p, empty) for p in called if p.name in ("mpmd_map", "pallas_call"))
    return traced.lower(_private_parameters=mlir.LoweringParameters(override_lowering_rules=rules))


def compile_autotuned(
    lower: Callable[[], jax.stages.Lowered],
    timings: Path | None,
    few: jax.stages.Lowered | None = None,
    lowered: Callable[[], None] = lambda: None,
) -> jax.stages.Compiled:
    """Compiles a deterministic program with the matmul kernels that are the fastest on this GPU.

    timings: the run's file for their times; None: XLA's first choice of kernels, without timing.
    few: a step with the same matmuls but few blocks, compiled in its place to time them.
    lowered: called once Python's part, tracing and lowering, is done, or a kept step is found.
    """
    kernels = ThreadPoolExecutor()
    try:
        with ThreadPoolExecutor(1) as pool:
            first = few or lower()
            timed = pool.submit(_time_matmuls, first, timings) if timings else None
            whole = lower() if few else first  # while XLA times matmuls
            lowered()
            kernels.map(_compile, _kernels(whole))  # while XLA compiles the rest
        if not (timings and timed and timed.result()):
            return whole.compile()
        # The file's name is part of the compiled program's cache key, so all runs share one.
        times, named = timings.read_bytes(), timings
        if cache_is_used():
            shared = cache_folder(None) / "timings" / f"{hashlib.sha256(times).hexdigest()}.txt"
            with contextlib.suppress(OSError):  # the cache is full or not writable
                write_new(shared, times)
                named = shared
        return whole.compile({"xla_gpu_load_autotune_results_from": str(named)})
    finally:  # a program from JAX's cache needs no kernel
        kernels.shutdown(wait=False, cancel_futures=True)


def _kernels(lowered: jax.stages.Lowered) -> list[bytes]:
    """One program for each distinct kernel of a program, to compile in parallel.

    Mosaic caches what it compiles; XLA would compile one kernel after the other, 6 of the 15 s
    that it takes for the 1.3B of tests/accumulate_speed.py (H200, JAX 0.12.0.1).
    """
    module: Any = lowered.compiler_ir("stablehlo")
    found = {}

    def note(call):
        if "mosaic_gpu" in str(call.attributes.get("call_target_name")):
            found.setdefault(call.attributes["mhlo.backend_config"], call)
        return ir.WalkResult.ADVANCE

    def alone(call) -> Any:
        program, types = ir.Module.create(), [x.type for x in call.operands]
        with ir.InsertionPoint(program.body):
            main = func.FuncOp("main", (types, call.results.types))
        with ir.InsertionPoint(main.add_entry_block()):
            copy = call.clone()
            for i, argument in enumerate(main.arguments):
                copy.operands[i] = argument
            func.ReturnOp(copy.results)
        return program.operation.get_asm(binary=True)

    with module.context, ir.Location.unknown():
        module.operation.walk(note)
        return [alone(call) for call in found.values()]


def _compile(program: bytes) -> None:
    device = jax.local_devices()[0]
    device.client.compile_and_load(program, [device], get_compile_options(1, 1, [[device.id]]))


def _time_matmuls(lowered: jax.stages.Lowered, timings: Path) -> bool:
    """Times a program's matmul kernels unless the times are known; returns whether it has any.

    A new run takes the times of an earlier run of the same program from our cache.
    """
    device = jax.devices()[0]  # XLA refuses the times of another version, and ignores another GPU's
    versions = jax.__version__, device.client.platform_version, device.device_kind
    key = digest(lowered.as_text(), os.environ.get("XLA_FLAGS", ""), *versions)
    known = cache_folder(None) / "timings" / f"{key}.txt" if cache_is_used() else timings
    if not timings.exists() and os.access(known, os.R_OK):
        write_new(timings, known.read_bytes())
    if not timings.exists():
        # XLA times no kernels for a deterministic program, but takes the result of earlier timing.
        # This compilation only writes the times, under another name until the file is whole.
        timings.parent.mkdir(parents=True, exist_ok=True)
        # A new name each time avoids JAX's cache: a cached program would write nothing.
        partial = timings.with_name(f"partial-{uuid.uuid4().hex}.txt")  # .txt: as text
        lowered.compile(
            {
                "xla_gpu_deterministic_ops": False,
                "xla_gpu_dump_autotune_results_to": str(partial),
                "xla_gpu_mock_custom_calls": True,  # accepts our empty kernels
            }
        )
        if not partial.exists():  # there was nothing to choose
            return False
        partial.replace(timings)
    with contextlib.suppress(OSError):  # the cache is full or not writable
        write_new(known, timings.read_bytes())
    return True


def write_new(path: Path, content: bytes) -> None:
    """Writes a file unless it exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
