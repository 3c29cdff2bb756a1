"""Compiles kernels for NVIDIA GPUs that are not there: registers, spills, complaints of ptxas.

    uv run --extra cuda13 python tests/compile_ahead.py          those for sm_80, on sm_80 and sm_89
    uv run --extra cuda13 python tests/compile_ahead.py gelu rms_norm --gpu sm_90 sm_100
    uv run --extra cuda13 python tests/compile_ahead.py attention:0:1 vlstm --all --gpu sm_90

Forward and backward at the first shape of the benchmark's table; op:case:size names another one,
--all takes them all.  Each kernel is compiled as a whole program and relocatably (-c), as nvJitLink
does, which JAX 0.12 calls; PTXAS=path:path names other compilers than the installed one.  Exit
status 1 where one spills or complains.  Needs no GPU, only JAX's CUDA wheels.  A kernel that does
not compile ends its process (LLVM does), so that each case has one of its own.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GPUS = {
    "sm_80": "A100",
    "sm_89": "RTX 4090",
    "sm_90": "H100",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
}
SM_80 = ("gelu", "swiglu", "rope", "encoder", "cross_entropy")  # need neither TMA nor wgmma
WGMMA = ("attention", "attention_qkv", "vlstm", "swiglu_linear", "gelu_linear")
HARMLESS = {"C7519"}  # a warpgroup.arrive that ptxas puts in: one cheap instruction

# What XLA wants to know; of all this only the compute capability decides about a Mosaic kernel.
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
    """What one compiler made of one kernel."""

    kernel: str
    compiler: str  # "13.0.88", or "13.0.88 -c": relocatably
    registers: int
    spilled: int  # bytes
    complaints: tuple[str, ...]  # "C7504 'setmaxnreg' ignored to maintain ..."

    def bad(self) -> bool:
        """Whether it runs slowly: registers in memory, or wgmma one after the other."""
        return bool(self.spilled or self.complaints)

    def __str__(self) -> str:
        said = "".join(f"; {complaint}" for complaint in self.complaints)
        return (
            f"{self.kernel}, ptxas {self.compiler}: {self.registers} registers, "
            f"{self.spilled} bytes spilled{said}"
        )


class Kernel(NamedTuple):
    """One kernel of a case, as Mosaic gives it to the compiler."""

    name: str
    ptx: Path
    shared: int | None  # bytes of shared memory a block, where JAX tells


def specs(op: str, every: bool) -> list[str]:
    """op:case:size of the op's first shape, or of all its shapes; one that is named whole stays."""
    from pallas_kernels.bench.cases import CASES

    if ":" in op:
        return [op]
    cases = [case for case in CASES if case.op == op]
    found = [f"{op}:{i}:{j}" for i, case in enumerate(cases) for j in range(len(case.sizes))]
    return found if every else found[:1]


def ptxas() -> list[str]:
    """The compilers that PTXAS names, or else the one that was installed with JAX."""
    if "PTXAS" in os.environ:
        return [str(Path(path).resolve()) for path in os.environ["PTXAS"].split(os.pathsep)]
    spec = importlib.util.find_spec("nvidia")  # pip's CUDA wheels
    places = spec.submodule_search_locations or () if spec else ()
    found = [path for place in places for path in Path(place).glob("*/bin/ptxas")]
    return [str(path) for path in found or [shutil.which("ptxas")] if path][:1]


