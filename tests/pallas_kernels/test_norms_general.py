"""The norms' general form, for every NVIDIA GPU since Ampere: the same ops on other kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels import dispatch, mosaic
from pallas_kernels.norms import layer_norm, rms_norm

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


pytestmark = pytest.mark.usefixtures("general_kernels")


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "residual"),
    [
        ("add_layer_norm", (4, 768), bf16, bf16),  # narrow rows forward, wide backward
        ("add_rms_norm", (5, 3, 40), f32, f32),  # heads; rows and columns are padded
        ("layer_norm", (3, 5120), f16, None),  # four parts
        slow("layer_norm", (6, 1600), bf16, None),  # the last chunk repeats three blocks
        slow("rms_norm", (3, 1600), f32, None),
        slow("rms_norm", (3, 2560), bf16, None),  # two parts
        slow("layer_norm", (9, 200), f32, None),
        slow("rms_norm", (64, 64), f32, None),
    ],
)
def test_general_norms_match_float64(op, shape, dtype, residual, one_general_block, monkeypatch):
    monkeypatch.setattr(mosaic, "sm_count", lambda: 1)
    module = layer_norm if "layer" in op else rms_norm
    x, per = normal(0, shape, dtype, scale=2, offset=1), shape[1:]
    arrays = [x] if residual is None else [x, normal(3, shape, residual)]
    arrays += [normal(1, per, offset=1), normal(2, per)] + [normal(4, per)] * (residual is not None)
    kernels = [f"general_{op}_{name}" for name in ("forward", "backward", "backward_sum")]
    check_op(getattr(module, op), getattr(module, f"{op}_reference"), *arrays, kernels=kernels)


@pytest.mark.parametrize(
    ("lacks", "asked", "why"),
    [
        (("sm_90a",), None, "supported"),  # an sm_100 has TMA and 227 KB
        (("sm_90a", "sm_90"), None, "supported, in the general form"),
        (("sm_90a", "sm_90"), "mosaic", "asked for, in the general form"),
        (("sm_90a", "sm_90", "sm_80"), "mosaic", "asked for"),  # a CPU interprets Hopper's
    ],
)
def test_which_gpus_take_the_general_form(lacks, asked, why, monkeypatch):
    monkeypatch.delenv("JAXLLM_KERNELS")
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: "older" if gpu in lacks else None)
    call = functools.partial(rms_norm.rms_norm, implementation=asked)
    jax.eval_shape(lambda x: call(x), jnp.zeros((4, 128)))
    assert dispatch.decisions() == [("rms_norm", "mosaic", why)]
