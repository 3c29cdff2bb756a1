"""Settings that must be made before JAX starts."""

import atexit
import gc
import logging
import os
import shutil
import tempfile

import pytest
from cases import random_seed
from jaxtyping import install_import_hook

# The interpreter runs each warpgroup of a block in its own thread and needs them all at once: with
# two threads, four warpgroups would deadlock.
os.environ.setdefault("NPROC", "16")
# Tests compile much and compute little.  Cheaper compilation saves a quarter of their time on a
# CPU; on a GPU XLA would compile and time Triton's matmuls, some for minutes.  There XLA's own sums
# are deterministic only if it is asked for, as train.py does.
if shutil.which("nvidia-smi") is None:
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
else:
    fast = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
    fast += " --xla_gpu_deterministic_ops=true"
os.environ["XLA_FLAGS"] = f"{fast} {os.environ.get('XLA_FLAGS', '')}".strip()
# On a CPU, XLA compiles each program once for all test processes and for those that tests start.
# The process that starts the others makes the folder.
if shutil.which("nvidia-smi") is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="jaxllm-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Python's garbage collector looks through all that JAX has traced and compiled; test processes need
# 6% less time if it does so rarely.
gc.set_threshold(100_000, 20, 100)
# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Check the shapes and dtypes in the annotations of layers and models.
install_import_hook(["jaxllm.layers", "jaxllm.models"], "beartype.beartype")

# The files that take longest, which begin first, so that no process ends alone with one of them.
LONG_FILES = [
    *("test_train.py", "test_lora_runs.py", "test_settings.py", "test_attention.py"),
    *("test_processes.py", "test_sharding.py", "test_vlstm_gated.py", "test_readme.py"),
    *("test_vlstm.py", "test_models.py", "test_fp8_mlp.py", "test_generate.py", "test_layers.py"),
    *("test_programs.py", "test_linear_cross_entropy.py", "test_learn.py", "test_lora.py"),
    *("test_decode_attention.py", "test_quantized_linear.py", "test_exports.py", "test_verify.py"),
    *("test_annotations.py", "test_transforms.py", "test_kills_and_full_disks.py"),
]

# `pytest -m quick` runs these files, and the first case of every test with one of these endings.
QUICK_FILES = {"test_config.py", "test_dispatch.py", "test_house.py", "test_parity.py"}
QUICK_TESTS = (
    "_matches_float64",
    "test_error_ratio",
    "test_states_of_several_tiles",
    "test_a_token_does_not_affect_earlier_outputs",
    "test_a_run_writes_everything_it_promises",
)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"RANDOM_SEED={random_seed()} repeats today's random calls")


def pytest_collection_modifyitems(items):
    """Orders the files; marks the quick tests, and the first case of each test."""
    place = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    seen = set()
    for item in items:
        name = getattr(item, "originalname", item.name)
        item.first_case = (item.path, name) not in seen
        seen.add((item.path, name))
        quick = item.first_case and name.endswith(QUICK_TESTS)
        if item.path.name in QUICK_FILES or quick:
            item.add_marker(pytest.mark.quick)


@pytest.fixture(autouse=True)
def _log():
    """A command that Ctrl-C has stopped logs no more; here it shares its process with tests."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _lower_the_first_case(request, monkeypatch):
    lowers = request.node.first_case and os.environ.get("LOWERS") != "0"
    monkeypatch.setattr("kernel_checks.LOWERS", lowers)


@pytest.fixture
def one_block(monkeypatch):
    """Each head of a norm has one persistent block, which walks along all tiles."""
    from pallas_kernels import mosaic
    from pallas_kernels.norms import tiles

    monkeypatch.setattr(tiles, "_BLOCKS", 1)
    monkeypatch.setattr(tiles, "_WIDE", [(*w[:2], 1) for w in tiles._WIDE])
    monkeypatch.setattr(mosaic, "sm_count", lambda: 1)


@pytest.fixture
def op_by_op(monkeypatch):
    """XLA compiles each operation of a vLSTM's gates by itself.

    In one program it fuses them as it likes, and float32 rounds them differently in two programs.
    """
    from pallas_kernels.mlstm import chunkwise

    monkeypatch.setattr(chunkwise, "chunkwise", chunkwise.chunkwise.__wrapped__)


@pytest.fixture
def capable(monkeypatch):
    """Pretends that the default device can run every kernel."""
    from pallas_kernels import dispatch

    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)


@pytest.fixture
def general_kernels(monkeypatch):
    """Ops with two forms run in their general one, on every GPU and in the interpreter."""
    from pallas_kernels import dispatch

    monkeypatch.setenv("JAXLLM_KERNELS", "general")
    dispatch.reset()
    yield
    dispatch.reset()
