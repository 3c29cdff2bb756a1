"""Compiles and launches kernels: Mosaic's by JAX's CUDA plugin, glue by NVRTC and the driver.

launch(pointers, count, stream) takes the address of the array of all arguments' addresses.
JAX is not imported: its plugin is a library with a C function.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from pallas_kernels.torch.glue import CUDA
from pallas_kernels.torch.program import Glue, Kernel

_P = ctypes.c_void_p
_lock = threading.Lock()


def _folder(package: str) -> Path | None:
    return next(filter(Path.is_dir, (Path(x, *package.split(".")) for x in sys.path)), None)


@functools.cache
def _compiler() -> Callable:
    """MosaicGpuCompile of JAX's plugin, which learns from the environment where its files lie."""
    plugin, runtime = _folder("jax_plugins.xla_cuda13"), _folder("jax_cuda13_plugin")
    if plugin is None or runtime is None:
        raise RuntimeError("no jax_plugins.xla_cuda13: pip install 'jaxllm[torch]'")
    cuda = os.environ.get("CUDA_ROOT") or _folder("nvidia.cu13") or "/usr/local/cuda"
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime / "libmosaic_gpu_runtime.so")
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(cuda)
    compile_ = ctypes.CDLL(str(plugin / "xla_cuda_plugin.so")).MosaicGpuCompile
    compile_.argtypes, compile_.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.POINTER(_P)
    return compile_


@functools.cache
def launcher(kernel: Kernel, device: int) -> Callable:
    """The launch of a kernel compiled for this device; compiles it once a process."""
    compile_ = _compiler()
    with _lock:
        made = compile_(kernel.module, len(kernel.module))
    if not made:
        why = "is ptxas on PATH?  TF_CPP_MIN_LOG_LEVEL=0 in the environment shows Mosaic's reason"
        raise RuntimeError(f"{kernel.name} does not compile for cuda:{device}: {why}")
    function = made[0]
    if version("jaxlib").startswith("0.11."):
        call = ctypes.CFUNCTYPE(None, _P, _P, _P)(made[1])
        return lambda pointers, count, stream: call(function, stream, pointers)
    whole = made[2]  # since jaxlib 0.12 a launch takes also the kernel and the device
    call = ctypes.CFUNCTYPE(None, _P, _P, _P, _P, ctypes.c_int)(made[1])
    return lambda pointers, count, stream: call(whole, function, stream, pointers, device)


def binary(text: str) -> bytes:
    """The function compiled for an H100 (sm_90) by PyTorch's NVRTC; needs no GPU."""
    nvrtc, made, size = ctypes.CDLL("libnvrtc.so.13"), _P(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=sm_90", b"--fmad=false")
    nvrtc.nvrtcCreateProgram(ctypes.byref(made), (CUDA + text).encode(), b"glue.cu", 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(made, 2, options)
    kind = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{kind}Size")(made, ctypes.byref(size))
    out = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(made, out)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(made))
    if failed:
        raise RuntimeError(f"NVRTC error {failed}: {out.value.decode()[:2000]}")
    return out.raw


def glue_launcher(glue: Glue, device: int) -> Callable:
    """The launch of a function, loaded into the current context."""
    driver, module, function = ctypes.CDLL("libcuda.so.1"), _P(), _P()
    error = driver.cuModuleLoadData(ctypes.byref(module), glue.binary)
    error = error or driver.cuModuleGetFunction(ctypes.byref(function), module, b"glue")
    call, handle, blocks = driver.cuLaunchKernel, function.value, glue.blocks
    call.argtypes = [_P, *[ctypes.c_uint] * 7, _P, _P, _P]

    def checked(error):
        if error:
            raise RuntimeError(f"glue on cuda:{device}: CUDA error {error}")

    def launch(pointers, count, stream):
        # The one argument is a struct of all addresses; where it lies is told behind it.
        checked(call(handle, blocks, 1, 1, 256, 1, 1, 0, stream, pointers + 8 * count, None))

    checked(error)
    return launch if blocks else lambda *_: None
