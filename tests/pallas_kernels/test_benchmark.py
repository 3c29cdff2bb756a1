import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peers
import pytest
from cases import once_an_op
from kernel_checks import NO_KERNEL, ON_GPU, ON_XLA, kernels_run_here

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.activations import activation
from pallas_kernels.bench import cases, compiling, operands, run, timing
from pallas_kernels.bench.case import A, Case
from pallas_kernels.bench.cases import CASES
from pallas_kernels.bench.report import text

X = A("N C")
SIZES = {"N": 4, "C": 1024}
GELU = Case("gelu", {"x": X}, (SIZES,), {"N": 2}, reads=("x",))


@pytest.fixture(autouse=True)
def fresh():
    dispatch.reset()
    yield
    dispatch.reset()


@pytest.fixture
def times(monkeypatch):
    """Pretends that there is a GPU on which each call takes two milliseconds."""
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    kernel, xla = activation.GELU
    monkeypatch.setattr(activation, "GELU", (kernel._replace(why_slower=lambda *_: None), xla))
    monkeypatch.setattr(timing, "gpu_ms", lambda f, *args: [f(*args), 2.0][1:])


def measured(case, tops):
    with kernels_run_here():
        return run.measure(case, SIZES, tops, {})


@pytest.mark.parametrize("case", once_an_op(CASES), ids=lambda case: f"{case.op}-{case.variant}")
def test_every_case_fits_its_op(case):
    for sizes in case.sizes:
        floating = sum(a.dtype != "int32" for a in case.arrays.values())
        inputs = operands.structs(case, sizes)
        op = compiling.on_xla(case)
        y, gradients = jax.eval_shape(
            lambda *a, op=op: compiling.both(op, jax.tree.map(jnp.ones_like, op(*a)), *a), *inputs
        )
        assert len(gradients) == floating
        found = compiling.decided(case, sizes)
        assert found.supported == ON_GPU
        assert set(case.reads) | set(case.writes or ()) <= set(case.arrays)
        assert set(case.small) <= set(sizes)


def test_quantized_linear_is_labelled_by_its_format_and_shape_and_has_no_backward_pass():
    case = next(case for case in CASES if case.op == "quantized_linear")
    assert f"{case.variant} {text(case.sizes[0])}" == "int4 group 32 M1 K4096 N14336"
    x, words, _ = operands.structs(case, case.sizes[0])
    assert (x.shape, words.size * 8) == ((1, 4096), 4096 * 14336)
    inputs = operands.structs(case, operands.small(case, case.sizes[0]))
    assert set(compiling.compile_op(case, compiling.on_xla(case), inputs, keep=False)) == {
        "forward"
    }
    assert [r["direction"] for r in run.measure(case, case.sizes[0], None, {})] == ["forward"]


def test_every_public_op_with_a_kernel_has_a_case():
    assert {case.op for case in CASES} == set(pallas_kernels.__all__) - NO_KERNEL - ON_XLA


def test_bytes_count_each_input_and_output_once():
    def moved(op, variant=""):
        case = next(c for c in CASES if (c.op, c.variant) == (op, variant))
        sizes = case.sizes[0]
        return sizes, compiling.bytes_moved(case, sizes)

    _, gelu = moved("gelu")
    assert gelu["forward"] == 2 * 2 * 8192 * 14336
    assert gelu["backward"] == 3 * 2 * 8192 * 14336
    _, swiglu = moved("swiglu")
    assert swiglu["forward"] == 3 * 2 * 8192 * 14336
    assert swiglu["backward"] == 5 * 2 * 8192 * 14336
    _, rope = moved("rope")
    assert rope["forward"] == rope["backward"] == 4 * 32 * 1024 * 16 * 64 + 4 * 1024
    n, encoder = moved("encoder", "Zipf ids")
    rest = 4 * 32 * 1024 + 4 * 1024 * 768 + 2 * 32 * 1024 * 768  # tokens, wpe, y
    assert 1000 < (encoder["forward"] - rest) / (4 * 768) < 32 * 1024 / 2  # rows that occur
    assert encoder["backward"] == rest + 4 * n["V"] * n["C"]


