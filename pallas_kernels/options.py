"""Checks the arguments of public ops by their annotations: arrays, and options of the types int,
float, bool, Literal and NamedTuple.

`dtype` is checked by its name.  Options are static: kernels are built from their values.  So each
is converted to Python's own type before an op looks at it, whatever kind of number it was.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, Float

from pallas_kernels.packed import Packed

_SEQUENCES = (tuple, Sequence)
_converts = lambda x: getattr(x, "__jax_array__", None) is not None  # as an nnx.Param does
_WIDE = "bfloat16", "float16", "float32", "float64"  # other floats only where an op names them


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """A context in which formulas may promote ranks and dtypes, and have infinities and constants.

    The caller may have forbidden this to find mistakes; our formulas do it on purpose.
    """
    ours = dict(numpy_dtype_promotion="standard", numpy_rank_promotion="allow")
    ours |= dict(debug_infs=False, transfer_guard_host_to_device="allow")
    with contextlib.ExitStack() as stack:
        for name, value in ours.items():
            if getattr(jax.config, f"jax_{name}") not in (None, value):
                stack.enter_context(getattr(jax, name)(value))
        yield


class custom_vjp(jax.custom_vjp):
    """`jax.custom_vjp` with rules under `own_settings`: JAX calls them once the op has returned."""

    def __call__(self, *args, **options):
        of = lambda x: jax.typeof(x).manual_axis_type.varying if isinstance(x, jax.Array) else set()
        # shard_map checks types: if all arrays vary alike, JAX sums a replicated one's gradient.
        if axes := set().union(*map(of, jax.tree.leaves(args))):
            vary = lambda x: jax.lax.pcast(x, tuple(axes - of(x)), to="varying")
            args = jax.tree.map(lambda x: vary(x) if isinstance(x, jax.Array) else x, args)
        return super().__call__(*args, **options)

    def defvjp(self, fwd, bwd, *given, **options):
        super().defvjp(own_settings()(fwd), own_settings()(bwd), *given, **options)


def with_gradient(forward: Callable, backward: Callable, nondiff_argnums=()) -> custom_vjp:
    """The function that returns forward's results, with these rules of `custom_vjp`.

    forward: f(*args) -> (results, what backward needs).
    """
    run = functools.wraps(forward)(lambda *args: forward(*args)[0])
    op = custom_vjp(run, nondiff_argnums=nondiff_argnums)
    op.defvjp(forward, backward)
    return op


def checked[Op: Callable](op: Op) -> Op:
    """Converts the options of `op` to the types of their annotations, NumPy's floats to JAX's, and
    weak types, which one form might round to another array's dtype, to strong ones.

    Raises ValueError, in one line, for an option of another type, a traced one included, and for
    anything but an array where an array is expected.  The op runs under `own_settings`.
    """
    convert = _converters(op)
    names = list(inspect.signature(op).parameters)
    to = lambda name, x: convert[name](name, x) if name in convert else x

    @functools.wraps(op)
    def run(*given, **options):
        converted = [to(name, x) for name, x in zip(names, given, strict=False)]
        options = {name: to(name, x) for name, x in options.items()}
        given = *converted, *given[len(names) :]
        given, options = jax.tree.map(_of_jax, (given, options), is_leaf=_converts)
        with own_settings():
            return op(*given, **options)

    return run  # pyrefly: ignore[bad-return]


def _of_jax(x):
    """x as a JAX array, which promotes and indexes by JAX's rules; ids.py converts integers."""
    x = x.__jax_array__() if _converts(x) else x
    if isinstance(x, jax.Array) and jax.typeof(x).weak_type:
        return jax.lax.convert_element_type(x, x.dtype)
    numpy = isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x) if numpy else x


def _converters(of: Callable) -> dict[str, Callable[[str, Any], Any]]:
    """A function (name, value) -> value for each parameter whose type is checked here."""
    found = {}
    for name, parameter in inspect.signature(of).parameters.items():
        kinds = _members(parameter.annotation)
        others = [kind for kind in kinds if kind is not NoneType]
        if any(map(_is_array, others)) or any(get_origin(kind) in _SEQUENCES for kind in others):
            found[name] = _arrays(kinds)
        elif len(others) == 1 and (convert := _converter(others[0])):
            optional = lambda name, x, convert=convert: None if x is None else convert(name, x)
            found[name] = optional if NoneType in kinds else convert
        elif name == "dtype":
            found[name] = _dtype
    return found


