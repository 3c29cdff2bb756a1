"""The grids with which kernels would be launched, at sizes too large to run on a CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attention, gelu, layer_norm, mosaic, rms_norm, rope

TOKENS = 2**22 + 64


@pytest.fixture
def grids(monkeypatch):
    """Collects the grid of every kernel built from here on, by the kernel's name."""
    built, kernel = {}, plgpu.kernel

    def record(body, **options):
        built[body.__name__] = dict(zip(options["grid_names"], options["grid"], strict=True))
        return kernel(body, **options)

    monkeypatch.setattr(plgpu, "kernel", record)
    return built


@pytest.mark.parametrize(
    ("op", "shapes", "kernels"),
    [
        (layer_norm, [(TOKENS, 768), (768,)], ["layer_norm_forward", "layer_norm_backward"]),
        (
            lambda x, residual, weight, **o: rms_norm(x, weight, residual=residual, **o),
            [(TOKENS, 512), (TOKENS, 512), (512,)],
            ["add_rms_norm_forward"],
        ),
        (gelu, [(TOKENS, 256), (256,)], ["gelu_backward"]),
        (
            lambda q, k, **o: rope(q, k, jnp.arange(2**14), **o),
            [(TOKENS // 2**14, 2**14, 4, 128), (TOKENS // 2**14, 2**14, 4, 128)],
            ["rope_forward", "rope_backward"],
        ),
    ],
)
def test_cuda_can_launch_the_grids_of_many_tokens(grids, op, shapes, kernels):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def both(*arrays):
        y, pull = jax.vjp(lambda *a: op(*a, implementation="mosaic"), *arrays)
        return pull(y)

    jax.eval_shape(both, *arrays)
    for name in kernels:
        *slow, _ = grids[name].values()  # CUDA: 65,535 blocks along all axes but the fastest
        assert max(slow, default=1) <= 65_535, f"{name} {grids[name]}"


def test_axes_of_a_grid_change_places_only_where_they_must():
    assert mosaic.grid(a=65_535, b=2, c=1) == {
        "grid": (65_535, 2, 1),
        "grid_names": ("a", "b", "c"),
    }
    assert mosaic.grid(a=65_536, b=2, c=1) == {
        "grid": (2, 1, 65_536),
        "grid_names": ("b", "c", "a"),
    }


def test_tiles_of_the_backward_pass_may_be_higher_than_those_forward():
    x, s = (jax.ShapeDtypeStruct((31, 1984), dtype) for dtype in (jnp.float16, jnp.float32))
    w = jax.ShapeDtypeStruct((1984,), jnp.float16)

    def both(x, s, w):
        y, pull = jax.vjp(
            lambda x, s, w: rms_norm(x, w, residual=s, x_bias=w, implementation="mosaic"), x, s, w
        )
        return pull(y)

    assert [a.shape for a in jax.eval_shape(both, x, s, w)] == [x.shape, s.shape, w.shape]


def test_an_interpreter_that_would_hang_says_so(monkeypatch):
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def trace():
        return jax.eval_shape(lambda q: attention(q, q, q, implementation="mosaic"), q)

    monkeypatch.setenv("NPROC", "2")
    assert trace().shape == q.shape  # to be lowered
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        jax.clear_caches()
        with pytest.raises(RuntimeError, match="3 XLA threads, but XLA has 2: set NPROC=16"):
            trace()
        monkeypatch.setenv("NPROC", "3")
        assert trace().shape == q.shape
    jax.clear_caches()