def test_zipf_ids_fall_like_one_over_the_rank():
    ids = np.asarray(operands.array(A("N", "int32", "zipf V"), {"N": 200_000, "V": 50304}, 0))
    counts = np.bincount(ids, minlength=50304)
    assert ids.min() == 0
    assert ids.max() < 50304
    np.testing.assert_allclose(counts[0], 200_000 * np.log(2) / np.log(50304), rtol=0.05)
    np.testing.assert_allclose(counts[9], 200_000 * np.log(11 / 10) / np.log(50304), rtol=0.1)


def test_documents_are_packed_one_after_the_other():
    ids = operands.array(A("B T", "int32", "documents L"), {"B": 2, "T": 7, "L": 3}, 0)
    np.testing.assert_array_equal(ids, [[0, 0, 0, 1, 1, 1, 2]] * 2)


def test_a_record_holds_rates_shares_of_the_ceiling_and_errors(times):
    tops = {"copy_TB_per_s": 1e-5, "matmul_TFLOP_per_s": 1.0}
    forward, backward = measured(GELU, tops)
    assert forward["runs"] == "general"
    assert forward["ms"] == {"mosaic": 2.0, "xla": 2.0}
    assert forward["bytes"] == 2 * 2 * 4 * 1024
    np.testing.assert_allclose(forward["rate"]["mosaic"], 16384 / 2e-3 / 1e12)
    np.testing.assert_allclose(forward["of_ceiling"]["mosaic"], 16384 / 2e-3 / 1e12 / 1e-5)
    np.testing.assert_allclose(backward["rate"]["xla"], 24576 / 2e-3 / 1e12)
    for record in (forward, backward):
        assert record["failed"] == {}
        for error in record["error"].values():
            assert 2**-11 < error < 2**-8  # bfloat16 rounds by up to 2^-9
        assert record["flops"] > 4 * 1024


def test_a_kernel_that_is_slower_is_measured_all_the_same(times):
    arrays = {"logits": A("N V"), "labels": A("N", "int32", "uniform V")}
    case = Case("cross_entropy", arrays, ({"N": 4, "V": 256},), {"N": 2}, reads=("logits",))
    with kernels_run_here():
        record, _ = run.measure(case, case.sizes[0], {"copy_TB_per_s": 1.0}, {})
    assert (record["runs"], record["why"][:6]) == ("xla", "faster")
    assert record["ms"] == {"mosaic": 2.0, "xla": 2.0}


def test_matmul_ops_are_held_against_the_matmul_ceiling(times):
    case = Case(
        "gelu", {"x": X}, (SIZES,), {"N": 2}, flops=lambda n: n["N"] * 10**9, cudnn=jax.nn.relu
    )
    tops = {"copy_TB_per_s": 1.0, "matmul_TFLOP_per_s": 8.0}
    forward, both = measured(case, tops)
    assert both["direction"] == "forward+backward"
    np.testing.assert_allclose(forward["of_ceiling"]["cudnn"], 4e9 / 2e-3 / 1e12 / 8)
    np.testing.assert_allclose(both["of_ceiling"]["mosaic"], 3.5 * 4e9 / 2e-3 / 1e12 / 8)
    assert forward["error"]["cudnn"] > 0.01  # relu is not gelu, so the error is really measured


def test_a_rival_that_fails_is_named_and_the_others_are_measured(times):
    def rival(x):
        raise ValueError("no such shape\nand more")

    case = Case("gelu", {"x": X}, (SIZES,), {"N": 2}, cudnn=rival)
    tops = {"copy_TB_per_s": 1.0, "matmul_TFLOP_per_s": 1.0}
    forward, _ = measured(case, tops)
    assert forward["failed"] == {"cudnn": "ValueError: no such shape"}
    assert timing._line(MemoryError()) == "MemoryError: "  # Python raises it without a message
    assert set(forward["ms"]) == {"mosaic", "xla"}