def _members(annotation) -> tuple:
    """The types of a union, or the only one."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_array(kind) -> bool:
    return isinstance(kind, type) and issubclass(kind, AbstractArray)


def _arrays(kinds) -> Callable[[str, Any], Any]:
    """Returns a check that x is an array, or whatever its annotation names, element by element.

    Results and gradients would silently be rounded to integers, or lose the imaginary part of
    complex numbers.  ids.py checks integers.
    """
    classes = tuple(kind for kind in kinds if isinstance(kind, type) and not _is_array(kind))
    if any(_is_array(kind) and not kind.dims for kind in kinds) or float in classes:
        classes += int, float
    elements = [kind for of in kinds if get_origin(of) in _SEQUENCES for kind in get_args(of)]
    of_element = _arrays([x for kind in elements for x in _members(kind)]) if elements else None
    fixed = Ellipsis not in elements and any(get_origin(kind) is tuple for kind in kinds)
    arrays = [kind for kind in kinds if _is_array(kind)]
    dtypes = {d for kind in arrays for d in (_WIDE if kind.dtype is Float else kind.dtypes)}

    def check(name: str, x):
        if of_element is not None and isinstance(x, list | tuple):
            for i, y in enumerate(x):
                of_element(f"{name}[{i}]", y)
            if fixed and len(x) != len(elements):
                raise ValueError(f"{name} has length {len(x)}, not {len(elements)}")
        elif x is None and NoneType not in kinds:
            raise ValueError(f"{name} must be an array, not None")
        elif isinstance(x, Packed) and Packed in classes:
            check(f"{name}.array", x.array)
        elif of_element is not None and not arrays and x is not None:
            raise ValueError(f"{name} must be a tuple or list of arrays, not {_shown(x)}")
        elif not (isinstance(x, (jax.Array, np.ndarray, np.generic, *classes)) or _converts(x)):
            what = f"an array, not {type(x).__name__}"
            raise ValueError(f"{name} must be {what}: pass jnp.asarray({name})")
        elif isinstance(x, int) and abs(x) >= 2**128:
            raise ValueError(f"{name}={_shown(x)} is not a finite number of float32")
        elif "float32" in dtypes and hasattr(x, "dtype") and str(x.dtype) not in dtypes:
            if not (int in classes and jnp.issubdtype(x.dtype, jnp.integer)):  # a number
                raise ValueError(f"{name} is {x.dtype}: cast it to bfloat16, float16 or float32")
        return x

    return check


def _converter(kind) -> Callable[[str, Any], Any] | None:
    if get_origin(kind) is Literal:
        return functools.partial(_choice, get_args(kind))
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return functools.partial(_fields, kind, _converters(kind))
    return functools.partial(_scalar, kind) if kind in _SCALARS else None


def _shown(x) -> str:
    """x in one line, for an error."""
    if isinstance(x, int) and abs(x) >= 2**128:  # Python refuses to write the longest
        return f"(an integer of {x.bit_length()} bits)"
    text = f"{x.dtype} {x.shape}" if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)
    return text if len(text) < 80 and "\n" not in text else type(x).__name__


def _choice(choices, name: str, x):
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name}={_shown(x)} is not one of {', '.join(choices)}")
    return x


def _dtype(name: str, x):
    try:
        dtype = None if x is None else jnp.dtype(x)
    except TypeError:
        raise ValueError(f"{name}={_shown(x)} is not a dtype") from None
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name}={dtype} is not a floating point dtype")
    return dtype


def _fields(kind, convert, name: str, x):
    if not isinstance(x, kind):
        raise ValueError(f"{name}={_shown(x)} is not a pallas_kernels.{kind.__name__}")
    fields = {field: to(f"{name}.{field}", getattr(x, field)) for field, to in convert.items()}
    return x._replace(**fields)


_SCALARS = {  # what an option is, what it must be, and whether a number is that
    float: ("number", "a finite number of float32", lambda x: abs(x) < 2**128),
    int: ("integer", "a whole number of 32 bits", lambda x: abs(x) < 2**31 and x == int(x)),
    bool: ("bool", "True or False", lambda x: x in (0, 1)),
}


def _scalar(kind, name: str, x):
    """A Python scalar from a Python or NumPy scalar or a concrete array without axes."""
    what, must, fits = _SCALARS[kind]
    if isinstance(x, jax.core.Tracer):
        raise ValueError(f"{name} is traced, but an option is static: pass a Python {what}")
    if isinstance(x, np.generic | np.ndarray | jax.Array) and not x.ndim:
        x = x.item()
    if not isinstance(x, bool | int | float):
        raise ValueError(f"{name}={_shown(x)} is not a Python {what}")
    if not fits(x) or (isinstance(x, bool) and kind is not bool):
        raise ValueError(f"{name}={_shown(x)} is not {must}")
    if name.endswith("eps") and x != 0 and x < 2**-126:  # float32 might flush it to 0
        raise ValueError(f"{name}={x} must be 0 or at least 2^-126")
    if name == "softcap" and not 2**-100 <= x <= 2**100:  # float32 may round z / softcap to 0
        raise ValueError(f"{name}={x} must be positive: from 2^-100 to 2^100")
    return kind(x)
