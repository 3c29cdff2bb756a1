"""The README's code runs, its commands are understood, and what it names exists."""

import re
import shlex
from pathlib import Path

import pytest

from jaxllm.config import command_line
from jaxllm.infer import evaluate, generate

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    fenced = README.split("```")[1::2]
    return [b.partition("\n")[2] for b in fenced if b.partition("\n")[0] == language]


@pytest.mark.parametrize("code", blocks("python"))
def test_the_code_runs(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def commands() -> list[list[str]]:
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line.partition("#")[0]) for line in lines]


def test_the_training_commands_are_understood(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen = 0
    for words in commands():
        if "train.py" in words and "--help" not in words and "--resume" not in words:
            arguments = command_line.read(words[words.index("train.py") + 1 :])
            assert arguments.config.train.steps > 0
            seen += 1
    assert seen >= 4


def test_the_commands_on_runs_are_understood():
    seen = 0
    for words in commands():
        for module in (generate, evaluate):
            if module.__name__ in words:
                module._read(words[words.index(module.__name__) + 1 :])
                seen += 1
    assert seen >= 7


def test_every_file_in_the_tree_exists():
    tree = next(b for b in blocks("") if "pallas_kernels/" in b)
    folder, seen = REPO, 0
    for line in tree.splitlines():
        names = re.match(r"( *)((?:[\w.]+(?:/|\.py)[ ]?)+)", line)
        assert names, line
        folder = REPO if not names[1] else folder
        for name in names[2].split():
            assert (folder / name).exists(), name
            seen += 1
        if not names[1] and names[2].strip().endswith("/"):
            folder = REPO / names[2].strip()
    assert seen > 20
