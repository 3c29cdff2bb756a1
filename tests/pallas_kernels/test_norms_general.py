"""The norms' general form, for every NVIDIA GPU since Ampere: the same ops on other kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels import dispatch, mosaic
from pallas_kernels.norms import norm

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


pytestmark = pytest.mark.usefixtures("general_kernels")


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "residual"),
    [
        ("layer_norm", (4, 768), bf16, bf16),  # narrow rows forward, wide backward
        ("rms_norm", (5, 3, 40), f32, f32),  # heads; rows and columns are padded
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
    x, per = normal(0, shape, dtype, scale=2, offset=1), shape[1:]
    arrays = {"weight": normal(1, per, offset=1)}
    arrays |= {"bias": normal(2, per)} if op == "layer_norm" else {}
    if residual is not None:
        arrays |= {"residual": normal(3, shape, residual), "x_bias": normal(4, per)}
    name = op if residual is None else f"add_{op}"
    kernels = [f"general_{name}_{part}" for part in ("forward", "backward", "backward_sum")]

    def named(op):
        return lambda x, *given, **k: op(x, **dict(zip(arrays, given, strict=True)), **k)

    op, reference = (named(getattr(norm, name)) for name in (op, f"{op}_reference"))
    check_op(op, reference, x, *arrays.values(), kernels=kernels)


@pytest.mark.parametrize(
    ("lacks", "asked", "runs"),
    [
        (("sm_90a",), None, "hopper"),  # an sm_100 has TMA and 227 KB
        (("sm_90a", "sm_90"), None, "general"),
        (("sm_90a", "sm_90"), "mosaic", "general"),
        (("sm_90a", "sm_90", "sm_80"), "mosaic", "hopper"),  # a CPU interprets Hopper's
    ],
)
def test_which_gpus_take_the_general_form(lacks, asked, runs, monkeypatch):
    monkeypatch.delenv("JAXLLM_KERNELS")
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: "older" if gpu in lacks else None)
    call = functools.partial(norm.rms_norm, implementation=asked)
    jax.eval_shape(lambda x: call(x), jnp.zeros((4, 128)))
    assert [d[:2] for d in dispatch.decisions()] == [("rms_norm", runs)]
