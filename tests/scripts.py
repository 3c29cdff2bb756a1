"""What the scripts in tests/ share: --help prints their docstring, and an error is one line.

def main() -> int | None:
    arguments, rest = Parser(__doc__).parse_known_args()
    needs_gpu()

if __name__ == "__main__":
    run(main)
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from jaxllm.config import command_line  # noqa: E402
from jaxllm.errors import InputError, error_line  # noqa: E402


class Parser(command_line.Parser):
    """Its `overrides` parses the words that override settings of a configuration."""

    def __init__(self, doc: str = "", **options):
        super().__init__(description=doc, **options)


def one_of(what: str, name: str, known) -> None:
    """Raises InputError if there is no such name."""
    if name not in known:
        raise InputError(f"no {what} {name}; there are {', '.join(known)}")


def needs_packages(*names: str) -> None:
    """Raises InputError if one of these packages is not installed."""
    if missing := " ".join(name for name in names if not importlib.util.find_spec(name)):
        raise InputError(f"not installed: {missing}; pip install {missing}")


def needs_gpu(count: int = 1) -> None:
    """Raises InputError unless JAX has so many NVIDIA GPUs.

    Asks in another process: this one may set XLA's flags later, or leave the GPU to others.
    """
    code = "import jax; print(jax.default_backend(), jax.device_count())"
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    platform, found = ran.stdout.split()[-2:] if ran.returncode == 0 else ("missing", 0)
    if platform != "gpu" or int(found) < count:
        wanted = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
        has = f"{found} of them" if platform == "gpu" else f"JAX's platform {platform}"
        raise InputError(f"this script needs {wanted}, and this machine has {has}")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script: bad input and a package that is missing are one line, and status 2."""
    try:
        status = command_line.exit_status(main)
    except ModuleNotFoundError as error:
        error_line(f"not installed: {error.name}; pip install {error.name}")
        status = 2
    except subprocess.CalledProcessError as error:  # the command itself has said why
        error_line(str(error.stderr or error).strip().splitlines()[-1])
        status = error.returncode
    sys.exit(status)
