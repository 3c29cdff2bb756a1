"""python -m jaxllm.report does the same as jaxllm report."""

import sys

from jaxllm.commands import run

if __name__ == "__main__":
    sys.exit(run("report"))
