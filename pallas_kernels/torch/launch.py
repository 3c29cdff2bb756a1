"""Launches of kernels: Mosaic's by JAX's CUDA plugin, glue by NVRTC and the driver.

A launch takes the address of an array with the addresses of all arguments, and a stream.
"""

import ctypes
import functools
import importlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from pallas_kernels.torch.glue import Glue
from pallas_kernels.torch.program import Kernel


@functools.cache
def _library():
    """MosaicGpuCompile of JAX's CUDA plugin, and whether launches take what it does since 0.12."""
    from jax._src.lib import version

    try:
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
    except ImportError:
        raise RuntimeError("no jax_plugins.xla_cuda13: pip install 'jaxllm[torch]'") from None
    compile_ = ctypes.CDLL(str(plugin._get_library_path())).MosaicGpuCompile
    compile_.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile_.restype = ctypes.POINTER(ctypes.c_void_p)
    return compile_, version >= (0, 12, 0)


_bound = threading.local()


def bind(device: int) -> None:
    """Makes the device's CUDA context current in this thread, once a thread.

    Mosaic calls the driver, which takes the current context.  A new thread, such as autograd's, has
    none until the CUDA runtime needs one: torch.cuda.device(0) does not, nor does memory from
    PyTorch's cache.
    """
    if device not in _bound.__dict__.setdefault("devices", set()):
        torch.cuda.mem_get_info(device)
        _bound.devices.add(device)


_compiled: dict[tuple[bytes, int], Callable] = {}
_lock = threading.Lock()


def launcher(kernel: Kernel, device: int) -> Callable:
    """launch(pointers, count, stream) of a kernel for this device; compiles it once a process."""
    found = _compiled.get((kernel.module, device))
    if found is not None:
        return found
    with _lock:
        found = _compiled.get((kernel.module, device))
        if found is None:
            found = _compiled[kernel.module, device] = _compile(kernel, device)
    return found


def _compile(kernel: Kernel, device: int) -> Callable:
    import jax.experimental.mosaic.gpu  # noqa: F401  (tells Mosaic where CUDA lies)

    compile_, second = _library()
    made = compile_(kernel.module, len(kernel.module))
    if not made:
        raise RuntimeError(
            f"{kernel.name} does not compile for cuda:{device}: {_why(device)}; the environment's"
            " TF_CPP_MIN_LOG_LEVEL=0 shows more"
        )
    types = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    if second:  # since jaxlib 0.12 also the kernel and the device
        types = [ctypes.c_void_p, *types, ctypes.c_int]
    call = ctypes.CFUNCTYPE(None, *types)(made[1])
    function = made[0]
    if second:
        whole = made[2]
        return lambda pointers, count, stream: call(whole, function, stream, pointers, device)
    return lambda pointers, count, stream: call(function, stream, pointers)


def _why(device: int) -> str:
    """What Mosaic, which returns no reason, needs and lacks."""
    driver, current = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
    error = driver.cuCtxGetDevice(ctypes.byref(current))
    if error:
        return f"this thread has no CUDA context (error {error})"
    if current.value != device:
        return f"this thread's CUDA context belongs to cuda:{current.value}"
    root = os.environ.get("MOSAIC_GPU_CUDA_ROOT", "")
    if not shutil.which("ptxas") and not os.path.exists(os.path.join(root, "bin", "ptxas")):
        return "ptxas is not on PATH: pip install 'jaxllm[torch]'"
    return "a pass of Mosaic, ptxas or the load of the module failed"


# ---- glue ----------------------------------------------------------------------------------------


def binary(glue: Glue) -> bytes:
    """The function compiled for an H100 (sm_90); needs no GPU."""
    nvrtc = _nvrtc()
    made, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = glue.source().encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(made), text, b"glue.cu", 0, None, None)
    options = (ctypes.c_char_p * 3)(b"--gpu-architecture=sm_90", b"--fmad=false", b"--std=c++17")
    failed = nvrtc.nvrtcCompileProgram(made, len(options), options)
    kind = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{kind}Size")(made, ctypes.byref(size))
    out = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(made, out)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(made))
    if failed:
        raise RuntimeError(f"NVRTC error {failed}: {out.value.decode()[:2000]}")
    return out.raw


@functools.cache
def _nvrtc():
    """NVRTC of PyTorch's own requirements."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else ()
    found = [p for f in folders or () for p in Path(f).glob("cu13/lib/libnvrtc.so.13")]
    try:
        return ctypes.CDLL(str(found[0]) if found else "libnvrtc.so.13")
    except OSError as error:
        raise RuntimeError(f"no NVRTC ({error}): pip install 'jaxllm[torch]'") from None


def glue_launcher(glue: Glue, device: int) -> Callable:
    """launch(pointers, count, stream) of the function, loaded into the current context."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    error = driver.cuModuleLoadData(ctypes.byref(module), glue.binary)
    error = error or driver.cuModuleGetFunction(ctypes.byref(function), module, b"glue")
    if error:
        raise RuntimeError(f"glue does not load on cuda:{device}: CUDA error {error}")
    call = driver.cuLaunchKernel
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    blocks, handle = glue.blocks, function.value

    def launch(pointers, count, stream):
        # The one argument is a struct of all addresses; theirs lies behind them.
        failed = call(handle, blocks, 1, 1, 256, 1, 1, 0, stream, pointers + 8 * count, None)
        if failed:
            raise RuntimeError(f"a launch of glue failed: CUDA error {failed}")

    return launch
