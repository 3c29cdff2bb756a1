"""python -m jaxllm.generate does the same as jaxllm generate."""

import sys

from jaxllm.commands import run

if __name__ == "__main__":
    sys.exit(run("generate"))
