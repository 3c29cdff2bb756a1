"""Settings that have to stand before JAX starts."""

import os
import shutil

from jaxtyping import install_import_hook

# The interpreter runs each warpgroup of a block as a thread of its own and needs them all at once:
# on a machine of two cores, four warpgroups would wait for each other for ever.
os.environ.setdefault("NPROC", "16")
# Tests on a CPU compile much and compute little: a quarter less time, and the same mathematics.
if shutil.which("nvidia-smi") is None:
    fast = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        " --xla_cpu_experimental_ynn_fusion_type="  # see set_xla_flags
    )
    os.environ["XLA_FLAGS"] = f"{fast} {os.environ.get('XLA_FLAGS', '')}".strip()
# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Layers and models check the shapes and dtypes that their annotations promise.
install_import_hook(["jaxllm.layers", "jaxllm.models"], "beartype.beartype")