def version(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return re.search(r"V(\d+\.\d+\.\d+)", said.stdout)[1]


def dump(spec: str, gpu: str, compiler: str, folder: str) -> list[Kernel]:
    """The kernels of op:case:size; raises RuntimeError where one does not get as far as PTX."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",  # those of the tests compile without care
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_TO": folder,
        "PATH": os.pathsep.join([str(Path(compiler).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, spec, "--gpu", gpu, "--here"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    shared = {}  # of kernels of one name the most
    for path in Path(folder).glob("*.resources.txt"):
        name = re.sub(r"_\d+$", "", path.name.removesuffix(".resources.txt"))
        told = re.search(r"smem_scratch_bytes=(\d+)", path.read_text())
        shared[name] = max(shared.get(name, 0), int(told[1]))
    kernels = []
    for text in re.split(r"(?=^// Generated by LLVM)", ran.stdout, flags=re.MULTILINE)[1:]:
        name = re.search(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", text)[1]
        path = Path(folder) / f"{len(kernels)}.ptx"
        path.write_text(text[: text.rindex("}") + 1])
        kernels.append(Kernel(name, path, shared.get(name)))
    kernels.sort()
    if ran.returncode or not kernels:
        said = ran.stderr.splitlines()
        why = [line for line in said if "error" in line.lower()] or said[-1:] or ["no kernel"]
        raise RuntimeError(f"{spec} does not compile for {gpu}: {why[0][:300]}")
    return kernels


def build(kernel: Kernel, compiler: str, relocatable: bool) -> Build:
    target = re.search(r"^\.target (\w+)", kernel.ptx.read_text(), re.MULTILINE)[1]
    how = ["-c"] if relocatable else []
    command = [compiler, *how, "-v", "--gpu-name", target, str(kernel.ptx), "-o", os.devnull]
    ran = subprocess.run(command, capture_output=True, text=True)
    said = ran.stdout + ran.stderr
    registers = re.search(r"Used (\d+) registers", said)
    name = " ".join([version(compiler), *how])
    if ran.returncode or not registers:
        return Build(kernel.name, name, 0, 0, (f"FAILED: {said[:300]}",))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    complaints = re.findall(r"\((C\d+)\) (?:Potential Performance Loss: )?(.*)", said)
    told = [
        f"{code} {re.sub(' (in|for) the function .*', '', text)}"
        for code, text in complaints
        if code not in HARMLESS
    ]
    return Build(kernel.name, name, int(registers[1]), spilled, tuple(dict.fromkeys(told)))


def builds(spec: str, gpu: str, compilers: list[str]) -> list[tuple[Kernel, list[Build]]]:
    """What each compiler makes of each kernel of op:case:size, whole and relocatably."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            (kernel, [build(kernel, path, c) for path in compilers for c in (False, True)])
            for kernel in dump(spec, gpu, compilers[0], folder)
        ]


def compile_here(spec: str, gpu: str) -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pallas_kernels.bench import run
    from pallas_kernels.bench.cases import CASES

    major, minor = int(gpu[3:-1]), int(gpu[-1])
    # sm_90a rather than sm_90, and so on: what Mosaic asks ptxas for.
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    target = TARGET.format(major=major, minor=minor, features=features, name=GPUS[gpu])
    devices = topologies.get_topology_desc(
        "", "cuda", target_config=target, topology="1x1x1"
    ).devices
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    op, nth, size = spec.split(":")
    case = [case for case in CASES if case.op == op][int(nth)]

    kernel = run.public(case, implementation="mosaic")

    def both(dy, *inputs):
        return run.both(kernel, dy, *inputs)

    inputs = run.structs(case, case.sizes[int(size)])
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        (jax.eval_shape(kernel, *inputs), *inputs),
    )
    with jax.default_device(devices[0]):  # Mosaic asks the default device for its capability
        lowered = jax.jit(both, out_shardings=sharding).lower(*arguments)
        # Lowering has written what the kernels need.  In that folder compiling would write 100 MB
        # of MLIR beside the PTX, for half of its time; without it the PTX goes to stdout.
        os.environ.pop("MOSAIC_GPU_DUMP_TO", None)
        lowered.compile()


def table(spec: str, gpu: str, compilers: list[str]) -> tuple[list[str], list[Build]]:
    """A line for each kernel, and all that the compilers made."""
    lines, made = [], []
    for kernel, some in builds(spec, gpu, compilers):
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
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="*", default=SM_80, help="op or op:case:size")
    parser.add_argument("--gpu", nargs="*", choices=GPUS, default=["sm_80", "sm_89"])
    parser.add_argument("--all", action="store_true", help="every shape of the benchmark")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        compile_here(arguments.op[0], arguments.gpu[0])
        return 0
    compilers = ptxas()
    if not compilers:
        parser.error("no ptxas: install JAX's CUDA wheels, or name one in PTXAS")
    names = [" ".join([version(c), *how]) for c in compilers for how in ([], ["-c"])]
    heads = "".join(f"{f'ptxas {name}':<29}" for name in names)
    print(f"{'GPU':<6}  {'op:case:size':<17}  {'kernel':<24}  shared  {heads}".rstrip())
    work = [(s, g) for g in arguments.gpu for op in arguments.op for s in specs(op, arguments.all)]
    failed, said = False, {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for running in [pool.submit(table, *each, compilers) for each in work]:
            try:
                lines, made = running.result()
            except RuntimeError as error:
                lines, made, failed = [f"FAILED: {error}"], [], True
            print("\n".join(lines), flush=True)
            failed |= any(b.bad() for b in made)
            said |= dict(c.split(" ", 1) for b in made for c in b.complaints)
    for code, text in sorted(said.items()):
        print(f"{code}: {text}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
