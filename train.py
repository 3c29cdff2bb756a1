"""Trains a model: python train.py --config llama3_small.yaml [--section.key VALUE ...]"""

import sys

from jaxllm.train.run import main

if __name__ == "__main__":
    sys.exit(main())
