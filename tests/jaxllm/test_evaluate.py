"""Compares evaluation and generation of a run with Hugging Face's (fixtures/evaluation)."""

import codecs
import gzip
import json
import math
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
import tokenizers
from cases import slow
from evaluation_run import EXPECTED, TEXTS, run_of
from tokenizer_families import FAMILIES, FOLDER
from tokenizers import models, processors

import jaxllm
from jaxllm import config as configs
from jaxllm.data.shards import ShardWriter, Tokens
from jaxllm.errors import InputError, RunError
from jaxllm.files import read_lines
from jaxllm.infer import decode, evaluate, generate, scoring
from jaxllm.infer.scoring import Scorer
from jaxllm.text import Tokenizer
from jaxllm.weights import convert
from jaxllm.weights.pretrained import open_weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: run's directory} of the fixtures' models in float32."""
    return {name: run_of(name, tmp_path_factory.mktemp(name)) for name in EXPECTED}


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):  # a GPU would take TF32
        yield


@pytest.mark.parametrize("name", list(EXPECTED))
def test_loss_of_a_text_equals_hugging_face(runs, name, tmp_path, capsys):
    command = f"""--checkpoint {runs[name]} --data.source text --data.path {TEXTS / "text.txt"}
        --data.cache_dir {tmp_path} --batch_size 4"""
    assert evaluate.main(command.split()) == 0
    loss, perplexity, count, bits = re.search(
        r"step 0: loss ([\d.]+) nats a token, perplexity ([\d.]+), ([\d,]+) tokens, ([\d.]+) bits",
        capsys.readouterr().out,
    ).groups()
    expected = EXPECTED[name]
    assert int(count) == expected["tokens"]
    assert int(count) % 32  # the last window is partial
    assert float(loss) == pytest.approx(expected["loss"], abs=6e-5)  # four digits are printed
    assert float(perplexity) == pytest.approx(math.exp(expected["loss"]), abs=6e-3)
    a_byte = expected["loss"] * expected["tokens"] / (TEXTS / "text.txt").stat().st_size
    assert float(bits) == pytest.approx(a_byte / math.log(2), abs=2e-4)


def test_the_loss_under_a_hugging_face_folder_is_that_of_its_conversion(
    runs, capsys, tmp_path, monkeypatch
):
    theirs, run = runs["llama3"].parent / "theirs", tmp_path / "run"
    monkeypatch.setenv("HOME", str(theirs.parent))
    assert convert.main([str(theirs), str(run)]) == 0
    text = (TEXTS / "text.txt").read_text("utf-8")
    lines = tmp_path / "text.jsonl.gz"  # was plain text, so the loss was that of JSON's syntax
    lines.write_bytes(gzip.compress(json.dumps({"text": text}).encode()))
    for source, path in (("text", TEXTS / "text.txt"), ("jsonl", lines)):
        data, printed = ["--data.path", str(path)], []
        for more in (["--checkpoint=~/theirs"], [f"--checkpoint={run}", f"--data.source={source}"]):
            capsys.readouterr()
            assert evaluate.main(data + more) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]
        assert "loss" in printed[0]


def test_the_validation_data_may_be_the_only_data(runs, tmp_path, capsys):
    text = f"--data.source text --data.cache_dir {tmp_path} --batch_size 4 --batches 1"
    said = []
    for key in ("path", "val_path"):
        command = f"--checkpoint {runs['gpt2']} {text} --data.{key} {TEXTS / 'text.txt'}"
        assert evaluate.main(command.split()) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize("name", FAMILIES[:-1])  # the last one normalizes text
def test_the_bytes_of_texts_are_those_of_the_files(name):
    """The space that Llama 2's tokenizer puts before each text counted as a byte of all but one."""
    tokenizer = Tokenizer(FOLDER / name)
    texts = ["Hello world, said the cat.", "\u00dcn\u00ef \u65e5", "a", "  two\nlines", " ."] * 3
    ids = [i for x in texts for i in (*tokenizer.begin, *tokenizer.encode(x), *tokenizer.finish)]
    tokens = Tokens([np.array(ids)])
    assert evaluate.text_bytes(tokenizer, tokens, len(ids) - 1) == len("".join(texts).encode())


