"""A process of gpu_run.py that measures: it compiles in parallel with others, but times alone.

    gpu_worker.py FIGURES gpu|dry NAME ...

Reports in lines of JSON.  After compiling it prints "ready" and waits for a line on standard input.
It measures a figure again if the first is worse than in FIGURES.
"""

import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import gpu_figures
from late_steps import take

# Batch sizes; T is the configuration's.
STEPS = {"gpt2_124m": 32, "llama3_124m": 32, "llama3_1b": 4, "vlstm_124m": 32}
UNTIMED, TIMED = 6, 30  # steps
TINY = {"n_layers": "1", "d_model": "64", "n_heads": "2", "vocab_size": "300", "max_seq_len": "32"}
# XLA chooses the matmuls of these by timing them, and would choose badly while others compile.
COMPILED_ALONE = ("mlp", "linear_cross_entropy")

Figures = dict[str, dict[str, float]]  # unit -> name -> figure


def ops() -> dict[str, tuple]:
    """The benchmark's cases at each of their sizes, by name."""
    from pallas_kernels.bench.cases import CASES
    from pallas_kernels.bench.report import text

    name = lambda case, sizes: " ".join(filter(None, (case.op, case.variant, text(sizes))))
    return {name(case, sizes): (case, sizes) for case in CASES for sizes in case.sizes}


def prepare_op(name: str, dry: bool) -> Callable[[], Figures]:
    """Compiles an op and makes its arrays on the host; returns a function that times kernels."""
    import jax

    from pallas_kernels.bench import compiling, operands, timing

    case, sizes = ops()[name]
    op = compiling.public(case, implementation=None if dry else "mosaic")
    if dry:
        sizes = operands.small(case, sizes)
        timing.gpu_ms = lambda f, *args: [timing.wall_ms(f, *args, calls=1)]
    elif not (decided := compiling.decided(case, sizes)).supported:
        raise NotImplementedError(decided.why)
    compiled = lambda: compiling.compile_op(case, op, operands.structs(case, sizes), keep=True)
    programs = None if case.op in COMPILED_ALONE else compiled()
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = operands.arrays(case, sizes)
        dy = operands.cotangents(compiling.on_xla(case), inputs)

    def measure():
        nonlocal programs
        programs = programs or compiled()
        on_device = jax.device_put((dy, inputs), jax.devices()[0])
        times, failed = timing.time_ops({"ours": programs}, *on_device)
        if failed:
            raise RuntimeError(failed["ours"])
        return {"ms": {f"{name} {direction}": ms for direction, ms in times["ours"].items()}}

    return measure


def steps() -> dict[str, tuple[str, int]]:
    """{name: (configuration, batch size)} of the timed training steps."""
    from jaxllm.config import load

    name = lambda config, batch: f"{config} B{batch} T{load(config).train.seq_len}"
    return {name(*step): step for step in STEPS.items()}


def prepare_step(name: str, dry: bool, more: dict[str, str] | None = None) -> Callable[[], Figures]:
    """Traces a training step; returns a function that times some steps on random tokens.

    more: further overrides of the configuration.
    """
    import jax
    import numpy as np

    from jaxllm.config import load
    from jaxllm.sharding import make_mesh
    from jaxllm.train.metrics import peak_memory
    from jaxllm.train.process import no_long_pauses
    from jaxllm.train.programs import compile_autotuned
    from jaxllm.train.step import Trainer
    from pallas_kernels.bench import operands
    from pallas_kernels.bench.case import A

    config, batch = steps()[name]
    overrides = {"train.batch_size": str(2 if dry else batch), "train.grad_accum": "1"}
    overrides |= more or {}
    if dry:
        overrides |= {f"model.{key}": value for key, value in TINY.items()}
        overrides |= {"train.seq_len": "32"}
        overrides |= {"model.n_kv_heads": "1", "model.d_ff": "64"} if "llama" in config else {}
    config = load(config, overrides)
    train, vocab = config.train, config.model.vocab_size
    trainer = Trainer(config, make_mesh(config.mesh))
    traced = trainer.trace_train_step()
    sizes = {"B": train.batch_size, "T": train.seq_len + 1, "V": vocab}
    with jax.default_device(jax.devices("cpu")[0]):
        tokens = [np.asarray(operands.array(A("B T", "int32", "zipf V"), sizes, i)) for i in (0, 1)]
    program = state = None

    def measure():
        nonlocal program, state
        if program is None:  # late, as for COMPILED_ALONE
            with tempfile.TemporaryDirectory() as folder:
                program = compile_autotuned(
                    traced.lower, None if dry else Path(folder) / "timings.txt"
                )
        state = state or trainer.init()
        rows = (tokens[i % 2] for i in range(UNTIMED + TIMED))
        batches = ({"tokens": x[:, :-1], "labels": x[:, 1:]} for x in rows)
        with no_long_pauses():
            state, metrics, seconds = take(program, state, map(trainer.put_batch, batches))
        values = metrics[-1]
        if values["skips"] or not values["loss"] < 2 * np.log(vocab):
            raise RuntimeError(f"does not train: {values}")
        jax.block_until_ready(state)  # whoever traces must not stop in a step
        speed = train.batch_size * train.seq_len / statistics.median(seconds[UNTIMED:])
        gib = peak_memory()
        return {"tokens/s": {name: speed}} | ({"GiB": {name: gib}} if gib else {})

    return measure


