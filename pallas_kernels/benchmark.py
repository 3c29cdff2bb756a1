"""python -m pallas_kernels.benchmark: the command of pallas_kernels/bench/run.py."""

import sys

from pallas_kernels.bench.run import main

if __name__ == "__main__":
    sys.exit(main())
