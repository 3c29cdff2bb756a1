"""Generation and evaluation of a run's directory, against the model called by hand."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import evaluate, generate
from jaxllm.checkpoint import Checkpoints
from jaxllm.config import Config, DataConfig, Llama3Config, OptimizerConfig, TrainConfig
from jaxllm.data.tokenizer import Tokenizer, train_tokenizer
from jaxllm.models import create
from jaxllm.sharding import make_mesh
from jaxllm.training import Trainer

WORDS = "the cat sat on a mat and saw another rat run".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(directory of a run that was only begun, its configuration)."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text(" ".join(rng.choice(WORDS, 500)))
    train_tokenizer([(folder / "text.txt").read_text()], 280, folder / "tokenizer.json")
    config = Config(
        model=Llama3Config(
            vocab_size=280,
            n_layers=1,
            n_heads=2,
            n_kv_heads=1,
            d_model=64,
            d_ff=64,
            max_seq_len=64,
            compute_dtype="float32",
            residual_dtype="float32",
            kernels="xla",
        ),
        data=DataConfig(
            source="text",
            path=str(folder / "text.txt"),
            tokenizer=str(folder / "tokenizer.json"),
            cache_dir=str(folder / "cache"),
        ),
        train=TrainConfig(steps=1, batch_size=4, seq_len=32),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    trainer = Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))
    assert checkpoints.save(3, trainer.init(), {}, None) is None
    checkpoints.close()
    return folder, config


def log_likelihoods(config, ids):
    """Of each token but the first."""
    z = jax.nn.log_softmax(create(config.model)(jnp.asarray([ids[:-1]]))[0, :, :280])
    return np.asarray(z)[np.arange(len(ids) - 1), ids[1:]]


def test_loss_of_all_tokens_of_a_text(run, tmp_path, capsys):
    folder, config = run
    (tmp_path / "more.txt").write_text(" ".join(reversed(WORDS * 8)))
    command = f"--checkpoint {folder} --data.path {tmp_path / 'more.txt'}"
    assert evaluate.main(command.split()) == 0
    loss, perplexity, count = re.search(
        r"loss ([\d.]+) nats a token, perplexity ([\d.]+), ([\d,]+) tokens",
        capsys.readouterr().out,
    ).groups()
    tokenizer = Tokenizer(folder / "tokenizer.json")
    ids = [
        tokenizer.end_of_text,
        *tokenizer.encode((tmp_path / "more.txt").read_text()),
    ]
    assert int(count) == len(ids) - 1
    assert (len(ids) - 1) % 32  # the last window is not whole
    parts = [log_likelihoods(config, ids[i : i + 33]) for i in range(0, len(ids) - 1, 32)]
    expected = -float(np.concatenate(parts).mean())
    assert float(loss) == pytest.approx(expected, abs=2e-4)
    assert float(perplexity) == pytest.approx(math.exp(expected), rel=1e-3)


def test_hellaswag_is_the_likeliest_ending_by_the_character(run, tmp_path, capsys):
    folder, config = run
    tokenizer = Tokenizer(folder / "tokenizer.json")
    rng = np.random.default_rng(1)
    lines, by_character, by_sum = [], [], []
    for i in range(6):
        endings = [" ".join(rng.choice(WORDS, n)) for n in (2, 7, 4, 9)]
        question = dict(activity_label="Cat", ctx_a="the  cat [x]", ctx_b="saw", endings=endings)
        context = tokenizer.encode("Cat: the cat Saw")
        scores = [
            log_likelihoods(config, tokenizer.encode(f"Cat: the cat Saw {e}"))[len(context) - 1 :]
            for e in endings
        ]
        by_character.append(
            int(np.argmax([s.sum() / len(e) for s, e in zip(scores, endings, strict=True)]))
        )
        by_sum.append(int(np.argmax([s.sum() for s in scores])))
        label = by_character[-1] if i < 4 else (by_character[-1] + 1) % 4
        lines.append(question | {"label": str(label)})
    assert by_character != by_sum
    acc = np.mean([int(q["label"]) == s for q, s in zip(lines, by_sum, strict=True)])
    path = tmp_path / "hellaswag.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert evaluate.main(["--checkpoint", str(folder), "--hellaswag", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"acc_norm {4 / 6:.4f}, acc {acc:.4f}, 6 questions" in out


def test_generate_writes_every_prompt_and_sample_and_tells_the_speed(run, tmp_path, capsys):
    folder, _ = run
    (tmp_path / "prompts.txt").write_text("the cat\na rat saw the mat\n")
    command = f"--checkpoint {folder} --prompts {tmp_path / 'prompts.txt'} --tokens 5 --samples 2"
    assert generate.main(command.split()) == 0
    out, err = capsys.readouterr()
    assert re.findall("--- (prompt . sample .|prompt ., sample .)", out) == [
        f"prompt {p}, sample {s}" for p in (1, 2) for s in (1, 2)
    ]
    assert out.count("\nthe cat") == out.count("\na rat saw the mat") == 2
    assert re.search(r"^[\d,]+ tokens/s \(12 tokens in .*, 4 at once", err)
    assert generate.main(f"--checkpoint {folder} --prompt the --tokens 99".split()) == 2
    assert "exceed model.max_seq_len=64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "--checkpoint"),
        ("--checkpoint {run} --step 9", "no checkpoint of step 9; it has 3"),
        ("--checkpoint {run} --data.sorce text", "did you mean data.source"),
        ("--checkpoint {run} --train.steps 3", "unknown argument --train.steps"),
        ("--checkpoint {run} --data.path nowhere.txt", "nowhere.txt"),
        ("--checkpoint {run} --batch_size 0", "--batch_size=0"),
        ("--checkpoint {run} --hellaswag {run}/text.txt", "line 1 is no question"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, named):
    assert evaluate.main(arguments.format(run=run[0]).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err
