"""mesh.shard_optimizer changes where the state lies and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
CASES = [("gpt2", "zero_tensor", 1), ("llama3", "zero", 1), ("llama3", "zero", 2)]
cases = pytest.mark.parametrize(("model", "mesh", "accum"), CASES)


@pytest.fixture(scope="module")
def result():
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "split_optimizer.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@cases
def test_the_steps_are_those_of_one_device(result, model, mesh, accum):
    found, one = result[f"{model} {mesh} {accum}"], result[f"{model} one 1"]
    assert np.isfinite(one["losses"]).all()  # assert_allclose accepts equal NaNs
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=2e-5)
    np.testing.assert_allclose(found["norms"], one["norms"], rtol=2e-4)
    assert found["donated"]


@cases
def test_a_device_holds_its_part_of_the_state(result, model, mesh, accum):
    """All axes divide; with tensor=2 the norms are split over the two replicas alone."""
    most = 0.26 if mesh == "zero_tensor" else 0.25
    found, plain = result[f"{model} {mesh} {accum}"], result["llama3 data 1"]
    for part in ("params_held", "moments_held"):
        assert 0.25 <= found[part] <= most
        assert plain[part] == 1


@cases
def test_each_parameter_is_gathered_once_and_no_moment_is(result, model, mesh, accum):
    size = lambda shapes: sum(int(np.prod(shape)) for shape in shapes)
    found = result[f"{model} {mesh} {accum}"]
    if mesh == "zero":
        assert sorted(found["gathered"]) == sorted(found["shapes"])
    else:  # without the halves that the tensor axis keeps apart
        assert size(found["shapes"]) / 2 <= size(found["gathered"]) < size(found["shapes"])
    assert not result["llama3 data 1"]["gathered"]


def test_runs_continue_with_and_without_it(result):
    found = result["continued"]
    for start, losses in found.items():
        assert losses[start] == losses["kept"]
        for loss in losses.values():
            assert loss == pytest.approx(found["one"]["one"], rel=2e-4)  # in bf16
