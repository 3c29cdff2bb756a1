"""Compiles kernels for NVIDIA GPUs without having them: registers, spills, warnings of ptxas.

    uv run --extra cuda13 python tests/compile_ahead.py          those for sm_80, on sm_80 and sm_89
    uv run --extra cuda13 python tests/compile_ahead.py gelu rms_norm --gpu sm_90 sm_100
    uv run --extra cuda13 python tests/compile_ahead.py attention:0:1 vlstm --all --gpu sm_90
    uv run --extra cuda13 python tests/compile_ahead.py learn.matmul --all --gpu sm_90

Compiles forward and backward at the first shape of the benchmark's table; op:case:size selects
another shape, --all selects all.  learn.NAME:size:rung is a rung of a ladder (learn/README.md).
For other GPUs than Hopper, and anywhere with JAXLLM_KERNELS=general in the environment, an op with
two forms has its general one.  Each kernel is compiled as a whole program and relocatably (-c), as
nvJitLink does, which JAX 0.12 calls; PTXAS=path:path names other compilers than the installed one.
The exit status is 1 if a kernel spills or ptxas warns.  It needs no GPU, only JAX's CUDA wheels.
LLVM ends the process if a kernel does not compile, so each case gets its own process.
"""

import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from scripts import Parser, one_of, run

from jaxllm.errors import InputError

GPUS = {
    "sm_80": "A100",
    "sm_86": "RTX 3090",
    "sm_89": "RTX 4090",
    "sm_90": "H100",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
}
HARMLESS = {"C7519"}  # ptxas inserts a warpgroup.arrive, which is one cheap instruction

