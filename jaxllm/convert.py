"""python -m jaxllm.convert does the same as jaxllm convert."""

import sys

from jaxllm.commands import run

if __name__ == "__main__":
    sys.exit(run("convert"))
