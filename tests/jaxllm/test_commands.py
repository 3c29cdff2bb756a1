"""The command jaxllm: its help, and its errors, also under a Python that cannot run it."""

import ast
import errno
import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from unittest import mock

import pytest
from cases import slow
from training_runs import REPO

import jaxllm
from jaxllm.commands import COMMANDS, NEEDED, OLDEST, main
from jaxllm.config import command_line
from jaxllm.errors import InputError

# The files that an old Python parses before it can report that it is too old.
FIRST = ["train.py", "jaxllm/__init__.py", "jaxllm/__main__.py", "jaxllm/commands.py"]


def python(*words, stdout=subprocess.PIPE, environment=None):
    """Runs Python, which finds no packages in PYTHONPATH; environment: further variables."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": ""} | (environment or {}),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def help_of(*words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_help_lists_every_command(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.M)


def test_the_help_needs_only_the_standard_library():
    done = python("-S", "-m", "jaxllm", "--help")  # -S: the standard library alone
    assert done.returncode == 0, done.stderr
    assert "train " in done.stdout


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxllm {metadata.version('jaxllm')}\n"
    done = python("-S", "-m", "jaxllm", "--version")  # without the package's metadata
    assert (done.returncode, done.stdout) == (0, f"jaxllm {jaxllm.__version__}\n")


def test_a_full_disk_for_the_help_is_one_line():
    with open("/dev/full", "w") as full:
        done = python("-m", "jaxllm", "--help", stdout=full)
    error = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, error)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "/a cannot be read or written"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "standard output cannot be written"),
    ],
)
def test_what_the_system_refuses_is_one_line(error, line, capfd):
    """A folder that nobody may read and a full quota ended in tracebacks."""

    def run():
        raise error

    assert command_line.exit_status(run) == 1
    assert capfd.readouterr().err == f"error: {line}: {error.strerror}\n"


def test_a_deleted_current_folder_is_one_line(tmp_path, monkeypatch, capfd):
    """Relative paths ended in a traceback of os.getcwd."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    for words in (["evaluate", "--checkpoint", "a"], ["train", "--config", "gpt2_small"]):
        assert main(words) == 2
        assert capfd.readouterr().err.startswith("error: the current folder was deleted: cd to")
    missing = FileNotFoundError(errno.ENOENT, "Failed to open local file 'a'")  # as Arrow says it
    with pytest.raises(FileNotFoundError):
        command_line.exit_status(mock.Mock(side_effect=missing))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "error: unknown command 'trian'; did you mean train?\n"),
        (["xyz"], f"error: unknown command 'xyz'; one of {', '.join(COMMANDS)}\n"),
        (["--config", "a"], f"error: unknown command '--config'; one of {', '.join(COMMANDS)}\n"),
    ],
)
def test_an_unknown_command_is_one_line(words, message, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("word", "hint"),
    [("--ot", "; did you mean --out?"), ("--ot=x", "; did you mean --out?"), ("--zz", "")],
)
def test_a_misspelt_option_is_named(word, hint, capsys):
    assert main(["report", "a", word]) == 2
    error = f"error: unrecognized arguments: {word}{hint}; see --help\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("words", "odd"),
    [("data prepare", "--otu=x"), ("generate", "--chekpoint"), ("evaluate", "--checkpont")],
)
def test_a_misspelt_option_is_named_before_one_that_is_required(words, odd, capsys):
    assert main([*words.split(), odd, "x"]) == 2
    assert f"error: unrecognized arguments: {odd}; did you mean" in capsys.readouterr().err
    assert main([*words.split(), "x"]) == 2
    assert "are required: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"JAXLLM_KERNELS": "bogus"}, "JAXLLM_KERNELS=bogus is not general: set that, or unset it"),
        slow({"JAX_PLATFORMS": "tpu"}, "JAX_PLATFORMS=tpu: JAX finds no such device; unset it"),
        (
            {"JAX_DEFAULT_MATMUL_PRECISION": "x"},
            'Invalid value "x" for JAX flag jax_default_matmul_precision: set another value, or',
        ),
    ],
)
def test_a_wrong_environment_is_one_line(setting, message):
    words = "-m jaxllm train --config llama3_small --dry_run".split()
    done = python(*words, environment=setting)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in done.stderr


