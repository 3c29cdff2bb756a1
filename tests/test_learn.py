"""The ladders: every rung is right, lowers for a GPU, and does what its exercise asks for."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import kernel_checks
import pytest
from cases import slow

from learn import __main__ as command
from learn import ladder as ladders
from learn import record, stairs, trace
from learn.record import Event

LADDERS = [ladders.find(name) for name in ladders.names()]
RUNGS = [(ladder, rung) for ladder in LADDERS for rung in ladders.rungs(ladder)]
SHIPS = [(ladder, ladders.rungs(ladder)[-1]) for ladder in LADDERS]  # with tests of their own
OURS = [x for x in RUNGS if x not in SHIPS]
LAST = [ladders.rungs(ladder)[-2] for ladder in LADDERS]  # of ours, which have all ideas before
name = lambda value: getattr(value, "__name__", getattr(value, "name", None)).removeprefix("learn.")
books = {}  # what each rung did, for the tests below
# Rungs that change a constant of the rung before, or whose code a later one repeats or runs.
COVERED = (
    "layer_norm.rung3_vectors",
    "low_bit_gemv.rung3_vectors",
    "vlstm.rung1_products",
    "vlstm.rung2_causal",
    "vlstm.rung5_chunks",
)
# Last rungs of ladders of which `check` takes an answer below, at both of its sizes.
ANSWERS = (
    "layer_norm.rung6_wide_rows",
    "layer_norm_backward.rung5_ring",
    "attention_backward.rung4_ring",
    "encoder_backward.rung4_tiles",
)
# The last rung may be so far above the roofline: vLSTM's moves the states as well, which the
# backward pass needs.
ABOVE = {"vlstm": 3}


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="python -m learn checks the rungs on a GPU")
@pytest.mark.parametrize(
    ("ladder", "rung"), [slow(*x) if name(x[1]) in COVERED else x for x in OURS], ids=name
)
def test_a_rung_is_right(ladder, rung):
    inputs = ladders.example(ladder, rung).inputs
    with record.recording() as book:
        ladders.check(ladder, rung, record.watched(book))
    books[rung] = book, inputs
    wanted = ladder.properties.get(ladders.number(rung))
    assert wanted is None or wanted(book, *inputs) is None


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="python -m learn checks the rungs on a GPU")
@pytest.mark.parametrize("ladder", LADDERS, ids=name)
def test_an_exercise_refuses_the_rung_that_it_starts_from(ladder):
    rungs = ladders.rungs(ladder)
    for number, wanted in ladder.properties.items():
        if (before := rungs[number - 2]) in books:  # one process may run a part of the tests
            book, inputs = books[before]
            assert wanted(book, *inputs), f"{name(before)} passes for rung {number}"


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="pictures are of interpreted runs")
@pytest.mark.parametrize("ladder", LADDERS, ids=name)
def test_the_pictures_on_the_page_are_of_the_rungs(ladder, tmp_path):
    for rung in ladders.rungs(ladder):
        stored = ladders.HERE / ladder.name / f"{name(rung).rpartition('.')[2]}.svg"
        if stored.exists() and rung in books:
            drawn = command.pictures(books[rung][0], rung, tmp_path, ladder.bandwidth)
            assert stored.read_text() in [path.read_text() for path in drawn], "draw it again"


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="an answer is checked on a CPU")
@pytest.mark.parametrize(
    ("ladder", "rung"),
    [x if x[1] in LAST and name(x[1]) not in ANSWERS else slow(*x) for x in OURS],
    ids=name,
)
def test_a_rung_is_right_at_the_other_size_of_check(ladder, rung):
    with record.recording() as book:
        ladders.check(ladder, rung, record.watched(book), ladder.again)


@pytest.mark.parametrize("ladder", LADDERS, ids=name)
def test_the_other_size_of_check_is_another(ladder):
    assert not set(ladder.small.items()) & set(ladder.again.items()) - {("DQK", 64), ("DV", 128)}


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="the interpreter counts")
@pytest.mark.parametrize(
    ("ladder", "number", "moved"),
    [
        # Three walks over x; two weights for each of two blocks of four warps.
        ("layer_norm", 2, f" {3 * 8 * 8 + 2 * 8 * 2 * 4} requests of the warps"),
        # Two warps of a warpgroup wait for the same phase of a barrier.
        ("attention_backward", 5, f" {3 * 192 * 64 * 2 + 2 * 192 * 4} bytes written"),
        # h and C in bfloat16; n, and two statistics of each row, in float32.
        ("vlstm", 7, f" {2 * (128 + 2 * 64) * 128 + 4 * (2 * 64 + 2 * 128)} bytes written"),
        # x and words of 4 bits, with scales in bfloat16 for each of four warps.
        ("low_bit_gemv", 6, f" {2 * 1024 + 1024 * 16 // 2 + 4 * 16 * 2} bytes loaded"),
    ],
)
def test_a_rung_is_drawn_and_counted(ladder, number, moved, tmp_path, capsys):
    assert command.main([ladder, str(number), "--trace", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert moved in out
    assert "wrote" in out


@pytest.mark.parametrize(
    ("ladder", "rung"), [x if x[1] in LAST else slow(*x) for x in OURS], ids=name
)
def test_a_rung_lowers_for_a_gpu(ladder, rung):
    shapes = jax.eval_shape(lambda: ladder.inputs(ladder.sizes[0]))
    traced = jax.jit(ladders.whole(ladder, ladders.number(rung))).trace(*shapes)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("ladder", "rung"), SHIPS, ids=name)
def test_the_last_rung_is_the_op_that_ships(ladder, rung):
    shapes = jax.eval_shape(lambda: ladder.inputs(ladder.sizes[0]))
    found = jax.eval_shape(ladders.whole(ladder, ladders.number(rung)), *shapes)
    wanted = jax.eval_shape(ladder.reference, *shapes)
    assert jax.tree.leaves(found) == jax.tree.leaves(wanted)
    assert "pallas_kernels" in rung.__doc__


@pytest.mark.parametrize(("ladder", "rung"), RUNGS, ids=name)
def test_a_rung_is_short_and_counts(ladder, rung):
    with open(rung.__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    assert len(lines) <= 120
    assert re.search(r"^Counted: ", rung.__doc__, re.MULTILINE)
    assert rung.__doc__.startswith(f"Rung {ladders.number(rung)}: ")
    page = (ladders.HERE / ladder.name / "README.md").read_text(encoding="utf-8")
    assert f"({name(rung).rpartition('.')[2]}.py)" in page


def test_a_docstring_states_what_was_counted_and_measured():
    times = {key: value["times"] for key, value in json.loads(command.RESULTS.read_text()).items()}
    for ladder, rung in RUNGS:
        counted = re.search(r"\nCounted: (.*?)\n\n", rung.__doc__, re.DOTALL)[1]
        found = re.findall(r"([\d.]+)\s(us|ms)\b", counted.replace(",", ""))
        stated = [float(number) * (1000 if unit == "ms" else 1) for number, unit in found]
        count = ladder.counted[ladders.number(rung) - 1](ladder.sizes[0])
        assert pytest.approx(count, rel=0.03) in stated, name(rung)
        if ladder.name in times:
            measured = times[ladder.name][stairs.text(ladder.sizes[0])][name(rung).split(".")[1]]
            found = re.search(r"^Measured: ([\d.]+) (us|ms)\b", rung.__doc__, re.MULTILINE)
            assert found, f"{name(rung)} took {measured:.0f} us"
            stated = float(found[1]) * (1000 if found[2] == "ms" else 1)
            assert stated == pytest.approx(measured, rel=0.05), name(rung)


@pytest.mark.parametrize("ladder", LADDERS, ids=name)
def test_no_rung_is_counted_below_the_roofline(ladder):
    assert len(ladder.counted) == len(ladders.rungs(ladder))
    for sizes in ladder.sizes:
        counted = [count(sizes) for count in ladder.counted]
        assert min(counted) >= 0.999 * ladder.floor(sizes)
        assert counted[-1] <= ABOVE.get(ladder.name, 1.05) * ladder.floor(sizes)
        assert counted[0] > 1.5 * counted[-1]


@pytest.mark.parametrize("ladder", LADDERS, ids=name)
def test_the_stairs_on_the_page_are_those_of_the_results(ladder):
    results = json.loads(command.RESULTS.read_text()).get(ladder.name, {})
    stored = (ladders.HERE / ladder.name / "stairs.svg").read_text(encoding="utf-8")
    assert stored == stairs.draw(ladder, results), "run python -m learn draw"
    ET.fromstring(stored)


def test_a_gpu_run_fills_the_stairs(monkeypatch, tmp_path):
    ladder = LADDERS[0]._replace(sizes=({"rows": 8, "cols": 256},))
    rungs, seen = ladders.rungs(ladder), []
    monkeypatch.setattr(ladders, "check", lambda ladder, rung, run: seen.append(rung))
    monkeypatch.setattr(command, "compiled", lambda function, arguments: function)
    monkeypatch.setattr("pallas_kernels.bench.timing.gpu_ms", lambda f, *args: [0.25, 0.5, 0.75])
    tops = {"copy_TB_per_s": 2.0, "matmul_TFLOP_per_s": 700.0}
    results = command.measure(ladder, rungs, tops)
    assert seen == rungs
    assert set(results["times"]["8 x 256"].values()) == {500.0}
    assert results["floors"]["8 x 256"] == 8 * 256 * 2 * 2 / 2e6
    command.draw(ladder, {ladder.name: results}, tmp_path)
    drawn = (tmp_path / ladder.name / "stairs.svg").read_text()
    assert drawn.count("500.0 us") == len(rungs)
    assert "XLA" in drawn
    assert "not measured" not in drawn


def event(kind, wg=0, **more):
    return Event(kind, kernel=0, block=(0,), wg=wg, **more)


def test_a_trace_follows_copies_and_barriers():
    copy = event("copy in", buffer="x", space="global", bytes=2200, barrier="bar")
    events = [copy, event("wait", buffer="bar"), event("arrive", buffer="go")]
    other = [event("wait", wg=1, buffer="go")]
    bars = trace.schedule([*other, *events], {"bar": 1, "go": 1}, bandwidth=22)
    arrives = 2200 / 22 + trace.LATENCY
    assert ("x", "copy in", 0.0, arrives) in [bar[:4] for bar in bars]
    assert ("warpgroup 0", "wait", trace.ISSUE, arrives) in [bar[:4] for bar in bars]
    assert ("warpgroup 1", "wait", 0.0, arrives) in [bar[:4] for bar in bars]
    ET.fromstring(trace.draw(bars, "a <title> & more"))


def test_each_warp_waits_for_each_phase_of_a_barrier():
    one = [event("arrive", wg=0, buffer="free")]
    both = [event("wait", wg=1, buffer="free", warp=warp) for warp in (0, 1)]
    assert trace.schedule([*one, *both], {"free": 1})
    with pytest.raises(RuntimeError, match="warpgroup 1 waits for ever"):
        trace.schedule([*one, *both, both[0]], {"free": 1})


def test_a_copy_without_a_barrier_is_waited_for_by_its_group():
    copy = lambda **more: event("copy in", buffer="x", space="global", bytes=220, count=1, **more)
    wait = lambda left: event("wait copies in", count=left)
    end = lambda left: max(
        bar.stop for bar in trace.schedule([copy(), copy(), wait(left)], {}) if bar.kind == "wait"
    )
    assert end(0) - end(1) == pytest.approx(220 / 22)


def test_a_file_of_the_reader_is_checked_by_its_rungs_formula(tmp_path):
    ladder, path = ladders.find("vlstm"), tmp_path / "mine.py"
    path.write_text("")
    kept = [number for number in range(1, 5) if number not in ladder.formulas]
    truths = [ladders.example(ladder, ladders.load(path, number)).truth for number in range(1, 5)]
    same = [abs(truth - truths[3]).max() == 0 for truth in truths]
    assert kept == [3, 4]
    assert same == [False, False, True, True]


def test_a_trace_names_what_waits_for_ever():
    with pytest.raises(RuntimeError, match="warpgroup 0 waits for ever.*bar"):
        trace.schedule([event("wait", buffer="bar")], {"bar": 1})


def test_loads_of_one_instruction_overlap_only_if_they_are_different():
    load = lambda where: event("load", buffer="x", space="global", bytes=22, where=where)
    end = lambda *events: max(bar.stop for bar in trace.schedule(events, {}))
    assert end(load(1), load(2)) < 1.1 * trace.LATENCY < 2 * trace.LATENCY < end(load(1), load(1))


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="the interpreter finds races")
def test_the_interpreter_finds_tokens_that_collide(capsys, caplog):
    path = ladders.HERE / "encoder_backward" / "collide.py"
    assert command.main(["check", "encoder_backward", "1", str(path)]) == 1
    assert re.search(r"a race on dwte_ref\[\d, 0:256\]: .* block", capsys.readouterr().out)
    assert caplog.messages == []  # JAX's log of the error is a page


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="an answer is checked on a CPU")
@pytest.mark.parametrize(
    ("rung", "constant", "value", "why"),
    [
        ("layer_norm.rung2_warp_a_row", "ROWS = 4", "ROWS = 3", "(3, 32) is no multiple of (4,"),
        ("layer_norm.rung2_warp_a_row", "VEC = 1", "VEC = 3", "that no block writes is NaN"),
        ("encoder.rung3_batch", "BATCH = 8", "BATCH = 16", "the grid (0, 4) has no block"),
        ("attention.rung2_online", "TILE = 64", "TILE = 32", "a multiple of 64, but got 32"),
    ],
)
def test_an_impossible_tile_is_refused_with_its_reason(
    rung, constant, value, why, tmp_path, capsys
):
    ladder, _, module = rung.partition(".")
    source = (ladders.HERE / ladder / f"{module}.py").read_text(encoding="utf-8")
    assert source.count(constant) == 1
    (mine := tmp_path / "mine.py").write_text(source.replace(constant, value))
    number = re.search(r"\d", module)[0]
    assert command.main(["check", ladder, number, str(mine)]) == 1
    assert why in capsys.readouterr().out


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="an answer is checked on a CPU")
def test_an_answer_in_jnp_is_no_kernel(tmp_path, capsys):
    code = "from learn.layer_norm import LADDER\n\nlayer_norm = LADDER.reference\n"
    (mine := tmp_path / "mine.py").write_text(code)
    assert command.main(["check", "layer_norm", "2", str(mine)]) == 1
    assert capsys.readouterr().out == "not yet: no kernel ran: an answer calls mosaic.kernel\n"


def answer(folder, rung, *changes):
    """A copy of a rung with changes: its ladder, number and path."""
    source = (ladders.HERE / f"{rung.replace('.', '/')}.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    (mine := folder / "mine.py").write_text(source)
    return [rung.partition(".")[0], re.search(r"\d", rung)[0], str(mine)]


ROWS, RING = "layer_norm.rung4_registers", "layer_norm.rung5_ring"
KERNEL, GRID = "return mosaic.kernel(", "grid=(rows // ROWS,)"


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="an answer is checked on a CPU")
@pytest.mark.parametrize(
    ("rung", "changes", "why"),
    [
        (ROWS, [(" + eps)", ")")], "result 0: max error"),
        (ROWS, [("x.shape, x.dtype)", "x.shape, jnp.float32)")], "is float32(8, 512), not bf"),
        (ROWS, [(KERNEL, "y = mosaic.kernel(")], "result 0 is None, not bfloat16(8, 512)"),
        (ROWS, [(")(x, weight, bias)", ")(x, weight, bias), None")], "returns 2 results, not 1"),
        (ROWS, [(GRID, "grid=(2,)")], "at 128 x 768, another size: result 0"),
        (ROWS, [("range(cols // STEP)", "range(2)")], "at 128 x 768, another size: result 0"),
        (ROWS, [(GRID, "grid=(1 + rows // ROWS,)")], "x_ref: reading [8:12, 0:256] but buffer"),
        (ROWS, [(GRID, "grid=(2 * rows // ROWS,)"), ('"block")', '"block") // 2')],
         "a race on y_ref[0:4, 0:256]: a write and a write by two blocks"),
        (RING, [("        plgpu.wait_smem_to_gmem(0)\n", "")], "finished on thread warpgroup 0."),
        ("matmul.rung7_persistent", [("plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass")],
         "a race on y_smem["),
        ("layer_norm_backward.rung4_persistent", [("BLOCKS", "MANY")], "call the largest number"),
        ("layer_norm_backward.rung2_parts", [("min(PARTS, x.shape[0] // ROWS)", "1")],
         "a block takes 4 turns, all 16 rows"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_refused_with_its_reason(rung, changes, why, tmp_path, capsys):
    assert command.main(["check", *answer(tmp_path, rung, *changes)]) == 1
    assert why in capsys.readouterr().out


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="an answer is checked on a CPU")
@pytest.mark.parametrize(
    ("rung", "changes"),
    [
        ("layer_norm.rung3_vectors", [
            ("body(x_ref, weight_ref, bias_ref,", "body(weight_ref, bias_ref, x_ref,"),
            (")(x, weight, bias)", ")(weight, bias, x)"),
        ]),
        ("layer_norm_backward.rung2_parts", [("x_ref", "z_ref"), ("dy_ref", "w_ref")]),
        slow("layer_norm_backward.rung4_persistent", [("dx_ref", "out_ref")]),
        ("encoder_backward.rung3_in_flight", [
            ("    _, order", "    dwpe = position_sums(dy, wte.dtype)\n    _, order"),
            ("return dwte, position_sums(dy, wte.dtype)", "return dwte, dwpe"),
        ]),
        slow("matmul.rung2_shared_tiles", [  # in another order, as layer_norm's
            ("body(a_ref, b_ref, d_ref,", "body(d_ref, b_ref, a_ref,"),
            (")(a.T, b.T, d)", ")(d, b.T, a.T)"),
        ]),
        slow("attention_backward.rung4_ring", [  # the keys first
            ("    dq = gradients(False, q, do, k, v, lse, delta)\n", ""),
            ("    return *dq, *gradients(True, k, v, q, do, lse, delta)",
             "    own = gradients(True, k, v, q, do, lse, delta)\n"
             "    return *gradients(False, q, do, k, v, lse, delta), *own"),
        ]),
        (ROWS, [("import jax\n", "from dataclasses import dataclass\nimport jax\n"),
                ("ROWS = 4", "@dataclass\nclass A:\n    rows: 'int' = 4\n\nROWS = A().rows")]),
    ],
)  # fmt: skip
def test_a_right_answer_passes_however_it_is_written(rung, changes, tmp_path, capsys):
    assert command.main(["check", *answer(tmp_path, rung, *changes)]) == 0, capsys.readouterr().out


def test_what_is_interpreted_needs_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for words in (["check", "layer_norm", "2", RUNGS[1][1].__file__], ["layer_norm", "--trace"]):
        with pytest.raises(SystemExit, match="interprets on the CPU: set JAX_PLATFORMS=cpu"):
            command.main(words)


def test_a_file_in_place_of_a_folder_for_pictures_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    (taken := tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit, match=r"--out .*taken: File exists: name a folder"):
        command.main(["layer_norm", "2", "--trace", "--out", str(taken)])


@pytest.mark.slow
@pytest.mark.skipif(kernel_checks.ON_GPU, reason="an answer is checked on a CPU")
def test_a_kernel_that_waits_for_ever_is_given_up(tmp_path):
    source = (ladders.HERE / "layer_norm" / "rung5_ring.py").read_text(encoding="utf-8")
    (mine := tmp_path / "mine.py").write_text(source.replace("SLOTS = 3", "SLOTS = 1"))
    code = "import sys\nfrom learn import __main__ as c\nc.PATIENCE = 5\nc.main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "check", "layer_norm", "5", str(mine)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "warpgroup 0 waits for bars, on which too little arrives" in done.stdout


def test_the_command_lists_and_refuses(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert command.main([]) == 0
    assert capsys.readouterr().out.count("    Rung ") == len(RUNGS)
    (broken := tmp_path / "broken.py").write_text("def layer_norm(:\n")
    (unknown := tmp_path / "unknown.py").write_text("import math\n\nX = mat.pi\n")
    (ends := tmp_path / "ends.py").write_text("import sys\n\nsys.exit(0)\n")
    for words, why in (
        (["layer"], "no ladder layer: there are layer_norm"),
        (["layer_norm", "9"], "layer_norm has rungs 1 to 7, not 9"),
        (["check", "layer_norm", "9", __file__], "layer_norm has rungs 1 to 7, not 9"),
        (["check", "layer_norm", "2"], "write python -m learn check"),
        (["check", "layer_norm", "2", str(tmp_path / "no.py")], "no.py does not exist"),
        (["check", "layer_norm", "2", str(tmp_path)], "is not a file: name a Python file"),
        (["check", "layer_norm", "2", str(broken)], "broken.py, line 1: invalid syntax"),
        (["check", "layer_norm", "2", str(unknown)], "unknown.py, line 3: NameError: name 'mat'"),
        (["check", "layer_norm", "2", str(ends)], "ends.py, line 3: SystemExit: 0"),
        (["check", "layer_norm", "2", "README.md"], "README.md is not a Python file"),
        (["check", "layer_norm", "2", RUNGS[4][1].__file__], "is rung 5, not an answer to rung 2"),
        (["check", "layer_norm", "2", ladders.__file__], "has no function layer_norm"),
    ):
        with pytest.raises(SystemExit, match=re.escape(why)):
            command.main(words)