def test_loss_of_short_texts(runs, tmp_path, capsys, monkeypatch):
    """Windows of 32: a text of one partial window, of exactly one, and of two."""
    ids = Tokenizer(runs["gpt2"] / "tokenizer.json").encode((TEXTS / "text.txt").read_text("utf-8"))

    def loss(count):
        writer = ShardWriter(tmp_path / f"{count}.bin", 1000)
        writer.append(np.array(ids[:count]))
        writer.close()
        path = tmp_path / f"{count}.bin"
        command = f"--checkpoint {runs['gpt2']} --data.source shards --data.path {path}"
        status = evaluate.main([*command.split(), f"--data.cache_dir={tmp_path}"])
        out, err = capsys.readouterr()
        if status:
            return err
        found = re.search(r"loss ([\d.]+) .*, (\d+) tokens?", out)
        return float(found[1]), int(found[2])

    (one, a), (short, b), (window, c), (more, d) = map(loss, (2, 20, 33, 34))
    assert (a, b, c, d) == (1, 19, 32, 33)
    scorer = Scorer(open_weights(runs["gpt2"]), 4)
    scores = scorer([(ids[:2], 1), (ids[:20], 19), (ids[:33], 32), (ids[32:34], 1)])
    expected = [-score for score, _ in scores]
    expected[3] += expected[2]
    np.testing.assert_allclose([one, 19 * short, 32 * window, 33 * more], expected, atol=2e-3)
    assert "has 1 token, fewer than the 2" in loss(1)
    assert loss(1).count("\n") == 1

    def broken(*given):
        graph, params = load_model(*given)
        return graph, jax.tree.map(lambda x: x * math.nan, params)

    load_model = decode.load_model
    for module in (decode, scoring):
        monkeypatch.setattr(module, "load_model", broken)
    # Its perplexity was infinite, and answers were compared by NaN.
    assert "error: the model's loss is nan: evaluate another checkpoint" in loss(2)
    with pytest.raises(RunError, match="logits are not finite"):
        Scorer(open_weights(runs["gpt2"]), 4)([(ids[:2], 1)])


def test_byte_order_marks_and_encodings_of_files_that_commands_read(tmp_path):
    shipped = next(configs.CONFIG_DIR.glob("*.yaml")).read_bytes()
    readers = {
        b"the cat\r\na mat\n": lambda path: read_lines(path, "--prompts"),
        (TEXTS / "hellaswag.jsonl").read_bytes(): lambda path: read_lines(path, "--hellaswag"),
        shipped: lambda path: configs.load(str(path)),
    }
    path = tmp_path / "file.yaml"
    for content, read in readers.items():
        path.write_bytes(content)
        expected = read(path)
        path.write_bytes(codecs.BOM_UTF8 + content)
        assert read(path) == expected
        path.write_bytes(content.decode().encode("utf-16"))
        with pytest.raises(InputError, match=r"it is UTF-16: convert it") as error:
            read(path)
        command = re.search(r"\((iconv .*)\)", str(error.value))[1].split()
        converted = subprocess.run([*command, path], check=True, capture_output=True).stdout
        assert converted == content
        path.write_bytes(b"\n# \xff" + content)
        with pytest.raises(InputError, match="line 2 is not UTF-8 text: invalid start byte"):
            read(path)


def test_a_question_with_two_labels_is_refused():
    line = '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0, "label": 1}'
    with pytest.raises(InputError, match="an object has 'label' twice"):
        evaluate._question(line, "line 1")


