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


LAST = [ladders.rungs(ladder)[-2] for ladder in LADDERS]  # of ours, which have all ideas before


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


def test_a_docstring_states_what_was_measured():
    times = {key: value["times"] for key, value in json.loads(command.RESULTS.read_text()).items()}
    for ladder, rung in RUNGS:
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


def test_a_file_in_place_of_a_folder_for_pictures_is_refused(tmp_path):
    (taken := tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit, match=r"--out .*taken: File exists: name a folder"):
        command.main(["layer_norm", "2", "--trace", "--out", str(taken)])


@pytest.mark.skipif(kernel_checks.ON_GPU, reason="an answer is checked on a CPU")
def test_a_kernel_that_waits_for_ever_is_given_up(tmp_path):
    source = (ladders.HERE / "layer_norm" / "rung5_ring.py").read_text(encoding="utf-8")
    (mine := tmp_path / "mine.py").write_text(source.replace("SLOTS = 3", "SLOTS = 1"))
    code = "import sys\nfrom learn import __main__ as c\nc.PATIENCE = 5\nc.main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "check", "layer_norm", "5", str(mine)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "warpgroup 0 waits for bars, on which too little arrives" in done.stdout


def test_the_command_lists_and_refuses(capsys, tmp_path):
    assert command.main([]) == 0
    assert capsys.readouterr().out.count("    Rung ") == len(RUNGS)
    (broken := tmp_path / "broken.py").write_text("def layer_norm(:\n")
    (unknown := tmp_path / "unknown.py").write_text("import math\n\nX = mat.pi\n")
    for words, why in (
        (["layer"], "no ladder layer: there are layer_norm"),
        (["layer_norm", "9"], "layer_norm has rungs 1 to 7, not 9"),
        (["check", "layer_norm", "9", __file__], "layer_norm has rungs 1 to 7, not 9"),
        (["check", "layer_norm", "2"], "write python -m learn check"),
        (["check", "layer_norm", "2", str(tmp_path / "no.py")], "no.py does not exist"),
        (["check", "layer_norm", "2", str(tmp_path)], "is not a file: name a Python file"),
        (["check", "layer_norm", "2", str(broken)], "broken.py, line 1: invalid syntax"),
        (["check", "layer_norm", "2", str(unknown)], "unknown.py, line 3: NameError: name 'mat'"),
        (["check", "layer_norm", "2", "README.md"], "README.md is not a Python file"),
        (["check", "layer_norm", "2", RUNGS[4][1].__file__], "is rung 5, not an answer to rung 2"),
        (["check", "layer_norm", "2", ladders.__file__], "has no function layer_norm"),
    ):
        with pytest.raises(SystemExit, match=re.escape(why)):
            command.main(words)
