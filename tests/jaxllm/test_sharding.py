"""A step on four devices equals the step on one, and its kernels see only a device's own part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.config import InputError, Llama3Config, MeshConfig, TrainConfig
from jaxllm.sharding import check_batch, check_model, make_mesh, per_device

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def result():
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "four_devices.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


CASES = [
    ("gpt2", "fsdp"),
    ("gpt2", "tensor"),
    ("llama3", "data"),
    ("llama3", "fsdp"),
    ("llama3", "tensor"),
    ("llama3", "all"),
    ("llama3", "accumulated"),
    ("vlstm", "tensor"),
]


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_four_devices_compute_what_one_does(result, model, mesh):
    one, four = result[model]["one"], result[model][mesh]
    assert np.isfinite(one["losses"]).all()  # assert_allclose accepts equal NaNs
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=2e-5)
    np.testing.assert_allclose(four["norms"], one["norms"], rtol=2e-4)


@pytest.mark.parametrize("model", ["gpt2", "llama3", "vlstm"])
def test_four_devices_pack_documents_like_one(result, model):
    one, four = result["packed"][model]["one"], result["packed"][model]["tensor"]
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=2e-5)
    np.testing.assert_allclose(four["norms"], one["norms"], rtol=2e-4)
    # The same batches as streams must differ, or packing would have no effect.
    stream = result[model]["one"]
    assert np.abs(np.subtract(one["norms"], stream["norms"])).max() > 1e-3 * stream["norms"][0]


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_moments_are_sharded_like_their_parameters_and_buffers_are_donated(result, model, mesh):
    assert result[model][mesh]["moments_like_params"]
    assert result[model][mesh]["donated"]


def test_greedy_text_is_the_same_on_four_devices(result):
    one, four = result["greedy"]["one"], result["greedy"]["all"]
    assert one == four
    assert len({token for tokens in one for token in tokens}) > 8


def test_fsdp_and_tensor_split_the_parameters(result):
    for model, mesh in (("gpt2", "fsdp"), ("llama3", "fsdp"), ("vlstm", "tensor")):
        assert result[model][mesh]["part_held"] < 0.30
    assert result["llama3"]["data"]["part_held"] == 1


def test_kernels_run_on_each_device_s_own_part(result):
    # Under plain jit every device's kernel would get the whole, gathered batch.
    whole = "8x32x4x64"  # (batch, time, heads, head dimension) of the whole batch
    queries = {
        "data": "2x32x4x64",  # a fourth of the batch
        "tensor": "4x32x2x64",  # half of the batch (fsdp=2), half of the heads
    }
    for mesh, shape in queries.items():
        assert shape in result["kernels"][mesh]
        for other in {whole, *queries.values()} - {shape}:
            assert other not in result["kernels"][mesh]


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"data=3 x fsdp=1 x tensor=1 does not equal 1 devices"):
        make_mesh(MeshConfig(data=3), jax.devices()[:1])


class FourTensorDevices:
    shape = {"data": 1, "fsdp": 2, "tensor": 4}


def test_more_tensor_devices_than_kv_heads_are_refused_with_the_fix():
    model = Llama3Config(
        vocab_size=8, n_layers=1, n_heads=8, n_kv_heads=2, d_model=64, d_ff=64, max_seq_len=8
    )
    with pytest.raises(InputError) as error:
        check_model(model, FourTensorDevices)
    assert "mesh.tensor=4 does not divide model.n_kv_heads=2" in str(error.value)
    assert "use mesh.fsdp for the other devices" in str(error.value)


def test_a_batch_that_does_not_divide_is_refused():
    train = TrainConfig(steps=1, batch_size=12, seq_len=8, grad_accum=4)
    with pytest.raises(InputError, match=r"batch_size=12 is not a multiple of 2 devices"):
        check_batch(train, FourTensorDevices)


def test_without_a_mesh_an_op_is_not_wrapped():
    op = lambda x: x
    assert per_device(op, None, None) is op
