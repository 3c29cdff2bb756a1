"""The base class of layers and models."""

import inspect

from flax import nnx


class _Signature:
    """The constructor's signature; nnx.Module's metaclass shows *args and **kwargs."""

    def __get__(self, layer, of):
        if layer is not None:  # its signature comes from __call__
            raise AttributeError("__signature__")
        _, *arguments = inspect.signature(of.__init__).parameters.values()
        return inspect.Signature(arguments)


class Layer(nnx.Module):
    """An nnx.Module whose arguments `help` shows."""

    __signature__ = _Signature()  # pyrefly: ignore[bad-override]
