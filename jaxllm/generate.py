"""python -m jaxllm.generate: the command of jaxllm/infer/generate.py."""

import sys

from jaxllm.infer.generate import main

if __name__ == "__main__":
    sys.exit(main())
