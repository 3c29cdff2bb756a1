"""Attention's general form, for every NVIDIA GPU since Ampere: the same op on other kernels."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_checks import ON_GPU, check_op, kernels_run_here, names_in, normal

from pallas_kernels import Packed, ampere, attention, dispatch, mosaic, rope
from pallas_kernels.flash_attention import general
from pallas_kernels.flash_attention.op import attention_reference
from pallas_kernels.flash_attention.schedule import Call, schedule_of

KERNELS = tuple(f"general_attention_{name}" for name in ("forward", "backward_dq", "backward_dkv"))
BF16, FP16 = jnp.bfloat16, jnp.float16
SMALLEST = 99 * 1024  # shared memory of a block on an RTX 30, 40 or 50


pytestmark = pytest.mark.usefixtures("general_kernels")


SMALL = [  # (B, T, S, H, K, D), dtype, options; T and S are not multiples of a tile nor of 8
    ((1, 71, 137, 2, 1, 40), BF16, {"window": 60, "softcap": 3.0, "return_lse": True}),
]
LARGE = [
    ((1, 33, 137, 1, 1, 256), FP16, {"segments": [100], "causal": False}),
    ((1, 1, 1, 1, 1, 64), BF16, {"return_lse": True}),
    ((2, 777, 777, 14, 2, 64), BF16, {"return_lse": True}),
    ((2, 1000, 1000, 12, 3, 128), BF16, {"return_lse": True}),
    ((1, 1024, 1024, 7, 7, 64), FP16, {}),
    ((1, 4097, 4097, 4, 2, 128), BF16, {}),
    ((1, 2048, 2048, 8, 1, 128), FP16, {"causal": False}),
    ((2, 513, 100, 4, 4, 32), BF16, {"causal": False}),
    ((2, 1000, 1000, 6, 2, 256), BF16, {"return_lse": True}),
    ((2, 777, 1500, 6, 2, 96), BF16, {"window": 20, "softcap": 20.0}),
    ((1, 1024, 2048, 4, 1, 128), BF16, {"window": 1}),
    ((2, 1500, 1500, 6, 2, 128), FP16, {"segments": [100, 900], "window": 128}),
    ((1, 700, 700, 2, 1, 256), BF16, {"segments": [333], "softcap": 20.0}),
]


@pytest.mark.parametrize(("shape", "dtype", "options"), SMALL + LARGE * ON_GPU)
def test_it_matches_float64(shape, dtype, options):
    (b, t, s, h, kv, d), options = shape, dict(options)
    if "segments" in options:
        ids = np.searchsorted(options.pop("segments"), np.arange(s), side="right")
        options["segment_ids"] = jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (b, s))
    shapes = (b, t, h, d), (b, s, kv, d), (b, s, kv, d)
    arrays = [normal(seed, x, dtype) for seed, x in enumerate(shapes)]
    check_op(attention, attention_reference, *arrays, kernels=KERNELS, **options)


@pytest.mark.parametrize(
    ("shape", "heads", "theta"),
    [((1, 33, 32), (1, 1), None)]
    + [
        ((1, 64, 128), (2, 1), 1e4),
        ((2, 1001, 64), (12, 3), None),
        ((1, 200, 256), (2, 1), None),  # at 256 the dK/dV kernel runs twice
    ]
    * ON_GPU,
)
def test_one_array_of_q_k_and_v_matches_float64(shape, heads, theta):
    (b, t, d), (h, kv) = shape, heads
    ids = jnp.broadcast_to(jnp.arange(t) // 20, (b, t))

    def op(qkv, implementation="xla"):
        packed = Packed(qkv, ((h, d), (kv, d), (kv, d)))
        if theta:
            positions = jnp.arange(t)
            packed = rope(packed, None, positions, theta=theta, implementation=implementation)
        return attention(packed, segment_ids=ids, implementation=implementation)

    kernels = KERNELS + (("rope_forward", "rope_backward") if theta else ())
    check_op(op, op, normal(0, (b, t, (h + 2 * kv) * d), FP16), kernels=kernels)


@pytest.mark.parametrize(("t", "d", "split"), [(33, 40, False), (33, 36, True)])
def test_lengths_and_head_dimensions_that_need_no_copy(t, d, split):
    f = lambda x: attention(Packed(x, ((2, d), (1, d), (1, d))), implementation="mosaic")
    program = jax.make_jaxpr(f)(jnp.zeros((1, t, 4 * d), BF16))
    assert "general_attention_forward" in names_in(str(program))
    assert ("slice" in {e.primitive.name for e in program.eqns}) == split


# ---- which form runs -------------------------------------------------------------------------


def test_explain_names_the_form():
    q = jnp.zeros((1, 16, 1, 64), BF16)
    jax.eval_shape(functools.partial(attention, implementation="mosaic"), q, q, q)
    assert "attention  general  asked for (1 call traced)" in dispatch.explain()


@pytest.mark.parametrize(
    ("lacks", "asked", "softcap", "runs", "why"),
    [
        ((), None, None, "hopper", "supported"),
        ((), "mosaic", None, "hopper", "asked for"),
        # Nobody has timed the general form beside cuDNN on such a GPU.
        (("sm_90a",), None, None, "cudnn", "older"),
        (("sm_90a",), None, 30.0, "general", "supported"),
        (("sm_90a",), "mosaic", None, "general", "asked for"),
        (("sm_90a",), "xla", 30.0, "xla", "asked for"),
        (("sm_80", "sm_90a"), None, None, "xla", "older"),
        (("sm_80", "sm_90a"), "mosaic", None, "hopper", "asked for"),  # a CPU interprets it
    ],
)
def test_other_gpus_take_it_in_place_of_xla(lacks, asked, softcap, runs, why, monkeypatch):
    monkeypatch.delenv("JAXLLM_KERNELS")
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: "older" if gpu in lacks else None)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **options: q)
    q = jnp.zeros((1, 16, 1, 64), BF16)
    call = lambda q: attention(q, q, q, softcap=softcap, implementation=asked)  # a new function
    jax.eval_shape(call, q)
    (decision,) = dispatch.decisions()
    assert (decision.runs, decision.why) == (runs, why)


def test_another_name_of_a_form_is_an_error(monkeypatch):
    monkeypatch.setenv("JAXLLM_KERNELS", "ampere")
    with pytest.raises(ValueError, match="JAXLLM_KERNELS=ampere is not general: set that, or"):
        attention(*[jnp.zeros((1, 16, 1, 64), BF16)] * 3)


# ---- what the kernels take for granted -------------------------------------------------------


@pytest.mark.parametrize("kernel", ["forward", "backward_dq", "backward_dkv"])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_shared_memory_suffices_on_the_smallest_gpus(kernel, tight, width, monkeypatch):
    monkeypatch.setattr(mosaic, "is_tight", lambda: tight)
    q = jax.ShapeDtypeStruct((1, 512, 1, width), BF16)
    call = Call(True, 1.0, None, None, general=True)
    s = schedule_of(q, q, general.tiles(kernel, width, call), call, kernel == "backward_dkv")
    assert s.width == width
    buffers = general.scratch(kernel, s).values()
    used = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)
    assert used <= SMALLEST - 1024  # the system's share


def _places(layout, shape):
    """(warps, lanes, registers of a lane, elements of a register): places in an array."""
    x = np.arange(math.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        outer, n = x.ndim - len(tile), len(tile)
        sizes = [part for d, t in zip(x.shape[outer:], tile, strict=True) for part in (d // t, t)]
        x = x.reshape(*x.shape[:outer], *sizes)
        inner = [outer + 2 * i + j for j in (0, 1) for i in range(n)]
        x = x.transpose(*range(outer), *inner)
    split = [
        [d % x.ndim for d in dims if isinstance(d, int)]
        for dims in (layout.warp_dims, layout.lane_dims)
    ]
    last = layout.vector_dim % x.ndim
    rest = [d for d in range(x.ndim) if d not in (*split[0], *split[1], last)]
    return x.transpose(*split[0], *split[1], *rest, last).reshape(4, 32, -1, layout.vector_length)


@pytest.mark.parametrize("shape", [(64, 16), (128, 32)])
def test_a_result_of_mma_lies_where_the_next_one_wants_it(shape):
    left = plgpu.Layout.MMA_LHS(BF16).to_mgpu()
    np.testing.assert_array_equal(_places(mgpu.WGMMA_LAYOUT, shape), _places(left, shape))


@pytest.mark.skipif(ON_GPU, reason="on a GPU a copy may have arrived before anybody waits for it")
@pytest.mark.parametrize("waits", [True, False])
def test_the_interpreter_sees_who_does_not_wait_for_a_copy(waits):
    def body(x_ref, y_ref, tile):
        batch = lax.axis_index("block")
        ampere.load_rows(x_ref, tile, batch, 0, 0, 40)
        if waits:
            ampere.wait()
        tile[...] = tile[...] + 1
        ampere.store_rows(tile, y_ref, batch, 0, 0, 40)

    x = normal(0, (1, 40, 1, 32), BF16)
    kernel = mosaic.kernel(
        body,
        out_type=x,
        scratch_types=dict(tile=mosaic.tiled(64, 32, dtype=BF16)),
        grid=(1,),
        grid_names=("block",),
    )
    with kernels_run_here():
        y = np.asarray(kernel(x), np.float32)
    assert np.isfinite(y).all() == waits
    if waits:
        np.testing.assert_array_equal(y, np.asarray(x + 1, np.float32))