def measured(measure: Callable[[], Figures], stored: Figures) -> Figures:
    """Calls `measure`, again if a figure is worse than stored; returns the better figures."""
    first = measure()
    rows = gpu_figures.compare(first, stored, [], tuple(first))
    if not any((row.worse or 0) > gpu_figures.TOLERANCE for row in rows):
        return first
    second, best = measure(), {}
    for unit, figures in first.items():
        better = max if unit in gpu_figures.HIGHER_IS_BETTER else min
        best[unit] = {name: better(figure, second[unit][name]) for name, figure in figures.items()}
    return best


def versions() -> dict[str, str]:
    """Versions of the software that compiles and runs programs; call it after a compilation."""
    import jax
    import jaxlib
    from jax._src import lib

    from pallas_kernels.bench.share import driver

    found = {"JAX": jax.__version__, "jaxlib": jaxlib.__version__}

    def note(name: str, version: Callable[[], str]) -> None:
        try:
            found[name] = version()
        except Exception as e:  # a missing version must not lose the figures
            found[name] = f"unknown ({type(e).__name__})"

    if jax.default_backend() == "gpu":
        cuda, cudnn = (
            lib.cuda_versions.cuda_runtime_get_version,
            lib.cuda_versions.cudnn_get_version,
        )
        note("CUDA", lambda: f"{cuda() // 1000}.{cuda() % 1000 // 10}")
        note("cuDNN", lambda: f"{cudnn() // 10000}.{cudnn() // 100 % 100}.{cudnn() % 100}")
        note("ptxas", ptxas)
        note("nvJitLink", nvjitlink)
        note("driver", driver)
    return found


def ptxas() -> str:
    """The version of ptxas that XLA uses: JAX's, or else that on the path or of CUDA."""
    from jax._src import lib

    places = [f"{lib.cuda_path}/bin", *os.environ["PATH"].split(":"), "/usr/local/cuda/bin"]
    path = next(path for place in places if (path := Path(place) / "ptxas").exists())
    return re.search(r"V([\d.]+)", subprocess.check_output([path, "--version"], text=True))[1]


def nvjitlink() -> str:
    """The version of the library that this process has loaded."""
    path = re.search(r"/\S*libnvJitLink\S*", Path("/proc/self/maps").read_text())[0]
    major, minor = ctypes.c_uint(), ctypes.c_uint()
    ctypes.CDLL(path).nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def main() -> None:
    # Output of libraries goes to the log; this stream has only lines of JSON.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    say = lambda **what: print(json.dumps(what), file=lines, flush=True)
    folder, dry, names = Path(sys.argv[1]), sys.argv[2] == "dry", sys.argv[3:]
    prepare = prepare_op
    if names and names[0] in steps():
        from jaxllm.train.process import set_xla_flags

        set_xla_flags(deterministic=True)
        prepare = prepare_step
    import jax

    waiting = {}

    def attempt(name: str, f: Callable) -> None:
        try:
            f()
        except Exception as e:  # the other names continue
            traceback.print_exc()
            say(failed=name, why=f"{type(e).__name__}: {str(e).partition(chr(10))[0][:200]}")

    for name in names:
        attempt(name, lambda name=name: waiting.update({name: prepare(name, dry)}))
    device, found = jax.devices()[0].device_kind, versions()
    before = gpu_figures.read(gpu_figures.path_of(folder, device, found["JAX"]))
    say(ready=True, device=device, versions=found)
    sys.stdin.readline()
    for name in list(waiting):
        measure = waiting.pop(name)  # `del` below frees it with its arrays
        attempt(name, lambda m=measure: say(figures=measured(m, before.get("figures", {}))))
        del measure


if __name__ == "__main__":
    main()
