"""Compiles kernels for NVIDIA GPUs that are not there: registers and spills, from ptxas itself.

    uv run --extra cuda13 python tests/compile_ahead.py          those for sm_80, on sm_80 and sm_89
    uv run --extra cuda13 python tests/compile_ahead.py gelu rms_norm --gpu sm_90 sm_100

Forward and backward at the first shape of the benchmark's table.  Needs no GPU, only JAX's CUDA
wheels.  An op that does not compile ends its process (LLVM does), so that each has one of its own.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

GPUS = {
    "sm_80": "A100",
    "sm_89": "RTX 4090",
    "sm_90": "H100",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
}
SM_80 = ("gelu", "swiglu", "rope", "encoder", "cross_entropy")  # need neither TMA nor wgmma

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


def compile_op(op: str, gpu: str) -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import pallas_kernels
    from pallas_kernels import benchmark
    from pallas_kernels.benchmark_cases import CASES

    major, minor = int(gpu[3:-1]), int(gpu[-1])
    # sm_90a rather than sm_90, and so on: what Mosaic asks ptxas for.
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    target = TARGET.format(major=major, minor=minor, features=features, name=GPUS[gpu])
    devices = topologies.get_topology_desc(
        "", "cuda", target_config=target, topology="1x1x1"
    ).devices
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    case = next(case for case in CASES if case.op == op)

    def kernel(*inputs):
        return getattr(pallas_kernels, op)(*inputs, **case.options, backend="mosaic")

    def both(dy, *inputs):
        return benchmark.both(kernel, dy, *inputs)

    inputs = benchmark.structs(case, case.sizes[0])
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        (jax.eval_shape(kernel, *inputs), *inputs),
    )
    with jax.default_device(devices[0]):  # Mosaic asks the default device for its capability
        jax.jit(both, out_shardings=sharding).lower(*arguments).compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="*", default=SM_80)
    parser.add_argument("--gpu", nargs="*", choices=GPUS, default=["sm_80", "sm_89"])
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        compile_op(arguments.op[0], arguments.gpu[0])
        return 0
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    failed = False
    for gpu in arguments.gpu:
        for op in arguments.op:
            command = [sys.executable, __file__, op, "--gpu", gpu, "--here"]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True)
            said = ran.stdout + ran.stderr
            kernels = re.findall(
                r"entry function '(\w+)_mosaic_gpu_kernel'.*?(\d+) bytes spill stores"
                r".*?Used (\d+) registers",
                said,
                re.DOTALL,
            )
            for name, spilled, registers in kernels:
                print(f"{gpu}  {name}: {registers} registers, {spilled} bytes spilled", flush=True)
            if ran.returncode or not kernels:
                failed = True
                why = [line for line in said.splitlines() if "error" in line.lower()]
                print(f"{gpu}  {op}: FAILED, {why[0][:200] if why else 'no kernel'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
