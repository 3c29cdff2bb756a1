"""The code and commands of the README and its pages run, from the checkout and from a wheel."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet
import pytest

from jaxllm.config import CONFIG_DIR, command_line
from jaxllm.infer import chat, evaluate, generate

REPO = Path(__file__).resolve().parents[1]
PAGES = "README docs/training docs/several-gpus docs/data docs/inference docs/weights".split()
TEXT = "def main(words):\n    return [word for word in words if word]  # the words; none is empty\n"
# Added to every command that trains, so that it takes seconds.  With a constant learning rate, a
# resumed run with one more step is the same program, which JAX finds in its cache.
SMALL = """
    --model.vocab_size 300 --model.n_layers 1 --model.n_heads 2 --model.d_model 32 --model.d_ff 64
    --model.max_seq_len 256 --data.tokenizer_vocab_size 300 --train.steps 2 --train.seq_len 32
    --train.batch_size 4 --train.grad_accum 1 --train.eval_batches 1 --optimizer.warmup_steps 1
    --optimizer.schedule constant --sample.tokens 2
""".split()


def blocks(language: str, pages: list[str] = PAGES) -> list[str]:
    text = "\n".join((REPO / f"{page}.md").read_text(encoding="utf-8") for page in pages)
    fenced = text.split("```")[1::2]
    return [b.partition("\n")[2] for b in fenced if b.partition("\n")[0] == language]


@pytest.mark.parametrize("code", blocks("python", [*PAGES, "docs/decoding"]))
def test_the_code_runs(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


PARTS = """
import jax.numpy as jnp, pallas_kernels as pk
x, at = jnp.ones((2, 8, 1, 64)), jnp.arange(8)
y, s = pk.rms_norm(x, residual=x)
q, k = pk.rope(x, x, at)
packed: pk.Packed = pk.rope(pk.Packed(jnp.ones((2, 8, 192)), ((1, 64),) * 3), None, at)
out, lse = pk.attention(packed, return_lse=True)
h, state = pk.vlstm(q, k, k, y[..., 0], s[..., 0], return_state=True)
pk.vlstm_step(out[:, 0], h[:, 0], h[:, 0], lse[..., 0], lse[..., 0], state)
"""


def test_a_type_checker_accepts_the_code(wheel, tmp_path):
    """A user's project sees the types in the wheel, and finds there what the pages import."""
    pytest.importorskip("pyrefly")
    code = [*blocks("python", [*PAGES, "docs/decoding"]), f"path = ''\n{blocks('py')[0]}", PARTS]
    for i, text in enumerate(code):
        (tmp_path / f"{i}.py").write_text(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(("jaxllm", "pallas")):
                path, module = node.module.split("."), importlib.import_module(node.module)
                assert (wheel / path[0] / "py.typed").exists()
                modules = [found.stem for found in wheel.joinpath(*path).iterdir()]
                public = getattr(module, "__all__", dir(module))  # models defines its names
                assert {x.name for x in node.names} <= {*public, *modules}
    words = [sys.executable, "-m", "pyrefly", "check", "--preset=default", f"--search-path={wheel}"]
    run(tmp_path, *words, f"--python-interpreter-path={sys.executable}", *tmp_path.glob("*.py"))


def commands() -> list[list[str]]:
    """The arguments of every command, without `uv run` and its options."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    for words in found:
        if words[:2] == ["uv", "run"]:
            del words[: 4 if words[2] == "--extra" else 2]
    return found


def words_of(program: str) -> list[list[str]]:
    """The arguments of this program in every command that starts with it."""
    return [words for first, *words in commands() if first == program]


def runs(words: list[str]) -> bool:
    """Whether a command of jaxllm takes seconds, on this machine, without a network.

    Of the many commands that train only those run whose directories others read.
    """
    if words[0] == "train":
        return "runs/a" in words or "runs/b" in words
    return "--tasks" not in words and "runs/instruct" not in words  # a model that answers


def small(words: list[str]) -> list[str]:
    """A training command, reduced to little data and two steps."""
    if "--resume" in words:
        return [*words, "--train.steps", "3"]
    kv_heads = ["--model.n_kv_heads", "1"] if any("llama3" in word for word in words) else []
    data = [] if "--data.path" in words else ["--data.source", "text", "--data.path", "notes"]
    return [*words, *SMALL, *kv_heads, *data]


def in_order(words: list[str]) -> int:
    """The sort key of a command, because the README trains before it makes shards and weights."""
    known = [["data"], ["train"], ["convert", "runs/a"]]
    return next((i for i, begin in enumerate(known) if words[: len(begin)] == begin), len(known))


@pytest.fixture
def folder(tmp_path):
    """A folder with all files that the commands read."""
    for name in ("notes", "corpus"):
        (tmp_path / name).mkdir()
    texts = [TEXT * 20 for _ in range(30)]
    for i, text in enumerate(texts):
        (tmp_path / f"notes/{i}.txt").write_text(text)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "corpus/a.parquet")
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    (tmp_path / "prompts.txt").write_text("def main(\nreturn [\n")
    question = {"ctx": "The words", "endings": ["are", "were", "will", "none"], "label": 3}
    (tmp_path / "hellaswag_val.jsonl").write_text(json.dumps(question) + "\n")
    (tmp_path / "gpt2").symlink_to("a-for-transformers")  # which a command makes of runs/a
    return tmp_path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with nothing but a wheel of this checkout, installed by pip."""
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("installed")
    words = "-m pip install -q --no-index --no-deps --no-build-isolation --target".split()
    done = subprocess.run(
        [sys.executable, *words, target, REPO], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def run(folder, *words, env=None, status=0, **options):
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=os.environ | environment | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr
    return done


def test_the_first_command_runs_in_the_checkout(folder):
    words = words_of("train.py")[0]
    done = run(folder, sys.executable, REPO / "train.py", *small(words))
    assert "done: runs/llama3_small-" in done.stdout


RUN_ALL = """
import json, os, sys
import jaxllm, pallas_kernels
from jaxllm.commands import main
flags = os.environ["XLA_FLAGS"]
for words in json.load(sys.stdin):
    os.environ["XLA_FLAGS"] = flags  # which training sets; JAX's cache tells programs by them
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    assert status == 0, words
print(jaxllm.__file__, pallas_kernels.__file__)
"""


def test_the_commands_run_with_a_wheel(wheel, folder):
    chosen = sorted((words for words in words_of("jaxllm") if runs(words)), key=in_order)
    commands = {"train", "generate", "evaluate", "report", "convert", "data"}
    assert {words[0] for words in chosen} >= commands
    assert len(chosen) >= 14
    chosen = [small(words) if words[0] == "train" else words for words in chosen]
    # One process for all, because each would import JAX.
    env = {"PYTHONPATH": str(wheel)}
    done = run(folder, sys.executable, "-c", RUN_ALL, input=json.dumps(chosen), env=env)
    ours = [str(wheel / name / "__init__.py") for name in ("jaxllm", "pallas_kernels")]
    assert done.stdout.split()[-2:] == ours
    for made in ("runs/a/report.html", "both.html", "gpt2-back/model.safetensors"):
        assert (folder / made).exists()


def test_the_wheel_brings_its_command_and_configurations(wheel, folder):
    names = sorted(path.name for path in CONFIG_DIR.glob("*.yaml"))
    assert sorted(path.name for path in (wheel / "jaxllm/configs").iterdir()) == names
    words = "train", "--config", "gpt2_smal"
    done = run(folder, wheel / "bin/jaxllm", *words, env={"PYTHONPATH": str(wheel)}, status=2)
    assert done.stderr == "error: no configuration gpt2_smal; did you mean gpt2_small?\n"


def test_the_other_commands_are_understood(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for reads in (evaluate, generate):
        monkeypatch.setattr(reads, "check_exists", lambda *_: None)
    found = [words for words in words_of("jaxllm") if not runs(words)]
    for command, *words in found:
        if command == "train" and "--help" not in words:
            assert command_line.read(words).config.train.steps > 0
        elif module := {"chat": chat, "evaluate": evaluate, "generate": generate}.get(command):
            assert module._read(words).checkpoint.parts[0] == "runs"
        else:
            assert (command, words) == ("train", ["--help"])
    assert len(found) >= 6


def test_the_extras_in_the_readme_exist():
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    seen = 0
    for words in commands():
        for word in words:
            if words[:2] == ["pip", "install"] and (named := re.fullmatch(r"\.\[(\w+)\]", word)):
                assert named[1] in project["optional-dependencies"]
                seen += 1
    assert seen >= 2
    known = {"jaxllm", "train.py", "pip", "pytest"}
    assert {words[0] for words in commands() if words} == known


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
