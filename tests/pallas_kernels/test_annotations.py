"""Every op, given and giving the shapes and dtypes that its annotations promise."""

import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

import pallas_kernels
from pallas_kernels.benchmark import arrays, small
from pallas_kernels.benchmark_cases import CASES


def checked(case):
    return jaxtyped(typechecker=beartype)(getattr(pallas_kernels, case.op))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op + c.variant)
def test_ops_keep_what_their_annotations_promise(case):
    inputs = arrays(case, small(case, case.sizes[0]))
    checked(case)(*inputs, **case.options, backend="xla")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op + c.variant)
def test_annotations_name_the_dtypes(case):
    first, *others = arrays(case, small(case, case.sizes[0]))
    with pytest.raises(TypeCheckError):
        checked(case)(first.astype(bool), *others, **case.options, backend="xla")
