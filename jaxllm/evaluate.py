"""python -m jaxllm.evaluate: the command of jaxllm/infer/evaluate.py."""

import sys

from jaxllm.infer.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
