"""Ladders: from a first naive kernel to the one that ships (learn/README.md)."""

import os
import shutil
import sys
from pathlib import Path

# How kernels are interpreted and checked on a CPU is with the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
# The interpreter runs each warpgroup of a block in its own thread, and compiles much that runs
# once.  JAX reads both when it starts.
os.environ.setdefault("NPROC", "16")
no_gpu = shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists()
if no_gpu and "XLA_FLAGS" not in os.environ:
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = fast
