"""python -m pallas_kernels.benchmark runs pallas_kernels/bench/run.py."""

import sys

from pallas_kernels.bench.run import main

if __name__ == "__main__":
    sys.exit(main())
