"""python -m jaxllm.convert: the command of jaxllm/weights/convert.py."""

import os
import sys

from jaxllm.weights.convert import main

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU is needed, and its memory may be taken
    sys.exit(main())
