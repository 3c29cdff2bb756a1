"""Evaluates a jaxpr with NumPy: for the programs of interpreted kernels, which run a few times.

XLA takes seconds to compile such a program, and NumPy milliseconds to run it.  A jaxpr becomes a
list of steps (function, places of its inputs, places of its outputs), once.  A primitive without a
rule here runs as JAX runs it outside of jit.
"""

import threading

import jax
import numpy as np
from jax.extend import core

_LOCK = threading.Lock()
_programs = {}  # by jaxpr, until `clear`


def evaluate(jaxpr: core.Jaxpr, consts, *args):
    """The outputs of the jaxpr as NumPy arrays; callbacks in it are called in order."""
    with np.errstate(all="ignore"):  # integers wrap, and infinities are values, as on a GPU
        return _run(_program(jaxpr), consts, args)


def clear() -> None:
    _programs.clear()


def _program(jaxpr):
    with _LOCK:
        found = _programs.get(jaxpr)
    if found is None:
        found = _compile(jaxpr)
        with _LOCK:
            _programs[jaxpr] = found
    return found


def _compile(jaxpr):
    places = {}  # of variables
    known = {}  # literals by place

    def place(v):
        if isinstance(v, core.Literal):
            number = len(places) + len(known)
            known[number] = np.asarray(v.val, v.aval.dtype)
            return number
        return places.setdefault(v, len(places) + len(known))

    ins = [place(v) for v in (*jaxpr.constvars, *jaxpr.invars)]
    steps = [
        (_function(eqn), [place(v) for v in eqn.invars], [place(v) for v in eqn.outvars])
        for eqn in jaxpr.eqns
    ]
    outs = [place(v) for v in jaxpr.outvars]
    start = [known.get(i) for i in range(len(places) + len(known))]
    return start, ins, steps, outs


def _run(program, consts, args):
    start, ins, steps, outs = program
    values = list(start)
    for i, x in zip(ins, (*consts, *args), strict=True):
        values[i] = np.asarray(x)
    for function, sources, targets in steps:
        results = function(*[values[i] for i in sources])
        if len(targets) == 1 and not isinstance(results, list):
            values[targets[0]] = results
        else:
            for i, x in zip(targets, results, strict=True):
                values[i] = x
    return [values[i] for i in outs]


def _function(eqn):
    """The equation as a function of NumPy arrays: one result, or a list of them."""
    name, params = eqn.primitive.name, eqn.params
    if name in _PLAIN:
        return _PLAIN[name]
    if name in _RULES:
        return _RULES[name](**params)

    def bind(*values):
        found = eqn.primitive.bind(*map(jax.numpy.asarray, values), **params)
        return list(map(np.asarray, found)) if eqn.primitive.multiple_results else np.asarray(found)

    return bind


# ---- primitives without parameters ---------------------------------------------------------------


def _div(x, y):
    if not np.issubdtype(x.dtype, np.integer):
        return np.divide(x, y)
    quotient = np.abs(x) // np.abs(y)  # XLA rounds towards zero
    return np.where((x < 0) != (y < 0), -quotient, quotient).astype(x.dtype)


def _select(which, *cases):
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _shift_right_logical(x, y):
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(x.view(unsigned), y.view(unsigned)).view(x.dtype)


_PLAIN = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _div, "rem": np.fmod,
    "max": np.maximum, "min": np.minimum, "neg": np.negative, "abs": np.abs, "sign": np.sign,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "shift_left": np.left_shift, "floor": np.floor, "ceil": np.ceil,
    "shift_right_arithmetic": np.right_shift, "shift_right_logical": _shift_right_logical,
    "select_n": _select, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "is_finite": np.isfinite, "pow": np.power, "copy": np.array, "copy_p": np.array,
    "optimization_barrier": lambda *x: list(x),
}  # fmt: skip


# ---- primitives with parameters: functions of them -----------------------------------------------


def _of(function):
    """The rule of a primitive whose parameters do not matter: they choose a precision."""
    return lambda **_: function


def _callback(*, callback, result_avals, **_):
    def call(*values):
        found = callback(*map(np.array, values))
        # A copy: what a callback returns may be a part of the memory that others write.
        return [np.array(x, a.dtype) for x, a in zip(found, result_avals, strict=True)]

    return call