@pytest.mark.parametrize("name", [slow(n) if n == "xlstm" else n for n in EXPECTED])
def test_hellaswag_equals_the_harness_on_hugging_face(runs, name, tmp_path, capsys):
    lines = (TEXTS / "hellaswag.jsonl").read_text("utf-8").splitlines()
    questions = list(map(json.loads, lines))
    expected = EXPECTED[name]["toy_hellaswag"]
    scores = np.array(expected["replies"])
    characters = np.array([[len(evaluate._clean(e)) for e in q["endings"]] for q in questions])
    found = {"acc": scores.argmax(-1), "acc_norm": (scores / characters).argmax(-1)}
    labels = np.array([int(question["label"]) for question in questions])
    for metric, answers in found.items():
        assert (answers == labels).mean() == pytest.approx(expected["metrics"][metric])
    # An untrained model gains nothing from the file's labels.  These distinguish acc from acc_norm,
    # and a wrong order of the endings from the right one.
    labels = np.where(np.arange(6) < 4, found["acc_norm"], (found["acc"] + 1) % 4)
    path = tmp_path / "hellaswag.jsonl"
    lines = [json.dumps(q | {"label": str(n)}) for q, n in zip(questions, labels, strict=True)]
    path.write_text("\n".join(lines))
    for limit in (6, 4):
        words = f"--checkpoint {runs[name]} --hellaswag {path} --limit {limit} --batch_size 5"
        assert evaluate.main(words.split()) == 0
        acc, norm = ((found[k] == labels)[:limit].mean() for k in ("acc", "acc_norm"))
        assert acc != norm
        said = f"HellaSwag acc_norm {norm:.4f}, acc {acc:.4f}, {limit} questions"
        assert said in capsys.readouterr().out