def test_settings_for_other_programs_do_not_reach_a_command():
    """With 64 bits parameters would be float64; optax promotes integers to floats.

    Another generator draws other weights, and the window of losses begins with infinities.
    """
    settings = {"JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    settings |= {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_TRANSFER_GUARD": "disallow"}
    settings |= {"JAX_DISABLE_JIT": "1", "JAX_DEBUG_INFS": "1", "JAX_RANDOM_SEED_OFFSET": "3"}
    settings |= {"JAX_THREEFRY_PARTITIONABLE": "0", "JAX_DEFAULT_PRNG_IMPL": "rbg"}
    show = "; ".join(f"print(jax.config.{name.lower()})" for name in settings)
    words = f"try: main(['generate', '--help'])\nexcept SystemExit: import jax; {show}"
    done = python("-c", f"from jaxllm.commands import main\n{words}", environment=settings)
    found = "False standard allow None False False 0 True threefry2x32".split()
    assert done.stdout.split()[-9:] == found, done


@pytest.mark.parametrize("words", [[name] for name in COMMANDS] + [["data", "prepare"]], ids=str)
def test_every_help_has_at_most_100_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = help_of(*words, capsys=capsys)
    assert max(map(len, text.splitlines())) <= 100
    if words == ["train"]:
        assert any(len(line) > 80 for line in text.splitlines())  # uses a wide terminal


@pytest.mark.parametrize(
    ("word", "wanted"),
    [(word, "a number without _ or leading zeros") for word in ("1_0", "010")]
    + [(word, "a whole number") for word in ("0x10", "１０", "1e1", "ten", "")]
    + [("10", 10), ("+10", 10), (" 10", 10), ("-1", -1)],
)
def test_numbers_are_written_as_in_a_configuration(word, wanted):
    """`--tokens 1_0` was taken as 10, and so were full-width digits."""
    parser = command_line.Parser(prog="x")
    parser.option("--tokens N", "")
    words = ["--tokens=" + word]
    if isinstance(wanted, int):
        assert parser.parse_args(words).tokens == wanted
    else:
        with pytest.raises(InputError, match=f"^argument --tokens: N={word!r}: must be {wanted}"):
            parser.parse_args(words)


def test_the_help_of_train_groups_options_by_section(capsys):
    heading, seen = None, {}
    for line in help_of("train", capsys=capsys).splitlines():
        if found := re.match(r"(\w+): [A-Z]", line):
            heading = found[1]
        elif found := re.match(r"  --(\w+)\.", line):
            seen.setdefault(heading, set()).add(found[1])
    sections = ("model", "data", "train", "optimizer", "mesh", "sample", "profile")
    assert seen == {section: {section} for section in sections}


def test_options_accept_hyphens_and_show_underscores(capsys):
    text = help_of("data", "prepare", capsys=capsys)
    assert "--text_column NAME" in text
    assert "--text-column" not in text
    found = [
        command_line.read(["--config", "llama3_small", "--train.batch_size=2", "--out_dir=x_y"]),
        command_line.read(["--config", "llama3_small", "--train.batch-size", "2", "--out-dir=x_y"]),
    ]
    assert found[0] == found[1]
    assert found[0].config.train.batch_size == 2


@pytest.mark.parametrize("path", FIRST)
def test_an_old_python_can_parse_the_files_it_reads_first(path):
    ast.parse((REPO / path).read_text(encoding="utf-8"), path, feature_version=(3, 6))


AS_OLD = "import runpy, sys; sys.version_info = (3, 11, 7, 'final', 0); sys.argv[1:] = ['train']\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-c", AS_OLD + "runpy.run_path('train.py', run_name='__main__')"], "is 3.11.7; put `uv"),
        (["-c", AS_OLD + "runpy.run_module('jaxllm', run_name='__main__')"], "is 3.11.7"),
        (["-S", "train.py", "--config", "llama3_small"], "lacks jax, jaxlib, flax and 14 more"),
        (
            ["-S", "-m", "jaxllm", "train"],
            f"install '{REPO}' (with an NVIDIA GPU '{REPO}[cuda13]')",
        ),
        (["-S", "-m", "jaxllm", "evaluate"], "lacks jax"),
    ],
    ids=str,
)
def test_a_python_that_cannot_run_it_says_in_one_line_what_to_install(words, message):
    done = python(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_the_checked_packages_are_the_declared_dependencies():
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {re.split(r"[<>=!~;\[ ]", r)[0] for r in project["dependencies"]} == set(NEEDED)
    assert all(find_spec(module) for module in NEEDED.values())
    assert project["requires-python"] == f">={'.'.join(map(str, OLDEST))}"


def test_every_command_has_its_module():
    for module, _ in COMMANDS.values():
        assert callable(importlib.import_module(module).main)
