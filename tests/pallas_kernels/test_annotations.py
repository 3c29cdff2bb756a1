"""Every op accepts and returns the shapes and dtypes of its annotations."""

from typing import Any, get_args
from unittest import mock

import jax.numpy as jnp
import pytest
from beartype import beartype
from cases import once_an_op
from jaxtyping import TypeCheckError, jaxtyped

import pallas_kernels
from pallas_kernels.bench.cases import CASES
from pallas_kernels.bench.operands import arrays, small


def call(case, inputs):
    op = getattr(pallas_kernels, case.op)
    returns = op.__annotations__["return"]
    if get_args(returns)[1:] == (Any,):  # stands for several results, or for a Packed
        returns = get_args(returns)[0] | tuple | pallas_kernels.Packed
    with mock.patch.dict(op.__annotations__, {"return": returns}):
        op = jaxtyped(typechecker=beartype)(op)
        op(**case.arguments(inputs), **case.options, implementation="xla")


ON_SEVERAL = [case for case in CASES if not case.variant.startswith("packed")]
ON_ONE = [case for case in CASES if case.variant.startswith("packed")]


@pytest.mark.parametrize("case", once_an_op(CASES), ids=lambda c: c.op + c.variant)
def test_ops_keep_what_their_annotations_promise(case):
    call(case, arrays(case, small(case, case.sizes[0])))


@pytest.mark.parametrize("case", once_an_op(ON_SEVERAL), ids=lambda c: c.op + c.variant)
def test_annotations_name_the_dtypes(case):
    first, *others = arrays(case, small(case, case.sizes[0]))
    with pytest.raises(TypeCheckError):
        call(case, [first.astype(bool), *others])


@pytest.mark.parametrize(
    "case", once_an_op(ON_SEVERAL) + once_an_op(ON_ONE), ids=lambda c: c.op + c.variant
)
def test_integers_in_place_of_floats_are_refused(case):
    """Otherwise results would be rounded to integers."""
    inputs = arrays(case, small(case, case.sizes[0]))
    first = next(i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating))
    inputs[first] = inputs[first].astype(jnp.int32)
    with pytest.raises(ValueError, match="int32"):
        getattr(pallas_kernels, case.op)(**case.arguments(inputs), **case.options)
