import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels import layer_norm

KERNELS = [f"gated_layer_norm_{name}" for name in ("forward", "backward")]
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


def gated_layer_norm(x, gate, weight=None, **options):
    return layer_norm(x, weight, gate=gate, **options)


def gated_layer_norm_reference(x, gate, weight=None, **options):
    return layer_norm(x, weight, gate=gate, implementation="xla", **options)


def arrays(shape, dtype, per_head=True, scale=2.0):
    x, gate = normal(0, shape, dtype, scale=2, offset=1), normal(3, shape, dtype, scale=scale)
    return x, gate, normal(1, shape[-2:] if per_head else shape[-1:], offset=1)


check = functools.partial(check_op, gated_layer_norm, gated_layer_norm_reference)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 16, 2, 128), bf16),  # 16 rows of a head in a block
        ((2, 19, 3, 128), bf16),  # rows are padded
        ((8, 2, 64), f16),
        ((12, 2, 256), f32),
        slow((3, 1, 512), bf16),
        slow((8, 2, 512), f16),
        slow((40, 1, 128), f32),
        slow((4, 960), bf16),
        slow((8, 1024), f32),
    ],
)
def test_gated_layer_norm_matches_float64(one_block, shape, dtype):
    check(*arrays(shape, dtype, per_head=len(shape) > 2), kernels=KERNELS)


@pytest.mark.parametrize("dtype", [bf16, slow(f16), slow(f32)])
def test_gates_may_be_extreme(dtype):
    """Also rows far from zero, and rows of one number."""
    x, gate, weight = arrays((16, 2, 64), dtype)
    ends = jnp.array([30, -30, 1e4, -1e4, 0, 100, -100, 88.8], dtype)
    gate = gate.at[:8].set(ends[:, None, None])
    offset = jnp.array([1000, -1000, 60_000, 0], dtype)
    x = x.at[8:12].add(offset[:, None, None]).at[12].set(3)
    check(x, gate, weight, kernels=KERNELS)


def test_the_weight_is_optional():
    check(*arrays((8, 64), bf16)[:2], kernels=KERNELS[:2])


def test_refusals_and_errors_name_the_reason():
    x, gate, weight = arrays((4, 64), f32, per_head=False)
    with pytest.raises(ValueError, match=r"gate has shape \(64,\) but x has \(4, 64\)"):
        gated_layer_norm(x, gate[0])
    with pytest.raises(ValueError, match=r"weight has shape \(32,\), not the last axes"):
        gated_layer_norm(x, gate, weight[:32])
    with pytest.raises(NotImplementedError, match="x is float32 but gate is bfloat16"):
        gated_layer_norm(x, gate.astype(bf16), implementation="mosaic")
    with pytest.raises(NotImplementedError, match="C=1088 is more than 1024"):
        gated_layer_norm(*[jnp.ones((2, 1088))] * 2, implementation="mosaic")
    with pytest.raises(ValueError, match="weight is int32: cast it to bfloat16"):
        gated_layer_norm(x, gate, weight.astype(jnp.int32), implementation="mosaic")


def test_without_kernels_it_is_its_definition():
    x, gate, weight = (np.asarray(a, np.float64) for a in arrays((3, 2, 50), f32))
    z = x - x.mean(-1, keepdims=True)
    expected = z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-5) * weight / (1 + np.exp(-gate))
    with jax.enable_x64(True):
        call = [jnp.asarray(a) for a in (x, gate, weight)]
        np.testing.assert_allclose(gated_layer_norm_reference(*call), expected)
        np.testing.assert_allclose(gated_layer_norm(*call, implementation="xla"), expected)
    mixed = gated_layer_norm(*(jnp.asarray(a, d) for a, d in ((x, bf16), (gate, f32))))
    assert mixed.dtype == bf16
