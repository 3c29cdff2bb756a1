"""Writes a benchmark's result with what made it, for people without this GPU."""

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import jax

from pallas_kernels import dispatch

_PACKAGES = re.compile("jax|flax|nvidia-")  # that decide how fast a kernel is


def driver() -> str:
    """The version of the GPU's driver; raises OSError or CalledProcessError without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.check_output(query, text=True).split()[0]


def share(result: dict, out: Path) -> Path:
    """Writes one file for people without this GPU: `result` and what made it; no names or paths."""
    device = jax.devices()[0]
    try:
        version = driver()
    except (OSError, subprocess.SubprocessError, IndexError):
        version = None
    found = [(d.name.lower(), d.version) for d in importlib.metadata.distributions()]
    installed = dict(reversed(found))  # Python imports the first of several
    about = {
        "compute_capability": str(getattr(device, "compute_capability", None)),
        "driver": version,
        "compiler": str(dispatch.compiler()) if device.platform == "gpu" else None,
        "packages": {name: installed[name] for name in sorted(installed) if _PACKAGES.match(name)},
    }
    words = f"{device.device_kind} jax {jax.__version__}"
    path = out / (re.sub(r"[^a-z0-9.]+", "-", words.lower()) + ".json")
    path.write_text(json.dumps(about | result, indent=1) + "\n")
    return path