@pytest.mark.skipif(ON_GPU, reason="shows what a machine without a GPU says")
def test_a_run_without_a_gpu_says_what_it_cannot_measure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "CASES", (GELU,))
    assert run.main(["gelu", "--out", str(tmp_path / "results")]) == 0
    shown = capsys.readouterr().out
    assert "Not measured: times, rates and ceilings, because the platform is cpu, not gpu" in shown
    assert "GFLOP: of matmuls, or all that XLA counts" in shown
    row = next(line for line in shown.splitlines() if "backward" in line)
    assert " 0.0246 " in row  # MB of x, dy and dx
    result = json.loads((tmp_path / "results" / "benchmark.json").read_text())
    assert result["ceilings"] is None
    assert [r["direction"] for r in result["records"]] == ["forward", "backward"]
    for record in result["records"]:
        assert record["ms"] == {}
        assert record["why"] == "the platform is cpu, not gpu"
        assert 2**-11 < record["error"]["xla"] < 2**-8
    assert (tmp_path / "results" / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_and_the_picture_show_what_was_measured(times, tmp_path):
    tops = {"copy_TB_per_s": 1.0, "matmul_TFLOP_per_s": 1.0}
    records = measured(GELU, tops)
    records[0]["ms"]["xla"] = 5.0
    result = {"device": "D", "versions": {"jax": "1"}, "ceilings": tops, "not_measured": None}
    view = run.table(result | {"records": records})
    cells = {str(column.header): next(column.cells) for column in view.columns}
    assert cells["ms"] == "2.0000"
    assert cells["x XLA"] == "2.50"
    assert cells["of ceiling"].endswith("*")  # 16 kB
    run.draw(result | {"records": records}, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_an_unknown_op_is_an_error_of_one_line(capsys, tmp_path):
    assert run.main(["gelu", "gleu", "--out", str(tmp_path / "x")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: 'gleu' is not one of attention, ")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").touch()
    assert run.main(["gelu", "--out", str(tmp_path / "file")]) == 2
    assert "file cannot be created: File exists" in capsys.readouterr().err


def test_an_unknown_option_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(["--foo"])
    assert capsys.readouterr().err == "error: unrecognized arguments: --foo; see --help\n"


@pytest.mark.parametrize("call", [None, "1,64,2,1,64"])
def test_peers_that_are_not_there_say_so_beside_ours(call, times, capsys, monkeypatch):
    case = next(c for c in CASES if c.op == "attention")
    tiny = dict(zip("BTHKD", (1, 64, 2, 1, 64), strict=True))
    monkeypatch.setattr(cases, "CASES", [dataclasses.replace(case, sizes=(tiny,))])
    if not ON_GPU:  # the kernels, interpreted, would take 20 s
        public = compiling.public
        on_xla = lambda case, **options: public(case, **options | {"implementation": "xla"})
        monkeypatch.setattr(compiling, "public", on_xla)
    peers.attention(call, full=call is not None)
    rows = {line[2:30].strip(): line[30:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert "forward 2  forward+backward 2" in rows["jaxllm"]
    assert call or "forward 2  forward+backward 2" in rows["JAX XLA"]
    if not ON_GPU:  # whether or not they are installed
        for peer in ("JAX cuDNN", "tokamax mosaic", "tokamax triton", "PyTorch CUDNN"):
            assert "failed" in rows[peer]


@pytest.mark.parametrize("kind", ["int", "fp8", "bf16"])
def test_peers_time_plain_weights(times, kind):
    columns = peers.plain_linear(kind, m=4, k=64, n=32)
    assert columns.pop("kernels") == 2000
    assert list(columns) == ([] if kind == "bf16" else ["by"])


def test_a_shared_file_has_the_device_versions_and_figures_but_no_paths(tmp_path):
    device = jax.devices()[0].device_kind
    path = run.share({"device": device, "records": [{"op": "gelu"}]}, tmp_path)
    text = path.read_text()
    shared = json.loads(text)
    assert path.name.endswith(f"-jax-{jax.__version__}.json")
    assert (shared["device"], shared["records"]) == (device, [{"op": "gelu"}])
    assert shared["packages"]["jax"] == jax.__version__
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
