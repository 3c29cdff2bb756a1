"""Checks the options of public ops by their annotations: int, float, bool, Literal, NamedTuple.

`dtype` is checked by its name.  Options are static: kernels are built from their values.  So each
is converted to Python's own type before an op looks at it, whatever kind of number it was.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def promotions() -> Iterator[None]:
    """A context in which jnp promotes ranks and dtypes, whatever the caller has forbidden.

    The settings find mistakes in the caller's code; our formulas promote on purpose.
    """
    with contextlib.ExitStack() as stack:
        if jax.config.jax_numpy_dtype_promotion != "standard":
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
        if jax.config.jax_numpy_rank_promotion != "allow":
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


class custom_vjp(jax.custom_vjp):
    """`jax.custom_vjp` whose rules run under `promotions`: JAX calls them after the op returned."""

    def defvjp(self, fwd, bwd, *given, **options):
        super().defvjp(promotions()(fwd), promotions()(bwd), *given, **options)


def checked[Op: Callable](op: Op) -> Op:
    """Converts the options of `op` to the types of their annotations, and NumPy's floats to JAX's.

    Raises ValueError, in one line, for a value of another type, a traced one included.  The op
    runs under `promotions`.
    """
    convert = _converters(op)
    names = list(inspect.signature(op).parameters)
    to = lambda name, x: convert[name](name, x) if name in convert else x

    @functools.wraps(op)
    def run(*given, **options):
        converted = [to(name, x) for name, x in zip(names, given, strict=False)]
        options = {name: to(name, x) for name, x in options.items()}
        given = *converted, *given[len(names) :]
        given, options = jax.tree.map(_of_jax, (given, options))
        with promotions():
            return op(*given, **options)

    # pyrefly: ignore[bad-return]
    return run


def _of_jax(x):
    """x as JAX's array, which promotes and indexes by JAX's rules; integers stay: see ids.py."""
    numpy = isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x) if numpy else x


def _converters(of: Callable) -> dict[str, Callable[[str, Any], Any]]:
    """For each parameter with a type that is checked here a function (name, value) -> value."""
    found = {}
    for name, parameter in inspect.signature(of).parameters.items():
        kinds = get_args(parameter.annotation)
        if get_origin(parameter.annotation) is Literal or not kinds:
            kinds = (parameter.annotation,)
        kinds = [kind for kind in kinds if kind is not type(None)]
        if len(kinds) == 1 and (convert := _converter(kinds[0])):
            found[name] = functools.partial(_unless_none, convert, parameter)
        elif name == "dtype":
            found[name] = _dtype
    return found


def _unless_none(convert, parameter, name: str, x):
    optional = type(None) in get_args(parameter.annotation)
    return None if x is None and optional else convert(name, x)


def _converter(kind) -> Callable[[str, Any], Any] | None:
    if get_origin(kind) is Literal:
        return functools.partial(_choice, get_args(kind))
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return functools.partial(_fields, kind, _converters(kind))
    return {int: _whole, float: _number, bool: _flag}.get(kind)


def _choice(choices, name: str, x):
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name}={x!r} is not one of {', '.join(choices)}")
    return x


def _dtype(name: str, x):
    try:
        dtype = None if x is None else jnp.dtype(x)
    except TypeError:
        raise ValueError(f"{name}={x!r} is not a dtype") from None
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name}={dtype} is not a floating point dtype")
    return dtype


def _fields(kind, convert, name: str, x):
    if not isinstance(x, kind):
        raise ValueError(f"{name}={x!r} is not a pallas_kernels.{kind.__name__}")
    fields = {field: to(f"{name}.{field}", getattr(x, field)) for field, to in convert.items()}
    return x._replace(**fields)


def _scalar(name: str, x, what: str):
    """A Python scalar of a Python or NumPy scalar or a concrete array of no axes."""
    if isinstance(x, jax.core.Tracer):
        raise ValueError(f"{name} is traced, but an option is static: pass a Python {what}")
    if isinstance(x, np.generic | np.ndarray | jax.Array) and not x.ndim:
        x = x.item()
    if not isinstance(x, bool | int | float):
        raise ValueError(f"{name}={x!r} is not a Python {what}")
    return x


def _number(name: str, x) -> float:
    x = _scalar(name, x, "number")
    if isinstance(x, bool) or not math.isfinite(x):
        raise ValueError(f"{name}={x} is not a finite number")
    return float(x)


def _whole(name: str, x) -> int:
    x = _scalar(name, x, "integer")
    if isinstance(x, bool) or x != x or abs(x) >= 2**31 or x != int(x):
        raise ValueError(f"{name}={x} is not a whole number of 32 bits")
    return int(x)


def _flag(name: str, x) -> bool:
    x = _scalar(name, x, "bool")
    if x not in (0, 1):
        raise ValueError(f"{name}={x} is not True or False")
    return bool(x)
