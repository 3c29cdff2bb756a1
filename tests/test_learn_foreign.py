"""Layer norm in CUDA C++: it builds, takes what Python passes, and is as right as the rungs."""

import ctypes
import json
import re

import jax
import jax.numpy as jnp
import kernel_checks
import numpy as np
import pytest

from learn import __main__ as command
from learn import ladder as ladders
from learn import stairs
from learn.layer_norm import cuda_cpp

LADDER = ladders.find("layer_norm")
on_gpu = pytest.mark.skipif(not kernel_checks.ON_GPU, reason="needs a GPU")


def has_nvcc() -> bool:
    try:
        return cuda_cpp.find_nvcc().exists()
    except FileNotFoundError:
        return False


def without_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_a_missing_nvcc_is_one_line_that_says_what_to_install(monkeypatch, tmp_path):
    without_nvcc(monkeypatch, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no nvcc in .*: install .* with pip$") as error:
        cuda_cpp.build(tmp_path)
    assert "\n" not in str(error.value)


def test_an_error_of_nvcc_is_one_line(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho note >&2; echo 'fatal error: no crt' >&2; exit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"nvcc failed: fatal error: no crt; install ") as error:
        cuda_cpp.build(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="a GPU runs it")
def test_the_command_says_that_it_needs_nvcc_and_a_gpu(monkeypatch, capsys, tmp_path):
    assert command.interpret(LADDER, [], tmp_path, trace=False) == 0  # not of some rungs only
    assert ladders.idea(cuda_cpp) not in capsys.readouterr().out
    monkeypatch.setattr(ladders, "rungs", lambda ladder: [])
    assert command.main(["layer_norm"]) == 0
    *_, idea, reason = capsys.readouterr().out.splitlines()
    assert idea == ladders.idea(cuda_cpp)
    assert reason == "    not run: it needs nvcc and a GPU, not the cpu"


def arguments(*batch):
    """Of vmap: batches of x and of bias, one weight."""
    x, weight, bias = ladders.example(LADDER, cuda_cpp).inputs
    more = lambda a: jnp.stack([a * (i + 1) for i in range(*batch)])
    return more(x), weight, more(bias)


def test_it_is_one_call_under_vmap():
    mapped = jax.vmap(cuda_cpp.layer_norm, in_axes=(0, None, 0))
    text = jax.jit(mapped).trace(*arguments(3)).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(rf"custom_call @{cuda_cpp.TARGET}.*", text)
    shapes = "(tensor<3x8x512xbf16>, tensor<3x512xf32>, tensor<3x512xf32>) -> tensor<3x8x512xbf16>"
    assert call.endswith(shapes)


@pytest.mark.slow  # nvcc takes 8 s
@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
def test_it_builds_and_takes_what_python_passes(tmp_path, monkeypatch):
    # XLA on the CPU decodes the handler's arguments as on a GPU, but it has no stream.
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(cuda_cpp.build(tmp_path))).LayerNorm)
    monkeypatch.setattr(cuda_cpp, "TARGET", "learn_layer_norm_on_a_cpu")
    jax.ffi.register_ffi_target(cuda_cpp.TARGET, handler, platform="cpu", api_version=1)
    cpu = jax.devices("cpu")[0]
    x, *weights = jax.device_put(ladders.example(LADDER, cuda_cpp).inputs, cpu)
    own = jax.jit(lambda *arrays: cuda_cpp.layer_norm(*arrays))  # jit caches this target with it
    with pytest.raises(Exception, match=r"bad operands at: 0\)"):  # the stream
        jax.block_until_ready(own(x, *weights))
    with pytest.raises(Exception, match=r"bad operands at: 0, 2, 5\)"):  # and x, y
        jax.block_until_ready(own(x.astype(jnp.float32), *weights))


@on_gpu
@pytest.mark.parametrize("sizes", [{"rows": 8, "cols": 512}, {"rows": 13, "cols": 4096}])
def test_it_is_right(sizes):
    assert cuda_cpp.why_not() is None
    native = lambda function, arguments: jax.jit(function)(*arguments)
    first, second = (
        ladders.check(LADDER._replace(small=sizes), cuda_cpp, native) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)


@on_gpu
def test_vmap_gives_each_batch_its_weights():
    cuda_cpp.register()
    mapped = jax.jit(jax.vmap(cuda_cpp.layer_norm, in_axes=(0, None, 0)))
    x, weight, bias = arguments(3)
    actual = mapped(x, weight, bias)
    for i in range(3):
        np.testing.assert_array_equal(actual[i], cuda_cpp.layer_norm(x[i], weight, bias[i]))


@on_gpu
def test_a_wrong_width_is_refused():
    cuda_cpp.register()
    arrays = jnp.ones((8, 100), jnp.bfloat16), jnp.ones(100), jnp.ones(100)
    with pytest.raises(Exception, match="cols=100 is not a multiple of 256 up to 4096"):
        # The call itself may return before the handler has run.
        jax.block_until_ready(jax.jit(cuda_cpp.layer_norm)(*arrays))


def test_the_docstring_states_what_was_measured():
    times = json.loads(command.RESULTS.read_text())["layer_norm"]["times"]
    stated = re.search(r"^Measured: (\d+) us and (\d+) us", cuda_cpp.__doc__, re.M)
    for sizes, text in zip(LADDER.sizes, stated.groups(), strict=True):
        measured = times[stairs.text(sizes)].get("cuda_cpp", float(text))
        assert float(text) == pytest.approx(measured, rel=0.05)
