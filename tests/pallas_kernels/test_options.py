"""Options of another type than an op's annotation: converted, or refused in one line."""

import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernel_checks import NO_KERNEL, normal
from small_calls import CASES

import pallas_kernels as ops

X, KV = jnp.ones((1, 8, 2, 64), jnp.bfloat16), jnp.ones((1, 8, 1, 64), jnp.bfloat16)


def attention(x=X, **options):
    return jax.eval_shape(lambda x: ops.attention(x, KV, KV, implementation="mosaic", **options), x)


def decode(**options):
    call = lambda q: ops.decode_attention(
        q, KV, KV, jnp.array([8]), implementation="mosaic", **options
    )
    return jax.eval_shape(call, X[:, :1])


@pytest.mark.parametrize("op", [attention, decode])
@pytest.mark.parametrize(
    "kind", [int, float, np.int64, np.uint8, np.float32, np.array, jnp.int32, jnp.bfloat16]
)
def test_every_kind_of_number_is_converted(op, kind):
    op(window=kind(3), softcap=kind(30), scale=kind(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window=3.5), "window=3.5 is not a whole number of 32 bits"),
        (dict(window=True), "window=True is not a whole number of 32 bits"),
        (dict(window=float("inf")), "window=inf is not a whole number of 32 bits"),
        (dict(window=2**31), "window=2147483648 is not a whole number of 32 bits"),
        (dict(window="3"), "window='3' is not a Python integer"),
        (dict(window=[3]), r"window=\[3\] is not a Python integer"),
        # Of a longer array the message had several lines.
        (dict(window=np.ones((99, 9))), r"window=float64 \(99, 9\) is not a Python integer"),
        (dict(scale=jnp.ones(3)), r"scale=float32 \(3,\) is not a Python number"),
        (dict(softcap=[np.ones(99)]), "softcap=list is not a Python number"),
        (dict(window=0), "window=0 needs at least 1 key"),
        (dict(softcap=float("nan")), "softcap=nan is not a finite number"),
        (dict(scale=1e39), "scale=1e[+]39 is not a finite number of float32"),
        (dict(scale=-(10**400)), r"scale=\(an integer of 1329 bits\) is not a finite number"),
        # Python's own error named neither the option nor the limit.
        (dict(window=10**5000), r"window=\(an integer of 16610 bits\) is not a whole number"),
        # tanh(z / softcap) of a number that float32 rounds to 0: every logit was 0, or NaN
        (dict(softcap=1e38), r"softcap=1e[+]38 must be positive: from 2\^-100 to 2\^100"),
        (dict(softcap=1e-40), "softcap=1e-40 must be positive"),
        (dict(softcap=1j), "softcap=1j is not a Python number"),
        (dict(scale=None, softcap=False), "softcap=False is not a finite number"),
        (dict(causal="False"), "causal='False' is not a Python bool"),
        (dict(causal=2), "causal=2 is not True or False"),
        (dict(return_lse=None), "return_lse=None is not a Python bool"),
    ],
)
def test_what_no_option_is(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        attention(**options)


OPS = [op for op in (getattr(ops, name) for name in ops.__all__) if inspect.isfunction(op)]
arrays_of = lambda op: [n for n, p in inspect.signature(op).parameters.items() if "Array" in str(p)]


annotation = lambda op, name: str(inspect.signature(op).parameters[name].annotation)
takes_several = lambda op, name: re.match("tuple|collections", annotation(op, name))


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in arrays_of(op)])
def test_what_no_array_is(op, name):
    """The wrong argument is named, whatever the others are."""
    others = {other: jnp.ones(2) for other in arrays_of(op) if not takes_several(op, other)}
    for wrong in ([1.0, 2.0], "zzz", lambda: 0):
        what = rf"( must be an array, not {type(wrong).__name__}|\[0\] must be an array, not float)"
        refused = rf"^{name}{what}: pass jnp.asarray\({name}"
        if takes_several(op, name) and not isinstance(wrong, list):
            refused = f"^{name} must be a tuple or list of arrays, not "
        with pytest.raises(ValueError, match=refused):
            op(**others | {name: wrong})


@pytest.mark.parametrize(
    ("op", "name"),
    [("fp8_linear", "row_norm"), ("mlp", "row_norm"), ("linear_cross_entropy", "scale")],
)
def test_a_number_for_an_array_is_one_of_float32(op, name):
    """JAX raised OverflowError."""
    op = getattr(ops, op)
    others = {other: jnp.ones(2) for other in arrays_of(op) if not takes_several(op, other)}
    with pytest.raises(ValueError, match=rf"^{name}=\(an integer of 1329 bits\) is not a finite"):
        op(**others | {name: 10**400})


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in OPS for name in arrays_of(op) if takes_several(op, name)]
)
def test_one_array_for_several_is_refused(op, name):
    """Iteration over it failed, or its first row was taken for the first array."""
    refused = rf"^{name} must be a tuple or list of arrays, not float32 \(2, 3\)$"
    with pytest.raises(ValueError, match=refused):
        op(**{name: jnp.ones((2, 3))})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_new_position_has_two_arrays(count):
    """Without a key and a value the op raised IndexError; the third array was dropped."""
    with pytest.raises(ValueError, match=f"^new has length {count}, not 2"):
        decode(new=(KV[:, :1],) * count, theta=1e4)


FLOATS = [
    (op, name)
    for op in OPS
    for name in arrays_of(op)
    if "Float[" in annotation(op, name) and name not in ("scale", "row_norm")
]


