"""The scripts in tests/ that people run: --help, their own examples, and what is missing."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REPO = TESTS.parent
SCRIPTS = [
    path.stem
    for path in sorted(TESTS.glob("*.py"))
    if re.search(f"python tests/{path.name}", path.read_text())
    and not re.match('"""(Run by|Tests|The scripts)', path.read_text())
]
# Their examples run on a CPU, too, and for long.
EVERYWHERE = {
    *("compile_ahead", "first_step", "fp8_calls", "generation_speed", "house_size"),
    *("house_walks", "paired_fp8", "paired_losses", "random_checks", "resume_memory"),
    "verify_cost",
}

# {words: a part of the error}.
MISTAKES = {
    ("compile_ahead", "nonsense"): "no op nonsense; there are layer_norm, ",
    ("generation_speed", "gpt2_small", "--rows", "0"): "--rows 0 is not positive",
    ("generation_speed", "gpt2_small", "--quantize", "int99"): "no format int99; there are int8, ",
    ("house_walks", "/dev"): "/dev is no checkout",
    ("paired_losses", "run", "xla", "/nothing", "/dev/null"): "/nothing has no train_*.bin",
    ("random_checks", "--line", "Call('gelu'"): "is no call as it was printed",
    ("verify_cost", "gpt2_small", "2", "--train.seq_len"): "--train.seq_len needs a value",
}

# All in one process, which imports JAX once.  No GPU is found, and no process asks for one.
DRIVER = """
import contextlib, io, json, os, runpy, sys
tests, calls = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, tests)
import scripts
def needs_gpu(count=1):
    raise scripts.InputError("no GPU")
scripts.needs_gpu = needs_gpu
environment, found = dict(os.environ), []
for name, words in calls:
    path = os.path.join(tests, name + ".py")
    sys.argv = [path, *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(
        io.StringIO()
    ) as err:
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
    os.environ.clear()
    os.environ.update(environment)
    found.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


def doc(name: str) -> str:
    return (TESTS / f"{name}.py").read_text().split('"""')[1]


def examples(name: str) -> list[list[str]]:
    """The words of the command lines in a script's docstring."""
    text = doc(name).replace("\\\n", "")
    lines = re.findall(rf"^    .*python tests/{name}\.py(.*)", text, re.MULTILINE)
    # Two spaces or a bracket end the words; what follows explains them.
    return [shlex.split(re.split(r"  +| \(", line)[0]) for line in lines]


ON_GPUS = [(name, *x) for name in SCRIPTS if name not in EVERYWHERE for x in examples(name)]


@pytest.fixture(scope="module")
def said() -> dict:
    """{(script, words): (status, output, errors)}."""
    calls = [[name, words] for name in SCRIPTS for words in (["--help"], ["--nonsense"])]
    calls += [[name, ["nonsense", "4"]] for name in SCRIPTS]
    calls += [[name, words] for name, *words in (*ON_GPUS, *MISTAKES)]
    # Other tests, and --dry_run for GPUs, set JAX_PLATFORMS, with which two_gpu_kills rehearses.
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(TESTS), json.dumps(calls)],
        capture_output=True, text=True, cwd=REPO, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    return {(name, *words): result for (name, words), result in zip(calls, found, strict=True)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_prints_the_docstring(said, name):
    status, output, errors = said[name, "--help"]
    assert (status, errors) == (0, "")
    assert doc(name).splitlines()[0] in output


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("words", [("--nonsense",), ("nonsense", "4")], ids=" ".join)
def test_a_wrong_argument_is_one_line(said, name, words):
    status, _, errors = said[name, *words]
    assert status == 2
    assert re.fullmatch("error: .*\n", errors), errors


@pytest.mark.parametrize("call", MISTAKES, ids=" ".join)
def test_a_mistake_is_named(said, call):
    status, _, errors = said[call]
    assert status == 2
    assert MISTAKES[call] in errors
    assert re.fullmatch("error: .*\n", errors)


def test_the_examples_are_right_and_without_a_gpu_one_line(said):
    """A missing package of a peer comes first."""
    assert len(ON_GPUS) > 20
    ends = {call: said[call][::2] for call in ON_GPUS}
    right = re.compile("error: (no GPU|not installed: [a-z ]+; pip install [a-z ]+)\n")
    assert not {
        call: end for call, end in ends.items() if end[0] != 2 or not right.fullmatch(end[1])
    }
