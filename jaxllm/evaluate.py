"""python -m jaxllm.evaluate does the same as jaxllm evaluate."""

import sys

from jaxllm.commands import run

if __name__ == "__main__":
    sys.exit(run("evaluate"))