@pytest.mark.parametrize("dtype", ["complex64", "int32", "float8_e5m2"])
@pytest.mark.parametrize(("op", "name"), FLOATS)
def test_an_array_that_is_not_of_real_numbers_is_refused(op, name, dtype):
    """An imaginary part was dropped without a word, and JAX's own error named no argument."""
    others = {other: jnp.ones(2) for other in arrays_of(op) if not takes_several(op, other)}
    several = re.search("tuple|Sequence", annotation(op, name))
    x, at = jnp.ones(2, dtype), "[0]" if several else ""
    refused = f"^{re.escape(name + at)} is {dtype}: cast it to bfloat16, float16 or float32$"
    with pytest.raises(ValueError, match=refused):
        op(**others | {name: (x,) if several else x})


def test_a_missing_array_and_what_holds_one():
    with pytest.raises(ValueError, match="^x must be an array, not None$"):
        ops.rms_norm(None, jnp.ones(4))
    with pytest.raises(ValueError, match=r"^weights\[1\] must be an array, not None$"):
        ops.row_linear(jnp.ones((1, 4)), [jnp.ones((4, 4)), None])
    parameter = nnx.Param(jnp.ones(4))
    y = ops.rms_norm(np.ones((2, 4), np.float32), parameter, implementation="xla")
    np.testing.assert_allclose(y, 1, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("name", ["encoder", "linear_cross_entropy", "decode_attention_new"])
def test_parameters_of_a_module_are_arrays(name, implementation):
    """The encoder's XLA form and the loss's kernels took an nnx.Param for no array."""
    op, shapes, whole, *dtype = CASES[name]
    state = nnx.List([nnx.Param(normal(i, s[1:], *dtype)) for i, s in enumerate(shapes)])
    whole = [jnp.asarray(x[0], jnp.int32) for x in whole]

    def loss(state):
        results = op(*state, *whole, implementation=implementation)
        return sum(y.astype(jnp.float32).sum() for y in jax.tree.leaves(results))

    gradients = nnx.eval_shape(nnx.grad(loss), state)
    assert [g.shape for g in jax.tree.leaves(gradients)] == [s[1:] for s in shapes]


@pytest.mark.parametrize("dtype", ["zzz", 3, int, np.complex64])
def test_a_dtype_that_is_not_floating_is_refused(dtype):
    with pytest.raises(ValueError, match=r"^dtype=.* is not a (floating point )?dtype"):
        ops.encoder(jnp.zeros((1, 1), int), jnp.ones((2, 128)), None, dtype=dtype)


@pytest.mark.parametrize("name", ["window", "softcap", "scale", "causal"])
def test_a_traced_option_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} is traced, but an option is static: pass a"):
        jax.jit(lambda x: ops.attention(X, KV, KV, **{name: x}))(3)


def test_a_window_of_all_keys_is_none():
    assert "window" not in str(decode(window=2**31 - 1))


@pytest.mark.parametrize("scaling", [8.0, dict(factor=8.0), (8.0, 1.0, 4.0, 8192)])
def test_a_scaling_of_another_type_is_refused(scaling):
    with pytest.raises(ValueError, match=r"is not a pallas_kernels\.RopeScaling$"):
        ops.rope(X, KV, jnp.arange(8), scaling=scaling)


def test_fields_are_converted():
    numbers = ops.RopeScaling(np.float32(8), jnp.float32(1), np.array(4), np.int64(8192))
    actual = ops.rope(X, KV, jnp.arange(8), scaling=numbers)
    for a, e in zip(actual, ops.rope(X, KV, jnp.arange(8), scaling=ops.RopeScaling()), strict=True):
        np.testing.assert_array_equal(a, e)
    with pytest.raises(ValueError, match=r"scaling\.factor='8' is not a Python number"):
        ops.rope(X, KV, jnp.arange(8), scaling=ops.RopeScaling("8"))


@pytest.mark.parametrize("name", sorted(set(ops.__all__) - NO_KERNEL | {"quantize"}))
def test_every_op_checks_its_options(name):
    """An op with such an option refuses a wrong value before it looks at shapes."""
    op = getattr(ops, name)
    signature = inspect.signature(op)
    options = [
        parameter.name
        for parameter in signature.parameters.values()
        if {int, float, bool} & {parameter.annotation, *typing.get_args(parameter.annotation)}
        or typing.Literal in map(typing.get_origin, typing.get_args(parameter.annotation))
    ]
    options = [o for o in options if (name, o) != ("linear_cross_entropy", "scale")]  # an array
    assert options
    required = [
        p.name
        for p in signature.parameters.values()
        if p.default is inspect.Parameter.empty and not takes_several(op, p.name)
    ]
    for option in options:
        given = dict.fromkeys(required, jnp.ones(2)) | {option: [1]}
        with pytest.raises(ValueError, match=rf"^{option}=\[1\] is not "):
            op(**given)


@pytest.mark.parametrize("name", CASES)
def test_arrays_of_numpy_are_as_those_of_jax(name):
    """Traced ids once indexed NumPy's tables, and float64 was asked for where JAX has none."""
    op, shapes, whole, *dtype = CASES[name]
    arrays = [normal(i, shape[1:], *dtype) for i, shape in enumerate(shapes)]
    whole = [jnp.asarray(x[0], jnp.int32) for x in whole]
    wide = lambda x: np.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype)
    run = lambda arrays: lambda whole: op(*arrays, *whole, implementation="xla")
    expected, found = (jax.eval_shape(run(a), whole) for a in (arrays, list(map(wide, arrays))))
    assert expected == found