# XLA requires all of these; only the compute capability affects a Mosaic kernel.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 1 }}
device_description_str: "{name}"
"""


class Build(NamedTuple):
    """The result of one compiler for one kernel."""

    kernel: str
    compiler: str  # "13.0.88", or "13.0.88 -c" for relocatable code
    registers: int
    spilled: int  # bytes
    complaints: tuple[str, ...]  # "C7504 'setmaxnreg' ignored to maintain ..."

    def bad(self) -> bool:
        """Whether the kernel is slow because it spills registers or serializes wgmma."""
        return bool(self.spilled or self.complaints)

    def __str__(self) -> str:
        complaints = "".join(f"; {complaint}" for complaint in self.complaints)
        return (
            f"{self.kernel}, ptxas {self.compiler}: {self.registers} registers, "
            f"{self.spilled} bytes spilled{complaints}"
        )


class Kernel(NamedTuple):
    """The PTX of one kernel of a case, as Mosaic passes it to the compiler."""

    name: str
    ptx: Path
    shared: int | None  # bytes of shared memory per block, if JAX reports it


def ops(gpu: str) -> list[str]:
    """The ops whose kernels need this GPU: sm_80: neither TMA nor wgmma; sm_90a: wgmma."""
    from pallas_kernels.bench.cases import CASES

    return list(dict.fromkeys(case.op for case in CASES if case.gpu == gpu))


def specs(op: str, every: bool) -> list[str]:
    """op:case:size of the op's first shape, or of all its shapes; keeps a complete op:case:size.

    Of shapes that differ in a few numbers of the program alone, only the first counts.
    """
    from pallas_kernels.bench.cases import CASES

    if ":" in op:
        return [op]
    if op.startswith("learn."):
        from learn import ladder

        return [f"{op}:0:{i}" for i, _ in enumerate(ladder.rungs(ladder.find(op[6:])), 1)]
    found = {}
    for i, case in enumerate(case for case in CASES if case.op == op):
        for j, size in enumerate(case.sizes):
            program = (i, j)
            # Pads up to 8 rows to 8, and loops over K and N; many rows may be split along K.
            if op == "quantized_linear":
                program = (i, size["M"] > 8, size["M"] > 64 and (size["M"], size["K"]))
            if op == "decode_attention":  # loops over S
                program = (i, size["D"])
            found.setdefault(program, f"{op}:{i}:{j}")
    return list(found.values()) if every else list(found.values())[:1]


def ptxas() -> list[str]:
    """The compilers in PTXAS, or else the one installed with JAX."""
    if "PTXAS" in os.environ:
        return [str(Path(path).resolve()) for path in os.environ["PTXAS"].split(os.pathsep)]
    spec = importlib.util.find_spec("nvidia")  # pip's CUDA wheels
    places = spec.submodule_search_locations or () if spec else ()
    found = [path for place in places for path in Path(place).glob("*/bin/ptxas")]
    return [str(path) for path in found or [shutil.which("ptxas")] if path][:1]


def needs_cuda_wheels() -> None:
    """Raises InputError if XLA cannot compile for GPUs here."""
    plugins = importlib.util.find_spec("jax_plugins")
    places = plugins.submodule_search_locations or () if plugins else ()
    if not any([*Path(place).glob("xla_cuda*")] for place in places):
        raise InputError("JAX's CUDA wheels are missing: pip install 'jaxllm[cuda13]'")


def version(compiler: str) -> str:
    ran = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return re.search(r"V(\d+\.\d+\.\d+)", ran.stdout)[1]


def dump(spec: str, gpu: str, compiler: str, folder: str, resources: bool) -> list[Kernel]:
    """The kernels of op:case:size; raises RuntimeError if one does not compile to PTX.

    resources: reports their shared memory.  JAX then also writes all its other dumps, which takes
    a quarter to two fifths of the time.
    """
    environment = {
        "XLA_FLAGS": "",  # the tests' flags disable optimizations
        "MOSAIC_GPU_DUMP_PTX": "1",
        "JAXLLM_KERNELS": os.environ.get("JAXLLM_KERNELS", "" if gpu == "sm_90" else "general"),
        "PATH": os.pathsep.join([str(Path(compiler).parent), os.environ["PATH"]]),
    }
    if resources:
        environment["MOSAIC_GPU_DUMP_TO"] = folder
    # The processes are forks of one that has imported JAX, which takes 2 s, but not started it.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["pallas_kernels.bench.run"])
    ran = forks.Process(target=compile_here, args=(spec, gpu, environment, folder))
    ran.start()
    ran.join()
    output, errors = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    shared = {}  # the largest of the kernels with the same name
    for path in Path(folder).glob("*.resources.txt"):
        name = re.sub(r"_\d+$", "", path.name.removesuffix(".resources.txt"))
        found = re.search(r"smem_scratch_bytes=(\d+)", path.read_text())
        shared[name] = max(shared.get(name, 0), int(found[1]))
    kernels = []
    for text in re.split(r"(?=^// Generated by LLVM)", output, flags=re.MULTILINE)[1:]:
        name = re.search(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", text)[1]
        path = Path(folder) / f"{len(kernels)}.ptx"
        path.write_text(text[: text.rindex("}") + 1])
        kernels.append(Kernel(name, path, shared.get(name)))
    kernels.sort()
    if ran.exitcode or not kernels:
        lines = errors.splitlines()
        why = [line for line in lines if "error" in line.lower()] or lines[-1:] or ["no kernel"]
        raise RuntimeError(f"{spec} does not compile for {gpu}: {why[0][:300]}")
    return kernels


def build(kernel: Kernel, compiler: str, relocatable: bool) -> Build:
    target = re.search(r"^\.target (\w+)", kernel.ptx.read_text(), re.MULTILINE)[1]
    how = ["-c"] if relocatable else []
    command = [compiler, *how, "-v", "--gpu-name", target, str(kernel.ptx), "-o", os.devnull]
    ran = subprocess.run(command, capture_output=True, text=True)
    output = ran.stdout + ran.stderr
    registers = re.search(r"Used (\d+) registers", output)
    name = " ".join([version(compiler), *how])
    if ran.returncode or not registers:
        return Build(kernel.name, name, 0, 0, (f"FAILED: {output[:300]}",))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", output)))
    complaints = [
        f"{code} {re.sub(' (in|for) the function .*', '', text)}"
        for code, text in re.findall(r"\((C\d+)\) (?:Potential Performance Loss: )?(.*)", output)
        if code not in HARMLESS
    ]
    return Build(kernel.name, name, int(registers[1]), spilled, tuple(dict.fromkeys(complaints)))


def builds(
    spec: str,
    gpu: str,
    compilers: list[str],
    resources: bool = False,
    relocatable: tuple[bool, ...] = (False, True),
) -> list[tuple[Kernel, list[Build]]]:
    """Compiles each kernel of op:case:size with each compiler, whole, relocatably, or both."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            (kernel, [build(kernel, path, c) for path in compilers for c in relocatable])
            for kernel in dump(spec, gpu, compilers[0], folder, resources)
        ]


