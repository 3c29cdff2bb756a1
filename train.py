"""Trains a model: python train.py --config llama3_small.yaml [--section.key VALUE ...]"""

import sys

from jaxllm.commands import run


def main(argv=None):
    """Does the same as jaxllm train."""
    return run("train", argv)


if __name__ == "__main__":
    sys.exit(main())