def _jit(*, jaxpr, **_):
    return lambda *values: _run(_program(jaxpr.jaxpr), jaxpr.consts, values)


def _cond(*, branches, **_):
    calls = [_jit(jaxpr=branch) for branch in branches]
    return lambda index, *values: calls[min(max(int(index), 0), len(calls) - 1)](*values)


def _while(*, cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts, **_):
    test, body = _jit(jaxpr=cond_jaxpr), _jit(jaxpr=body_jaxpr)

    def loop(*values):
        of_test, values = values[:cond_nconsts], values[cond_nconsts:]
        of_body, carry = values[:body_nconsts], values[body_nconsts:]
        while test(*of_test, *carry)[0]:
            carry = body(*of_body, *carry)
        return list(carry)

    return loop


def _scan(*, jaxpr, length, reverse, ft_in, **_):
    body = _jit(jaxpr=jaxpr)
    num_consts, num_carry, _ = (len(part) for part in ft_in.unpack())

    def loop(*values):
        consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
        xs, stacked = values[num_consts + num_carry :], []
        for i in reversed(range(length)) if reverse else range(length):
            found = body(*consts, *carry, *(x[i] for x in xs))
            carry = found[:num_carry]
            stacked.append(found[num_carry:])
        ys = zip(*(reversed(stacked) if reverse else stacked), strict=True)
        return [*carry, *map(np.stack, ys)]

    return loop


def _convert(*, new_dtype, **_):
    return lambda x: x.astype(new_dtype)


def _broadcast_in_dim(*, shape, broadcast_dimensions, **_):
    def broadcast(x, *_):
        sizes = [1] * len(shape)
        for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
            sizes[axis] = size
        return np.broadcast_to(np.reshape(x, sizes), shape)

    return broadcast


def _iota(*, dtype, shape, dimension, **_):
    sizes = [n if axis == dimension else 1 for axis, n in enumerate(shape)]
    made = np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)
    return lambda: made


def _slice(*, start_indices, limit_indices, strides, **_):
    at = tuple(map(slice, start_indices, limit_indices, strides or [1] * len(start_indices)))
    return lambda x: x[at]


def _part(x, sizes, starts):
    """The slices of x that a dynamic slice reads or writes, moved inside its bounds."""
    first = [
        min(max(int(i), 0), n - size) for i, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(i, i + size) for i, size in zip(first, sizes, strict=True))


def _dynamic_slice(*, slice_sizes, **_):
    return lambda x, *starts: x[_part(x, slice_sizes, starts)]


def _dynamic_update_slice(**_):
    def update(x, part, *starts):
        x = np.array(x)
        x[_part(x, part.shape, starts)] = part
        return x

    return update


def _reduce(function):
    return lambda *, axes, **_: lambda x: function(x, axis=axes)


_RULES = {
    "io_callback": _callback, "jit": _jit, "cond": _cond, "while": _while,
    "scan": _scan, "convert_element_type": _convert, "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota, "slice": _slice, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "custom_jvp_call": lambda *, call_jaxpr, **_: _jit(jaxpr=call_jaxpr),
    "custom_vjp_call": lambda *, call_jaxpr, **_: _jit(jaxpr=call_jaxpr),
    "reshape": lambda *, new_sizes, **_: lambda x: np.reshape(x, new_sizes),
    "squeeze": lambda *, dimensions, **_: lambda x: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda *, permutation, **_: lambda x: np.transpose(x, permutation),
    "concatenate": lambda *, dimension, **_: lambda *x: np.concatenate(x, dimension),
    "integer_pow": lambda *, y, **_: lambda x: np.power(x, x.dtype.type(y)),
    "bitcast_convert_type": lambda *, new_dtype, **_: lambda x: np.asarray(x).view(new_dtype),
    "reduce_sum": _reduce(np.sum), "reduce_max": _reduce(np.max), "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all), "reduce_or": _reduce(np.any),
    "exp": _of(np.exp), "exp2": _of(np.exp2), "log": _of(np.log), "log1p": _of(np.log1p),
    "tanh": _of(np.tanh), "sqrt": _of(np.sqrt), "square": _of(np.square),
    "rsqrt": _of(lambda x: 1 / np.sqrt(x)), "cos": _of(np.cos), "sin": _of(np.sin),
}  # fmt: skip
