"""What the tests of pallas_kernels.torch need to make plans without a GPU."""

import os

from pallas_kernels.torch import launch, ops, program, trace

equations = []  # of kernels, by their place


def not_lowered(eqn):
    equations.append(eqn)
    return program.Kernel(str(eqn.params["name"]), str(len(equations) - 1).encode())


def make_anew(monkeypatch) -> None:
    """CPU tensors are allowed, and plans not kept, but made for this machine."""
    monkeypatch.setattr(ops, "_check", lambda name, arrays: None)
    monkeypatch.setattr(ops, "_known", {})
    monkeypatch.setattr(trace, "kernel", not_lowered)
    monkeypatch.setattr(launch, "binary", str.encode)
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", os.devnull)
