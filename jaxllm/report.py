"""python -m jaxllm.report: the command of jaxllm/train/report.py."""

import sys

from jaxllm.train.report import main

if __name__ == "__main__":
    sys.exit(main())
