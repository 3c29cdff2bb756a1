"""Mosaic GPU kernels that nvJitLink compiles lose setmaxnreg: python docs/nvjitlink.py.

Without a GPU: the PTX of a matmul, compiled ahead of time, and what ptxas says of it, whole and -c.
With an H100: the same matmul timed as JAX compiles it, and once more with libnvJitLink hidden.
Needs jax[cuda13] and nothing else; without a GPU jax-cuda13-plugin, -pjrt, nvidia-cuda-nvcc and, to
see what nvJitLink says, nvidia-nvjitlink.  docs/nvjitlink.md is the report that goes with it.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

N, ROWS, COLS, STEP, STAGES = 6144, 128, 192, 64, 3  # two computing warpgroups of ROWS rows a block
TARGET = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 core_count: 132
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  fpus_per_core: 128 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES } }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 } device_description_str: "H100" """


def matmul():
    """a b^T of bfloat16 (N, N): one warpgroup loads, two multiply, 192 accumulators a thread."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(a, b, out, a_smem, b_smem, out_smem, full, free):
        wg, row, col = (lax.axis_index(name) for name in ("wg", "row", "col"))
        steps = N // STEP

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, steps)
            def _(n):
                slot, at = lax.rem(n, STAGES), pl.ds(n * STEP, STEP)
                pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                rows, cols = pl.ds(row * 2 * ROWS, 2 * ROWS), pl.ds(col * COLS, COLS)
                plgpu.copy_gmem_to_smem(a.at[rows, at], a_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b.at[cols, at], b_smem.at[slot], full.at[slot])

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(240, action="increase")
            mine = pl.ds(wg * ROWS, ROWS)

            def multiply(acc):
                @pl.loop(0, steps)
                def _(n):
                    slot = lax.rem(n, STAGES)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a_smem.at[slot, mine], b_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)
                    pl.when(n > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(n - 1, STAGES)]))

                return acc[...]

            product = pl.run_scoped(multiply, plgpu.ACC((ROWS, COLS), jnp.float32))
            rows = pl.ds(row * 2 * ROWS + wg * ROWS, ROWS)
            for c in range(0, COLS, STEP):
                out_smem[mine] = product[:, c : c + STEP].astype(jnp.bfloat16)
                plgpu.commit_smem()
                cols = pl.ds(col * COLS + c, STEP)
                plgpu.copy_smem_to_gmem(out_smem.at[mine], out.at[rows, cols])
                plgpu.wait_smem_to_gmem(0)

    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=tiles)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N, N), jnp.bfloat16),
        scratch_types=[
            smem(STAGES, 2 * ROWS, STEP),
            smem(STAGES, COLS, STEP),
            smem(2 * ROWS, STEP),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
        grid=(N // (2 * ROWS), N // COLS),
        grid_names=("row", "col"),
        num_threads=3,
        thread_name="wg",
    )


def compile_ahead() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        "", "cuda", target_config=TARGET, topology="1x1x1"
    ).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    a = jax.ShapeDtypeStruct((N, N), jnp.bfloat16, sharding=sharding)
    with jax.default_device(devices[0]):
        jax.jit(matmul(), out_shardings=sharding).lower(a, a).compile()


def measure() -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    a, b = (jax.random.normal(jax.random.key(i), (N, N), jnp.bfloat16) for i in range(2))
    f = jax.jit(matmul())
    want = jnp.matmul(a, b.T, preferred_element_type=jnp.float32)
    error = jnp.abs(f(a, b) - want).max() / jnp.abs(want).max()
    ms = sorted(profiler.measure(f, iterations=20)(a, b)[1])[10]
    print(f"{ms:.3f} ms, {2 * N**3 / ms / 1e9:.0f} TFLOP/s, error {error:.4f}")


def installed(pattern: str) -> list[Path]:
    """Files of pip's CUDA wheels."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    return [path for place in places or () for path in Path(place).glob(pattern)]


def hide_nvjitlink() -> None:
    """Lets JAX take ptxas in this process, and the libraries of CUDA still find libnvJitLink.

    XLA asks libnvJitLink for its version and does without it where that fails.  A copy without this
    one symbol, loaded before JAX, is what everyone who looks for that name then gets.
    """
    for path in installed("*/lib/libnvJitLink.so.*"):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            name = b"\0nvJitLinkVersion\0"
            copy.write_bytes(path.read_bytes().replace(name, b"\0nvJitLinkHidden_\0"))
            ctypes.CDLL(str(copy), mode=ctypes.RTLD_GLOBAL)


def complaints(said: str) -> list[str]:
    spills = re.findall(r"\d+ bytes spill stores", said)[:1]
    codes = re.findall(r"\((C75\d\d)\) Potential Performance Loss: (.{,75})", said)
    return spills + [f"{code} {text}" for code, text in codes]


def show(who: str, lines: list[str]) -> None:
    print(f"{who}:", *lines, sep="\n    ")


def child(what: str, **environment: str) -> str:
    """What this program says in a process of its own, JAX's log of compilation included."""
    command = [sys.executable, __file__, *what.split()]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(ran.stdout + ran.stderr)
    return ran.stdout


def main() -> None:
    import jax
    import jaxlib

    if not importlib.util.find_spec("jax_cuda13_plugin"):
        sys.exit("error: needs jax[cuda13]: uv run --extra cuda13 python docs/nvjitlink.py")
    print(f"JAX {jax.__version__}, jaxlib {jaxlib.__version__}, on {jax.devices()[0].device_kind}")
    if jax.default_backend() == "gpu":
        print("as JAX compiles it:    ", child("measure"), end="")
        print("libnvJitLink is hidden:", child("measure hidden"), end="")
    for how in ("", " hidden"):
        with tempfile.TemporaryDirectory() as folder:
            dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
            # Not MOSAIC_GPU_DUMP_TO, which also disassembles, and leaves /tmp/mosaic-gpu-* behind.
            said = child("ahead" + how, JAX_PLATFORMS="cpu", **dumps)
            ptx, end = Path(folder) / "body.ptx", said.rindex("}") + 1
            ptx.write_text(said[said.index("// Generated by LLVM") : end])
            show("JAX" + " without libnvJitLink" * bool(how), complaints(said[end:]))
            ptxas = (installed("*/bin/ptxas") or [shutil.which("ptxas")])[0]
            for option in ([], ["-c"]) if how else ():  # PTX of a version that this ptxas reads
                command = [ptxas, *option, "-v", "--gpu-name", "sm_90a", ptx, "-o", os.devnull]
                said = subprocess.run(command, capture_output=True, text=True).stderr
                show(" ".join(["ptxas", *option]), complaints(said))


if __name__ == "__main__":
    if "hidden" in sys.argv:
        hide_nvjitlink()
    if "ahead" in sys.argv:
        compile_ahead()
    elif "measure" in sys.argv:
        measure()
    else:
        main()