def test_generate_writes_every_prompt_and_sample_and_reports_the_speed(
    runs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("jaxllm.infer.decode.block_size", lambda: 8)  # a GPU's is 32
    (tmp_path / "prompts.txt").write_text("the cat\n\n  \na café\u2028in the snow\n", "utf-8")
    command = f"""--checkpoint {runs["xlstm"]} --prompts {tmp_path / "prompts.txt"} --tokens 17
        --samples 3 --batch_size 4 --temperature"""
    assert generate.main([*command.split(), "1"]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"^--- prompt (\d), sample (\d)\n(?:the cat|a café\u2028in)", out, re.M) == [
        (p, s) for p in "12" for s in "123"
    ]
    speed = r"^(\d+) tokens in .* s, 4 at once: .* s for .*, then [\d,]+ tokens/s$"
    assert 6 < int(re.search(speed, err, re.M)[1]) <= 102  # a sample may end before its 17 tokens
    # Greedy texts do not depend on the batch.
    assert generate.main([*command.split(), "0"]) == 0
    texts = re.split(r"--- prompt ., sample .\n", capsys.readouterr().out)
    command = f"--checkpoint {runs['xlstm']} --tokens 17 --temperature 0 --prompt".split()
    assert generate.main([*command, "the cat"]) == 0
    assert texts[1:] == [capsys.readouterr().out] * 3 + [texts[4]] * 3


def test_a_sample_does_not_depend_on_the_batch(runs, capsys):
    def texts(seed, samples, size):
        command = f"""--checkpoint {runs["gpt2"]} --prompt the --tokens 6 --temperature 1
            --seed {seed} --samples {samples} --batch_size {size}"""
        assert generate.main(command.split()) == 0
        return re.split(r"--- prompt ., sample .\n", capsys.readouterr().out)[1:]

    first = texts(0, 5, 2)
    assert texts(0, 4, 4) == first[:4]
    assert not set(first) & set(texts(1, 5, 2))


def test_llama_3_tokens_before_and_after_a_text_are_respected(runs, capsys, tmp_path, monkeypatch):
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    library = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate("eht")}, []))
    library.add_special_tokens(names)
    library.post_processor = processors.TemplateProcessing(
        single=f"{names[0]} $A", special_tokens=[(names[0], 3)]
    )
    shutil.copytree(runs["gpt2"], tmp_path / "run")
    library.save(str(tmp_path / "run" / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "run" / "tokenizer.json")
    assert (tokenizer.begin, tokenizer.ends) == ([3], {3})  # no file names the others
    page = '{"eos_token": "<|eot_id|>"}'
    (tmp_path / "run" / "tokenizer_config.json").write_text(page)
    (tmp_path / "run" / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert Tokenizer(tmp_path / "run").ends == {4, 5}
    assert tokenizer.encode("the") == [2, 1, 0]
    seen = []

    def stream(graph, params, rows, config, **_):
        seen.extend(rows)
        return iter(np.array([[2], [5], [1]]))

    monkeypatch.setattr("jaxllm.infer.decode.stream_tokens", stream)
    words = f"--checkpoint {tmp_path / 'run'} --prompt the --tokens 4".split()
    assert generate.main(words) == 2
    assert "run/tokenizer.json was changed since its model" in capsys.readouterr().err
    # As if the run had been trained with it.
    monkeypatch.setattr("jaxllm.weights.checksums.check_folder", lambda *_: None)
    assert generate.main(words) == 0
    assert seen == [[3, 2, 1, 0]]
    assert capsys.readouterr().out == "the t\n"  # without a decoder, spaces join tokens


def test_a_prompt_that_is_too_long_is_refused(runs, capsys):
    assert generate.main(f"--checkpoint {runs['llama3']} --prompt the --tokens 99".split()) == 2
    assert "exceed model.max_seq_len=48" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "--checkpoint"),
        ("--checkpoint {run} --step 9", "no checkpoint of step 9; it has 0"),
        ("--checkpoint {run}/../theirs --step 3", "weights of step 0, not of step 3"),
        ("--checkpoint {run}/../theirs", "theirs has no config.yaml, which names the data"),
        ("--checkpoint {run} --data.sorce text", "did you mean data.source"),
        ("--checkpoint {run} --train.steps 3", "unknown argument --train.steps"),
        ("--checkpoint {run} --data.source text --data.path nowhere.txt", "nowhere.txt"),
        ("--checkpoint {run} --batch_size 0", "--batch_size=0"),
        ("--checkpoint {run} --tasks a,,b", "--tasks='a,,b' has an empty name"),
        ("--checkpoint {run}/checkpoints/0", "directory (config.yaml, checkpoints); name /"),
        ("--checkpoint {run} --hellaswag {run}/config.yaml", "line 1 is not a question"),
        ("--checkpoint {run} --hellaswag {run}/config.yaml", "; it needs ctx, or ctx_a and ctx_b"),
        ("--checkpoint {run} --limit 3", "--limit applies to --hellaswag and --tasks, not"),
        ("--checkpoint {run} --hellaswag x --data.path y", "--data.path applies to data, not"),
    ],
)
def test_bad_input_gives_one_line(runs, capsys, arguments, named):
    assert evaluate.main(arguments.format(run=runs["gpt2"]).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


def test_out_of_memory_is_reported(runs, capsys, monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("jaxllm.infer.decode.load_model", full)
    assert generate.main(f"--checkpoint {runs['gpt2']} --prompt the --tokens 9".split()) == 1
    assert capsys.readouterr().err == (
        "error: the device is out of memory; lower --batch_size or --tokens\n"
    )


def test_a_text_with_a_token_that_the_model_lacks_is_refused(runs, capsys, tmp_path):
    """Its embedding was a neighbor's, or not a number."""
    folder = shutil.copytree(runs["gpt2"], tmp_path / "run")
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    question = {"ctx": "the <pad>", "endings": [" a", " b", " c", " d"], "label": 1}
    (tmp_path / "h.jsonl").write_text(json.dumps(question))
    named = r"the text has '<pad>' \(id \d+\), which is beyond the model's \d+ entries"
    assert evaluate.main(f"--checkpoint {folder} --hellaswag {tmp_path / 'h.jsonl'}".split()) == 2
    assert re.search(named, capsys.readouterr().err)
    for use in (jaxllm.load(folder).generate, jaxllm.load(folder).score):
        with pytest.raises(InputError, match=named):
            use("the <pad>")


def test_a_missing_tokenizer_is_reported(runs, capsys, tmp_path):
    shutil.copytree(runs["gpt2"], tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert generate.main(f"--checkpoint {tmp_path / 'run'} --prompt the".split()) == 2
    assert "tokenizer.json is missing" in capsys.readouterr().err