def compile_here(spec: str, gpu: str, environment: dict[str, str], folder: str) -> None:
    """Compiles op:case:size; the PTX of its kernels goes to `stdout` in the folder."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    major, minor = int(gpu[3:-1]), int(gpu[-1])
    # Mosaic compiles for sm_90a rather than sm_90, and so on.
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    target = TARGET.format(major=major, minor=minor, features=features, name=GPUS[gpu])
    devices = topologies.get_topology_desc(
        "", "cuda", target_config=target, topology="1x1x1"
    ).devices
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    function, structs = program(spec)
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), structs
    )
    with jax.default_device(devices[0]):  # Mosaic reads its compute capability
        lowered = jax.jit(function, out_shardings=sharding).lower(*arguments)
        # Lowering has written the resources of the kernels.  With the folder, compilation would
        # spend half of its time on 100 MB of MLIR; without it, the PTX goes to stdout.
        os.environ.pop("MOSAIC_GPU_DUMP_TO", None)
        lowered.compile()


def program(spec: str):
    """The function of op:case:size or of a rung, and the shapes of its arguments."""
    import jax

    op, nth, size = spec.split(":")
    if op.startswith("learn."):
        from learn import ladder

        own = ladder.find(op[6:])
        return ladder.whole(own, int(size)), jax.eval_shape(lambda: own.inputs(own.sizes[int(nth)]))
    from pallas_kernels.bench import compiling, operands
    from pallas_kernels.bench.cases import CASES

    case = [case for case in CASES if case.op == op][int(nth)]
    kernel, inputs = (
        compiling.public(case, implementation="mosaic"),
        operands.structs(case, case.sizes[int(size)]),
    )

    def both(dy, *inputs):
        return compiling.both(kernel, dy, *inputs)

    return both, (jax.eval_shape(kernel, *inputs), *inputs)


def table(spec: str, gpu: str, compilers: list[str]) -> tuple[list[str], list[Build]]:
    """A line for each kernel, and the results of all compilers."""
    lines, made = [], []
    for kernel, some in builds(spec, gpu, compilers, resources=True):
        cells = []
        for b in some:
            spilled = f"+{b.spilled} spilled" if b.spilled else ""
            codes = ",".join(complaint.split()[0] for complaint in b.complaints)
            cells.append(f"{f'{b.registers}{spilled} {codes}':<29}")
        shared = "" if kernel.shared is None else f"{kernel.shared / 1024:.0f} KB"
        lines.append(f"{gpu:<6}  {spec:<17}  {kernel.name:<24}  {shared:>6}  {''.join(cells)}")
        made += some
    return [line.rstrip() for line in lines], made


def main() -> int:
    from pallas_kernels.bench.cases import CASES

    parser = Parser(__doc__)
    parser.add_argument("op", nargs="*", help="op or op:case:size")
    parser.add_argument("--gpu", nargs="*", choices=GPUS, default=["sm_80", "sm_89"])
    parser.add_argument("--all", action="store_true", help="every shape of the benchmark")
    arguments = parser.parse_args()
    for op in arguments.op:
        if not op.startswith("learn."):
            one_of("op", op.partition(":")[0], dict.fromkeys(case.op for case in CASES))
    compilers = ptxas()
    if not compilers:
        parser.error("no ptxas: install JAX's CUDA wheels, or name one in PTXAS")
    needs_cuda_wheels()
    names = [" ".join([version(c), *how]) for c in compilers for how in ([], ["-c"])]
    heads = "".join(f"{f'ptxas {name}':<29}" for name in names)
    print(f"{'GPU':<6}  {'op:case:size':<17}  {'kernel':<24}  shared  {heads}".rstrip())
    chosen = arguments.op or ops("sm_80")
    work = [(s, g) for g in arguments.gpu for op in chosen for s in specs(op, arguments.all)]
    failed, meanings = False, {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for running in [pool.submit(table, *each, compilers) for each in work]:
            try:
                lines, made = running.result()
            except RuntimeError as error:
                lines, made, failed = [f"FAILED: {error}"], [], True
            print("\n".join(lines), flush=True)
            failed |= any(b.bad() for b in made)
            meanings |= dict(c.split(" ", 1) for b in made for c in b.complaints)
    for code, text in sorted(meanings.items()):
        print(f"{code}: {text}")
    return int(failed)


if __name__ == "__main__":
    run(main)
