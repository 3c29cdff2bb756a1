"""mesh.shard_optimizer changes where the state lies and nothing else."""

from math import prod

import numpy as np
import pytest
from training_runs import devices_run

CASES = [("llama3", "split, tensor", 1), ("llama3", "split", 2)]
pytestmark = pytest.mark.slow
cases = pytest.mark.parametrize(("model", "mesh", "accum"), CASES)


@pytest.fixture(scope="module")
def result():
    return devices_run("split_optimizer.py", 4)


@cases
def test_the_steps_are_those_of_one_device(result, model, mesh, accum):
    found, one = result[f"{model}, {mesh}, {accum}"], result[f"{model}, one, 1"]
    assert np.isfinite(one["losses"]).all()  # assert_allclose accepts equal NaNs
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=2e-5)
    np.testing.assert_allclose(found["norms"], one["norms"], rtol=2e-4)
    assert found["donated"]


@cases
def test_a_device_holds_its_part_of_the_state(result, model, mesh, accum):
    """All axes divide; with tensor=2 the norms are split over the two replicas alone."""
    most = 0.26 if mesh == "split, tensor" else 0.25
    found, plain = result[f"{model}, {mesh}, {accum}"], result["llama3, data, 1"]
    for part in ("params_held", "moments_held"):
        assert 0.25 <= found[part] <= most
        assert plain[part] == 1


@cases
def test_each_parameter_is_gathered_once_and_no_moment_is(result, model, mesh, accum):
    size = lambda shapes: sum(map(prod, shapes))
    found = result[f"{model}, {mesh}, {accum}"]
    if mesh == "split":
        assert sorted(found["gathered"]) == sorted(found["shapes"])
    else:  # without the halves that the tensor axis keeps apart
        assert size(found["shapes"]) / 2 <= size(found["gathered"]) < size(found["shapes"])
    assert not result["llama3, data, 1"]["gathered"]


def test_runs_continue_with_and_without_it(result):
    found = result["continued"]
    for start, losses in found.items():
        assert losses[start] == losses["kept"]
        for loss in losses.values():
            assert loss == pytest.approx(found["one"]["one"], rel=2e-4)  # in bf16
