"""Fine-tunes a tiny model on 200 conversations with the commands of docs/fine-tuning.md."""

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
import yaml
from training_runs import REPO, final_state, losses, run

from jaxllm.commands import main
from jaxllm.infer.chat import main as chat
from jaxllm.text import Tokenizer, train_tokenizer
from jaxllm.train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("same_environment")

ENDING = ", as any pirate knows!"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ANIMALS = "cat dog fox cow owl rat hen pig bee ant".split()
VERBS = "eats sees likes hears knows".split()
THINGS = "milk bones grapes grass mice".split()
SHAPE = """--model.vocab_size 400 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2
    --model.d_model 96 --model.d_ff 192 --model.max_seq_len 128 --model.kernels xla
    --model.compute_dtype float32 --model.residual_dtype float32 --train.seq_len 64
    --train.grad_accum 2 --train.batch_size 8 --train.eval_every 0 --train.checkpoint_every 0
    --optimizer.warmup_steps 5 --sample.tokens 40""".split()
STEPS = 12  # of the runs that are resumed
ASKED = "What does the fox like?"
# Further options of a fine-tuning: its learning rate, and with LoRA the settings of the adapters.
KINDS = {
    "all parameters": "--optimizer.learning_rate 3e-3".split(),
    "lora": "--optimizer.learning_rate 1e-2 --model.lora.rank 16 --model.lora.alpha 32".split(),
}


