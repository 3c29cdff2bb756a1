"""explain(): kernels, bytes, operations and floors of a call that is only traced."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from jax import lax

from pallas_kernels import Packed, dispatch, gelu, layer_norm, rms_norm
from pallas_kernels import explain as module
from pallas_kernels.bench.traced import kernels_of
from pallas_kernels.explain import explain, main

ON_GPU = jax.default_backend() == "gpu"
on_cpu = pytest.mark.skipif(ON_GPU, reason="the plan for an H100 without one")
like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
NORM = like("bfloat16", 1024, 4096), like("float32", 4096), like("float32", 4096)


@on_cpu
def test_without_a_gpu_it_is_the_plan_for_an_h100():
    dispatch.reset()
    found = explain("layer_norm", *NORM)
    forward, both = found.parts
    assert found.decision == ("layer_norm", "general", "fits", "supported")
    assert [kernel.name for kernel in forward.kernels] == ["layer_norm_forward"]
    assert {"layer_norm_forward", "layer_norm_backward"} <= {k.name for k in both.kernels}
    assert forward.bytes == 2 * 1024 * 4096 * 2 + 2 * 4096 * 4
    assert forward.limits(found.tops) == {"memory": pytest.approx(forward.bytes / 2.95e6)}
    assert forward.kernels[0].tiles[0] == "float32[4, 4]"  # sums of four warps
    assert "          tiles float32[4, 4]" in str(found)
    assert "on an H100 (here is no GPU)" in str(found)
    assert "floor     5.7 us (memory 5.7 us)" in str(found)
    assert dispatch.decisions() == []  # it was a rehearsal
    layer_norm(*(jnp.ones(a.shape, a.dtype) for a in NORM))
    assert dispatch.decisions()[0].why == "the platform is cpu, not gpu"


@on_cpu
def test_tiles_that_have_two_views_are_listed_as_wgmma_reads_them():
    (kernel,) = explain("attention", *[like("bfloat16", 1, 198, 1, 72)] * 3).parts[0].kernels
    assert kernel.tiles[:2] == ("bfloat16[2, 1, 8, 1, 8, 64]", "bfloat16[2, 1, 8, 1, 8, 32]")


@on_cpu
def test_shared_memory_is_what_the_compiler_reserves(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    small = like("bfloat16", 64, 256), like("float32", 256)
    f = jax.jit(jax.grad(lambda *a: rms_norm(*a, implementation="mosaic").astype(float).sum()))
    f.trace(*small).lower(lowering_platforms=("cuda",))
    (path,) = tmp_path.glob("rms_norm_backward_[0-9]*.resources.txt")
    reserved = int(re.search(r"smem_scratch_bytes=(\d+)", path.read_text())[1])
    both = explain("rms_norm", *small).parts[1].kernels
    (shared,) = (kernel.shared for kernel in both if kernel.name == "rms_norm_backward")
    assert shared == reserved


def test_the_benchmark_counts_what_it_knows_and_xla_the_rest():
    q = like("bfloat16", 1, 128, 2, 64)
    forward, both = explain("attention", q, q, q).parts
    assert forward.flops == 4 * 2 * 64 * 128**2 / 2
    assert both.flops == 3.5 * forward.flops
    assert set(forward.limits(module.H100)) == {"memory", "tensor core"}
    found = explain("attention", q, q, q, softcap=30.0)
    (forward,) = found.parts
    assert forward.flops >= 4 * 2 * 64 * 128**2  # the jnp form does not skip the future
    assert set(forward.limits(module.H100)) == {"memory"}
    assert "its share of the operations is not known" in str(found)


@pytest.mark.parametrize("variant", ["window 1024", "documents"])
@pytest.mark.parametrize("T", [200, slow(1024), slow(3000)])
def test_attention_counts_the_pairs_that_a_short_text_has(variant, T, capsys):
    """A window longer than the text gave a negative count, longer documents too many pairs."""
    case = next(case for case in module.CASES if case.variant == variant)
    sizes = case.sizes[0] | dict(B=1, H=1, D=1, T=T)
    seen = np.tri(T, dtype=bool)
    if variant == "documents":
        document = np.arange(T) // sizes["L"]
        seen &= document == document[:, None]
    else:
        seen &= ~np.tri(T, k=-1024, dtype=bool)
    # Half of the diagonal's squares are counted.
    assert seen.sum() - T / 2 <= case.flops(sizes) / 4 <= seen.sum()
    assert main(["attention", "--variant", variant, f"T={T}", "B=1"]) == 0  # in any order
    assert "must move; -" not in capsys.readouterr().out


@on_cpu
def test_an_array_of_q_k_and_v_counts_once():
    """It is three arguments of a kernel, so packed attention read 2.5 times what it reads."""
    q, joint = like("bfloat16", 1, 256, 2, 64), like("bfloat16", 1, 256, 3 * 128)
    apart, packed = (
        explain("attention", q, q, q),
        explain("attention", Packed(joint, ((2, 64),) * 3)),
    )
    assert [p.arrays() for p in packed.parts] == [p.arrays() for p in apart.parts[:1]]


@on_cpu
def test_many_rows_of_packed_weights_may_be_bound_by_the_tensor_core(capsys):
    """256 rows need 37 us there; it said 13.5 us, memory, and nothing else."""
    for rows, unknown in ((1, False), (256, True)):
        words = f"quantized_linear M={rows} --variant".split()
        assert main([*words, "int4 group 128"]) == 0
        assert ("the tensor core may be the limit" in capsys.readouterr().out) == unknown


def test_counts_have_their_unit_and_number():
    found = explain("rms_norm", like("bfloat16", 4, 64), like("float32", 64))
    if found.parts[0].kernels:
        assert "rms_norm_forward: 1 block of 1 warpgroup, " in str(found)
    head = like("bfloat16", 8192, 2048), like("float32", 128256, 2048), like("int32", 8192)
    assert "4.3 trillion operations" in str(explain("linear_cross_entropy", *head))


@on_cpu
def test_fp8_operands_have_twice_the_tensor_cores_speed():
    x, weight = like("bfloat16", 128, 256), like("bfloat16", 256, 512)
    found = explain("fp8_linear", x, weight)
    microseconds = 2 * 128 * 256 * 512 / 1600e6
    assert found.parts[0].limits(found.tops)["tensor core"] == pytest.approx(microseconds)
    # It promised the same of a call that multiplies in bfloat16, because fp8 does not take 250.
    found = explain("fp8_linear", like("bfloat16", 128, 250), like("bfloat16", 250, 512))
    microseconds = 2 * 128 * 250 * 512 / 800e6
    assert found.parts[0].limits(found.tops)["tensor core"] == pytest.approx(microseconds)


@on_cpu
def test_what_xla_runs_faster_has_no_kernel():
    found = explain("cross_entropy", like("bfloat16", 4, 256), like("int32", 4))
    assert found.decision.why == "faster, as 4 rows, of one block each, are fewer than 41"
    assert not found.parts[0].kernels
    assert "kernel    none of ours" in str(found)


@on_cpu
@pytest.mark.parametrize("d", [64, 72])
def test_calls_that_the_benchmark_does_not_have(d):
    packed = Packed(like("bfloat16", 1, 128, 6 * d), ((2, d),) * 3)
    found = explain("attention", packed)
    assert found.decision.runs == "hopper"
    assert [k.name for k in found.parts[0].kernels] == ["attention_forward"]
    assert found.parts[0].bytes == 2 * 128 * 8 * d  # q, k, v and O


@on_cpu
def test_an_op_that_the_benchmark_does_not_have():
    """vlstm_step was refused: "is not one of" the ops."""
    row, gate = like("bfloat16", 2, 3, 64), like("float32", 2, 3)
    state = like("float32", 2, 3, 64, 64), like("float32", 2, 3, 64), gate
    found = explain("vlstm_step", row, row, row, gate, gate, state)
    assert found.decision.runs == "xla"
    assert found.parts[0].bytes == 4 * 2 * 6 * 64 + 4 * (2 * 6 + 2 * (6 * 64**2 + 6 * 64 + 6))


@on_cpu
@pytest.mark.parametrize("vocabulary", [4, 1000])
def test_an_encoder_reads_the_rows_that_it_needs(vocabulary):
    """Where a table of positions is longer than the text, the benchmark has no such call."""
    tables = like("float32", vocabulary, 128), like("float32", 20, 128)
    (part,) = explain("encoder", like("int32", 2, 8), *tables).parts
    rows = min(vocabulary, 16) + 20 + 16
    assert part.bytes == 4 * (16 + 128 * rows)


@on_cpu
def test_a_call_without_elements_has_a_picture():
    ET.fromstring(explain("gelu", like("bfloat16", 0, 128)).picture())


@on_cpu
@pytest.mark.parametrize("name", ["gate", "bias"])
@pytest.mark.parametrize(
    ("rows", "f", "dtype"), [(1, 128, "bfloat16"), (256, 100, "bfloat16"), (256, 128, "float32")]
)
def test_an_mlp_has_a_kernel_where_its_plan_says_so(name, rows, f, dtype):
    """It said "general: supported" where the activation inside ran on XLA."""
    last = like(dtype, *((64, f) if name == "gate" else (f,)))
    weights = like("bfloat16", 64, f), like("bfloat16", f, 64)
    found = explain("mlp", like("bfloat16", rows, 64), *weights, **{name: last})
    assert (found.decision.runs == "xla") == (not any(part.kernels for part in found.parts))


@on_cpu
@pytest.mark.parametrize("number", [np.float32, np.float64, jnp.float32])
def test_an_option_may_be_any_number_that_the_op_takes(number):
    """It was taken for an array: "eps is traced"."""
    x, weight = NORM[:2]
    assert str(explain("rms_norm", x, weight, eps=number(0.5))) == str(
        explain("rms_norm", x, weight, eps=0.5)
    )
    row = like("bfloat16", 64, 64)
    assert "float32[]" in explain("fp8_linear", row, row, row_norm=number(3)).call  # an array


@on_cpu
def test_arrays_of_numpy_have_the_dtypes_that_jax_gives_them():
    found = explain("encoder", np.zeros((2, 8), np.int64), np.zeros((12, 128)), None)
    assert found.call == "encoder(int32[2, 8], float32[12, 128], wpe=None)"
    right = explain("encoder", like("int32", 2, 8), like("float32", 12, 128), None)
    assert found.parts == right.parts


def test_a_loop_launches_its_kernels_many_times():
    step = lambda x, _: (gelu(x, implementation="mosaic"), None)
    traced = jax.make_jaxpr(lambda x: lax.scan(step, x, length=3))(like("bfloat16", 64, 1024))
    (kernel,) = kernels_of(traced.jaxpr)
    assert (kernel.name, kernel.launches) == ("gelu_forward", 3)


def test_measured_times_stand_beside_the_floor(monkeypatch):
    monkeypatch.setattr(module.compiling, "compile_op", lambda *args, keep: {})
    ms = {"op": {"forward": 0.02, "backward": 0.03}}
    monkeypatch.setattr(module.timing, "time_ops", lambda *args: (ms, {}))
    tops = {"copy_TB_per_s": 2.0, "matmul_TFLOP_per_s": 700.0}
    monkeypatch.setattr(module.timing, "ceilings", lambda: tops)
    found = explain("layer_norm", *NORM)
    case, sizes = module._case("layer_norm", dict(zip(("x", "weight", "bias"), NORM, strict=True)))
    us, measured_tops = module._measured(case, module.compiling.public(case), sizes)
    assert us == {"forward": 20.0, "forward and backward": 50.0}
    parts = [part._replace(microseconds=us[part.name]) for part in found.parts]
    found = found._replace(parts=parts, tops=measured_tops)
    share = found.parts[0].bytes / 2e6 / 20
    assert f"measured  20.0 us: {share:.2f} of the floor's speed" in str(found)
    drawn = found.picture()
    ET.fromstring(drawn)
    assert drawn.count(">measured<") == 2


@on_cpu
def test_the_command_explains_and_refuses(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    assert main(["rms_norm", "N=64", "C=1024", "--picture", str(path)]) == 0
    assert "rms_norm(bfloat16[64, 1024], float32[1024]) on an H100" in capsys.readouterr().out
    ET.fromstring(path.read_text())
    for words, why in (
        (["rms_norm", "T=64"], "T=64 is not AXIS=N with an axis of N, C"),
        (["rms_norm", "N=0"], "N=0 is not AXIS=N"),
        (["linear_cross_entropy", f"V={2**31}"], "V=2147483648 is not AXIS=N with an axis of"),
        (
            ["rms_norm", f"N={'9' * 5000}"],
            "9 is not AXIS=N with an axis of N, C and N from 1 to 2^31",
        ),
        (
            ["attention", "--variant", "half"],
            "--variant half: attention has documents, full, packed, window 1024",
        ),
        (["swiglu", "--variant", "half"], "--variant half: swiglu has none, omit it"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert why in capsys.readouterr().err
    for words, why in (
        (["attention", "H=3", "K=2"], "error: H=3 query heads are not a multiple of K=2"),
        (["rms_norm", "N=64", "--picture", str(tmp_path / "none" / "x.svg")], "none/x.svg"),
    ):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert why in err
    with pytest.raises(ValueError, match="op='tanh' is not one of attention"):
        explain("tanh", NORM[0])
    with pytest.raises(ValueError, match="measure=True needs a GPU, and the platform is cpu"):
        explain("layer_norm", *NORM, measure=True)


@on_cpu
@pytest.mark.slow  # a command in a process of its own
def test_the_command_ends_quietly_if_its_reader_has_exited():
    code = "from pallas_kernels import explain; explain.main(['rms_norm', 'N=64'])"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@on_cpu
def test_a_rehearsal_leaves_ops_as_they_were():
    before = dispatch.device_lacks
    with dispatch.rehearsal():
        assert dispatch.device_lacks("sm_90a") is None
        dispatch.run("op", (dispatch.Form("xla", lambda: None),), None)
    assert dispatch.device_lacks is before
    assert not any(decision.op == "op" for decision in dispatch.decisions())
