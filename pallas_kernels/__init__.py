"""Mosaic GPU kernels for training language models, each with a jnp reference.

An op raises ValueError, in one line, for arguments that do not fit each other, and under
implementation="mosaic" NotImplementedError for a call that none of its kernels supports.
"""
# ruff: noqa: F403

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.public import *
    from pallas_kernels.public import __all__ as __all__
else:

    def __getattr__(name: str):
        # The first access to an op imports JAX.  `from pallas_kernels import torch` comes here,
        # too, and mostly does not need JAX.
        if name == "__all__" or not (name.startswith("__") or find_spec(f"{__name__}.{name}")):
            from pallas_kernels import public

            globals().update({x: getattr(public, x) for x in ("__all__", *public.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __getattr__("__all__")