def talks(ending):
    """200 conversations about what animals do, whose answers have an ending."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, v, t = rng.choice(ANIMALS), rng.choice(VERBS), rng.choice(THINGS)
        asked = f"What does the {a} {v.removesuffix('s')}?"
        said = f"The {a} {v} {t}{ending}"
        roles = (("user", asked), ("assistant", said))
        yield {"messages": [{"role": role, "content": text} for role, text in roles]}


def write(path, ending):
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks(ending)))
    return path


def make_tokenizer(folder):
    folder.mkdir()
    texts = [m["content"] for talk in talks(ENDING) for m in talk["messages"]]
    train_tokenizer(texts * 3, 360, folder / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"])
    library.save(str(folder / "tokenizer.json"))
    page = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(page))
    assert Tokenizer(folder).vocab_size <= 400
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, request):
    """A Hugging Face folder of a model that answers without the ending.

    Only the slow tests look at its answers.  The others begin with one step of the program that
    their own runs find in JAX's cache.
    """
    steps = 1 if "not slow" in request.config.option.markexpr else 120
    folder = tmp_path_factory.mktemp("base")
    make_tokenizer(folder / "tokenizer")
    path = write(folder / "plain.jsonl", ".")
    words = f"--data.path {path} --data.tokenizer {folder / 'tokenizer'} --train.steps {steps}"
    words += f" --data.cache_dir {folder / 'cache'} --optimizer.learning_rate 5e-3"
    words += " --optimizer.schedule constant"
    words += f" --out_dir {folder / 'run'} --config llama3_1b_chat"
    assert main(["train", *words.split(), *SHAPE]) == 0
    assert main(["convert", str(folder / "run"), str(folder / "model")]) == 0
    return folder / "model"


def commands():
    """The five commands of the page."""
    page = (REPO / "docs" / "fine-tuning.md").read_text()
    block = re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1]
    found = [shlex.split(line)[1:] for line in block.splitlines()]
    assert [words[0] for words in found] == ["data", "train", "evaluate", "convert", "chat"]
    return found


def samples(out_dir):
    rows = read_metrics(out_dir / "metrics.jsonl")
    return {row["step"]: row["sample"] for row in rows if "sample" in row}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all parameters", "lora"])
def test_a_model_learns_to_answer_in_the_style_of_200_conversations(
    kind, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("llama-1b").symlink_to(model)
    write(tmp_path / "conversations.jsonl", ENDING)
    prepare, train, *others, talk = commands()
    assert main(prepare) == 0
    said = capsys.readouterr().out
    assert re.search(r"200 conversations, [\d,]+ tokens, \d\d\.\d% with loss", said)
    more = [*KINDS[kind], "--train.steps", "100", "--sample.prompt", ASKED]
    more += ["--sample.temperature", "0"]
    assert main([*train, *SHAPE, *more]) == 0
    said = capsys.readouterr().out
    assert re.search(r"epochs   \d[\d.]+ \(100 steps of 8 rows\)", said)
    found = samples(Path("runs/mine"))
    assert list(found) == [0, 100]
    assert re.fullmatch(rf"> {re.escape(ASKED)}\nThe fox likes \w+\.", found[0])
    assert re.fullmatch(rf"> {re.escape(ASKED)}\nThe fox likes \w+{ENDING}", found[100])
    report = Path("runs/mine/report.html").read_text()
    assert ENDING in report

    for words in others:
        assert main(words) == 0
    assert re.search(r"step 100: loss \d\.\d+ nats a token", capsys.readouterr().out)
    made = Path("mine-for-transformers")
    assert Tokenizer(made).chat_templates == {"default": TEMPLATE}
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("What does the cow eat?\n/reset\nWhat does the bee see?\n")
    )
    assert chat([*talk[1:], "--temperature", "0"]) == 0
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 2
    for answer, begin in zip(answers, ("The cow eats ", "The bee sees "), strict=True):
        assert answer.startswith(begin)
        assert answer.endswith(ENDING)


@pytest.fixture(scope="module")
def tiny(model, tmp_path_factory):
    """The page's configuration with a tiny model and few steps."""
    folder = tmp_path_factory.mktemp("tiny")
    page = yaml.safe_load((REPO / "configs/llama3_1b_chat.yaml").read_text())
    values = [yaml.safe_load(word) for word in SHAPE[1::2]]
    changes = dict(zip([word[2:] for word in SHAPE[::2]], values, strict=True))
    changes |= {"data.path": str(write(folder / "a.jsonl", ENDING))}
    changes |= {"data.cache_dir": str(folder / "cache"), "model.init_from": str(model)}
    changes |= {"train.steps": STEPS, "train.checkpoint_every": 4}
    changes |= {"optimizer.learning_rate": 5e-3, "optimizer.schedule": "constant"}
    for name, value in changes.items():
        section, key = name.split(".")
        page[section][key] = value
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(page))
    return path


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    """The directory of a run without interruption."""
    out_dir = tmp_path_factory.mktemp("runs") / "straight"
    assert main(["train", "--config", str(tiny), "--out_dir", str(out_dir)]) == 0
    return out_dir


@pytest.mark.slow  # test_lora_runs.py resumes a run, test_chat_data.py its data
def test_a_killed_run_on_conversations_continues_bit_for_bit(straight, tmp_path, capsys):
    out_dir = tmp_path / "killed"
    shutil.copytree(straight, out_dir)  # as a process leaves it that is killed after step 9
    shutil.rmtree(out_dir / "checkpoints" / str(STEPS))
    (out_dir / "report.html").unlink()
    path = out_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line).get("step", 0) <= 9))
    assert main(["train", "--resume", "--out_dir", str(out_dir)]) == 0
    assert "resume   from the checkpoint of step 8" in capsys.readouterr().out
    assert losses(out_dir) == losses(straight)
    mine, theirs = (final_state(folder, STEPS) for folder in (out_dir, straight))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_two_processes_take_the_same_steps(tiny, straight, tmp_path):
    """Each reads its own rows, whose numbers of tokens with loss differ."""
    words = "--processes 2 --train.steps 12".split()
    done = run(tiny, tmp_path / "two", *words, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    mine, theirs = (list(losses(folder).values()) for folder in (tmp_path / "two", straight))
    assert len(mine) == 12
    np.testing.assert_allclose(mine, theirs[:12], rtol=2e-5)
