"""python -m jaxllm does the same as the command jaxllm."""

import sys

from jaxllm.commands import main

if __name__ == "__main__":
    sys.exit(main())
