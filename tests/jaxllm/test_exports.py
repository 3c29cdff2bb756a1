"""What a folder says about its text is kept on the way in and out, and nothing is made up.

transformers 5.24 was asked with `make_folders.py FOLDER` (tests/fixtures): it reads exports of this
form, generates with them and stops at their ends.
"""

import json
import shutil

import pytest
import tokenizers
from cases import slow
from huggingface_folders import (
    FIXTURES,
    PAGES,
    family_folder,
    folder_of,
    meta_folder,
    text_files,
)
from safetensors.numpy import load_file

import train
from jaxllm.data import command as data
from jaxllm.errors import InputError
from jaxllm.infer import evaluate
from jaxllm.text import Tokenizer, files
from jaxllm.weights import convert
from jaxllm.weights.pretrained import open_weights

TOKENIZER = FIXTURES / "evaluation" / "tokenizer.json"
IDS = dict(bos_token_id=3, eos_token_id=2, pad_token_id=5)
COMPANIONS = {  # of Hugging Face's folders, old and new; e and <|im_start|> become special
    "tokenizer_config.json": dict(eos_token="e", pad_token="<|im_start|>", chat_template="{{ m }}"),
    "special_tokens_map.json": dict(eos_token={"content": "e"}),
    "added_tokens.json": {"<|endoftext|>": 0},
    "generation_config.json": dict(bos_token_id=3, eos_token_id=[2, 4], temperature=0.6),
    "chat_template.json": dict(chat_template="{{ messages }}"),
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/rag.jinja": "{{ messages }}",
    "vocab.json": {"<|endoftext|>": 0},
    "merges.txt": "#version: 0.2",
    "tokenizer.model": "\n\x0e",
}


def write(folder, pages):
    for name, page in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(page if isinstance(page, str) else json.dumps(page))


def kept(folder):
    """{name: content} of the files about the text, and the token ids in config.json."""
    files = [p for p in folder.rglob("*") if p.is_file() and "safetensors" not in p.name]
    content = {str(p.relative_to(folder)): p.read_text() for p in files}
    page = json.loads(content.pop("config.json"))
    return content, {key: page[key] for key in IDS if key in page}


def converted(source, out, *words):
    assert convert.main([str(x) for x in (source, out, *words)]) == 0
    return out


def trained(out, *words):
    """Trains for a step; returns the exit status."""
    more = """--train.steps 1 --train.batch_size 1 --train.seq_len 16 --train.eval_batches 1
        --sample.tokens 0"""
    return train.main([str(x) for x in (*words, *more.split(), "--out_dir", out)])


EXPORTED = json.loads((FIXTURES / "text" / "exported.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", EXPORTED)
def test_transformers_reads_an_export_as_its_source(family, tmp_path):
    """The files are those from which transformers read the same as from the source."""
    source = family_folder(tmp_path / "source", family)
    out = converted(converted(source, tmp_path / "run"), tmp_path / "out")
    assert text_files(out) == EXPORTED[family]["files"]
    assert kept(out)[0] == kept(source)[0]
    assert kept(out)[1].items() >= kept(source)[1].items()
    right, tokenizer = EXPORTED[family], Tokenizer(out)
    assert [tokenizer.bos, tokenizer.eos] == right["tokens"][:2]
    ends = right["generation"][1]
    assert tokenizer.ends == set(ends if isinstance(ends, list) else [ends])
    if family != "llama2":  # docs/inference.md, [1]
        assert tokenizer.prompt(" fox") == right["prompt"]


@pytest.mark.parametrize("text", [False, True])
def test_a_mistral_without_a_window_stays_one(text, tmp_path):
    """transformers 5.24 makes other ids for a Llama: " fox" was 1, 337 instead of 1, 319, 337."""
    source = folder_of(tmp_path / "source", "mistral", sliding_window=None)
    if text:
        shutil.copyfile(TOKENIZER, source / "tokenizer.json")
    out = converted(converted(source, tmp_path / "run"), tmp_path / "out")
    page = json.loads((out / "config.json").read_text())
    assert (page["model_type"], page["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert page["sliding_window"] is None
    other = converted(folder_of(tmp_path / "llama", "tinyllama"), tmp_path / "other")
    page = json.loads((converted(other, tmp_path / "back") / "config.json").read_text())
    assert page["model_type"] == "llama"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Hugging Face folder, `theirs`, its run, `ours`, and text as files and as shards."""
    parent = tmp_path_factory.mktemp("made")
    theirs = folder_of(parent / "theirs", "llama3", **IDS)
    write(theirs, COMPANIONS)
    shutil.copyfile(TOKENIZER, theirs / "tokenizer.json")
    converted(theirs, parent / "ours")
    (parent / "text.txt").write_text("the cat sat on the mat. " * 60)
    # The same tokenizer in other formatting, and one whose ids differ.
    page = json.loads(TOKENIZER.read_text())
    for name, indent in (("same", 1), ("other", None)):
        write(parent, {f"{name}/tokenizer.json": json.dumps(page, indent=indent)})
        words = ["prepare", "--source", "text", "--path", parent / "text.txt", "--val_fraction", 0]
        words += [
            "--tokenizer",
            parent / name / "tokenizer.json",
            "--out",
            parent / f"{name}_shards",
        ]
        assert data.main([str(word) for word in words]) == 0
        vocabulary = page["model"]["vocab"]
        vocabulary["a"], vocabulary["t"] = vocabulary["t"], vocabulary["a"]
    return parent


def test_files_about_the_text_do_not_vanish_or_change_in_silence(tmp_path, capsys):
    """Without tokenizer_config.json a chat had no template, and Llama 3's eos was another token."""
    source = family_folder(tmp_path / "source", "llama3")
    extra = "additional_chat_templates/rag.jinja"
    write(source, {extra: "{{ messages }}"})
    for name, words in (("run", ()), ("packed", ("--quantize", "int8", "--group", "none"))):
        run = converted(source, tmp_path / name, *words)
        for beside in ("tokenizer_config.json", "generation_config.json", "token_ids.json", extra):
            content = (run / beside).read_bytes()
            (run / beside).unlink()
            with pytest.raises(InputError, match=f"{beside} is gone since its model was trained.*"):
                open_weights(run)
            (run / beside).write_bytes(content + b" ")
            capsys.readouterr()
            open_weights(run)
            said = f"note: {run / beside} was changed since its model was trained\n"
            assert capsys.readouterr().err == said
            (run / beside).write_bytes(content)
        open_weights(run)
        assert not capsys.readouterr().err


@pytest.mark.parametrize("source", [slow("text"), "shards"])
def test_nothing_is_lost_from_a_folder_through_training_to_a_folder(source, made, tmp_path, capsys):
    assert kept(converted(made / "ours", tmp_path / "straight")) == kept(made / "theirs")
    words = ["--config", made / "ours" / "config.yaml", "--data.source", source, "--data.path"]
    words += [made / "text.txt"]
    if source == "shards":  # the tokenizer beside them has no companions
        words[-1:] = [made / "same_shards", "--data.tokenizer", "null"]
    assert trained(tmp_path / "run", *words) == 0
    if source == "shards":
        resume = ["--resume", "--out_dir", str(tmp_path / "run"), "--train.steps", "2"]
        assert train.main([*resume, "--data.path", str(made / "other_shards")]) == 2
        error = capsys.readouterr().err
        assert f"other_shards/tokenizer.json differs from {tmp_path}/run/tokenizer.json" in error
        assert train.main(resume) == 0
    back = converted(tmp_path / "run", tmp_path / "back")
    assert kept(back) == kept(made / "theirs")
    packed = converted(made / "ours", tmp_path / "packed", "--quantize", "int8", "--group", "none")
    assert kept(made / "theirs")[0].items() <= {
        str(p.relative_to(packed)): p.read_text() for p in packed.rglob("*.j*")
    }.items() | {(name, x) for name, x in COMPANIONS.items() if isinstance(x, str)}
    found, right = Tokenizer(packed), Tokenizer(made / "theirs")
    assert (found.bos, found.eos, found.ends) == (right.bos, right.eos, {2, 4})


def test_a_run_of_ours_becomes_a_folder_that_names_its_end(made, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(made / "ours", run)
    monkeypatch.setattr("jaxllm.weights.checksums.check_folder", lambda *_: None)
    for name in (*COMPANIONS, "token_ids.json"):  # as a run that trained its own tokenizer
        (run / name).unlink()
    back = converted(run, tmp_path / "back")
    page = json.loads((back / "tokenizer_config.json").read_text())
    end = "<|endoftext|>"
    assert page == {
        "bos_token": end,
        "eos_token": end,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    assert kept(back)[1] == dict(bos_token_id=0, eos_token_id=0, pad_token_id=None)
    # data.end_token is an end for transformers, too.
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("end_token: null", "end_token: e"))
    e = Tokenizer(TOKENIZER).encode("e")
    assert kept(converted(run, tmp_path / "e"))[1]["eos_token_id"] == [0, *e]
    write(run, {"generation_config.json": dict(eos_token_id=1, top_k=3)})
    content, ids = kept(converted(run, tmp_path / "list"))
    assert json.loads(content["generation_config.json"]) == dict(eos_token_id=[1, *e], top_k=3)


CLASSES = {  # model_type beside a tokenizer without a class: the class that its copy needs
    "gpt2": "GPT2Tokenizer",  # else a Llama's tokenizer has no eos_token in transformers
    None: "PreTrainedTokenizerFast",
    "llama": None,  # as the model is
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_tokenizer_from_another_model_keeps_its_class(kind, made, tmp_path, monkeypatch):
    """Where none is named, transformers takes the class that belongs to the type of the model."""
    run, end = tmp_path / "run", "<|endoftext|>"
    shutil.copytree(made / "ours", run)
    monkeypatch.setattr("jaxllm.weights.checksums.check_folder", lambda *_: None)
    for name in COMPANIONS:  # as a run on another model's tokenizer
        (run / name).unlink()
    write(run, {"token_ids.json": {"model_type": kind}, "tokenizer_config.json": {"e": 1}})
    back = converted(run, tmp_path / "back")
    page = json.loads((back / "tokenizer_config.json").read_text())
    assert (page.pop("e"), page.pop("tokenizer_class", None)) == (1, CLASSES[kind])
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    assert page == (names if kind == "gpt2" else {})
    before, after = Tokenizer(run), Tokenizer(back)
    assert (before.bos, before.eos, before.special) == (after.bos, after.eos, after.special)


def test_a_qwen2_with_another_tokenizer_says_how_to_load_it(tmp_path, monkeypatch, capsys):
    """transformers' AutoTokenizer makes a Qwen2Tokenizer for every qwen2, whatever is named.

    From a BPE that we trained it got 19 ids for "def f(x):\\n    return 12345 + x's", instead of
    the 12 that PreTrainedTokenizerFast gets and that the model was trained on.
    """
    monkeypatch.setattr("jaxllm.weights.checksums.check_folder", lambda *_: None)
    run = converted(family_folder(tmp_path / "source", "qwen2"), tmp_path / "run")
    converted(run, tmp_path / "same")
    assert "AutoTokenizer" not in capsys.readouterr().out
    for name in files.beside(run):
        (run / name).unlink()
    shutil.copy(TOKENIZER, run)
    converted(run, tmp_path / "other")
    said = "AutoTokenizer makes a Qwen2Tokenizer of its tokenizer, which splits text in another way"
    assert f"{said}: load it with PreTrainedTokenizerFast" in capsys.readouterr().out


def test_a_gpt2s_tokenizer_without_a_class_stays_a_gpt2s(tmp_path):
    """transformers takes GPT2Tokenizer, which puts no space first, whatever tokenizer.json says."""
    page = json.loads(TOKENIZER.read_text())
    page["pre_tokenizer"]["add_prefix_space"] = True
    source = {"tokenizer.json": page, "config.json": dict(model_type="gpt2")}
    write(tmp_path / "source", {name: json.dumps(x) for name, x in source.items()})
    tokenizer, out = Tokenizer(tmp_path / "source"), tmp_path / "out"
    tokenizer.copy_to(out)
    tokenizer.export_to(out, "gpt2")
    right = tokenizers.Tokenizer.from_file(str(TOKENIZER)).encode("return 1").ids
    assert tokenizer.prompt("return 1") == Tokenizer(out).prompt("return 1") == right


def test_a_mistrals_tokenizer_beside_a_gpt2_is_read_as_it_is(tmp_path):
    """transformers ignores the class that a Mistral's folder names, and would take it here."""
    theirs = shutil.copytree(FIXTURES / "text" / "llama2", tmp_path / "theirs")
    write(theirs, {"config.json": {"model_type": "mistral"}})
    path = tmp_path / "copy" / "tokenizer_config.json"
    tokenizer = Tokenizer(theirs)
    for model, named in (("mistral", "LlamaTokenizer"), ("gpt2", "PreTrainedTokenizerFast")):
        tokenizer.copy_to(path.parent)
        tokenizer.export_to(path.parent, model)
        page = json.loads(path.read_text())
        assert page == tokenizer._pages.tokenizer | {"tokenizer_class": named}


def test_a_folder_without_a_readable_tokenizer_keeps_its_files(made, tmp_path, capsys):
    theirs = folder_of(tmp_path / "theirs", "llama3", **IDS)
    write(theirs, {k: x for k, x in COMPANIONS.items() if k != "tokenizer_config.json"})
    ours = converted(theirs, tmp_path / "ours")
    said = capsys.readouterr().out
    assert "no tokenizer is written" in said
    assert "save_pretrained" in said
    assert kept(converted(ours, tmp_path / "back")) == kept(theirs)
    # No tokenizer is trained beside these weights.
    text = ["--data.source", "text", "--data.path", str(made / "text.txt")]
    capsys.readouterr()
    assert evaluate.main(["--checkpoint", str(ours), *text]) == 2
    assert "ours has no tokenizer.json" in capsys.readouterr().err
    assert trained(tmp_path / "run", "--config", ours / "config.yaml", *text) == 2
    assert "data.tokenizer is null: a new tokenizer would not match" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    meta = meta_folder(tmp_path / "meta", head_dim=8)
    write(meta, {"tekken.json": "{}"})
    assert (converted(meta, tmp_path / "tekken") / "tekken.json").exists()


def test_gpt2s_vocabulary_and_merges_are_read(made, tmp_path):
    theirs = folder_of(tmp_path / "theirs", "gpt2")
    model = json.loads(TOKENIZER.read_text())["model"]
    merges = [x if isinstance(x, str) else " ".join(x) for x in model["merges"]]
    write(
        theirs, {"vocab.json": model["vocab"], "merges.txt": "\n".join(["#version: 0.2", *merges])}
    )
    ours = converted(theirs, tmp_path / "ours")
    found, right = Tokenizer(ours), Tokenizer(TOKENIZER)
    assert found.encode("the cat") == right.encode("the cat")
    back = converted(ours, tmp_path / "back")
    assert {"vocab.json", "merges.txt", "tokenizer.json"} <= set(kept(back)[0])


def test_data_of_another_tokenizer_is_refused_by_both_names(made, tmp_path, capsys):
    shards = ["--data.source", "shards", "--data.path"]
    config = ["--config", made / "ours" / "config.yaml"]
    own = ["--data.tokenizer", "null"]
    init = ["--model.init_from", made / "theirs"]
    same = made / "same" / "tokenizer.json"
    other, both = made / "other_shards", made / "*_shards" / "train_*.bin"
    assert evaluate.main(["--checkpoint", str(made / "ours"), *shards, f"{made}/same_shards"]) == 0
    capsys.readouterr()
    names = f"{made}/other_shards/tokenizer.json differs from "
    for words, second in (
        ([*config, *shards, other], "ours"),
        ([*config, *shards, other, *own], "ours"),  # the tokenizer beside the shards
        ([*config, *shards, other, *own, *init], "theirs"),
        ([*config, *shards, other, "--data.tokenizer", same], "ours"),
        ([*config, *shards, made / "same_shards", "--data.val_path", other], "ours"),
        (["evaluate", *shards, str(other)], "ours"),
    ):
        if words[0] == "evaluate":
            assert evaluate.main(["--checkpoint", str(made / "ours"), *words[1:]]) == 2
        else:
            assert trained(tmp_path / "run", *words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{names}{made}/{second}/tokenizer.json" in error, (second, error)
    assert trained(tmp_path / "run", *config, *shards, both, *own) == 2
    assert "differs from" in capsys.readouterr().err
    text = ["--data.source", "text", "--data.path", str(made / "text.txt"), "--data.tokenizer"]
    changed = str(made / "other" / "tokenizer.json")
    assert evaluate.main(["--checkpoint", str(made / "ours"), *text, changed]) == 2
    assert f"other/tokenizer.json differs from {made}/ours" in capsys.readouterr().err
    assert trained(tmp_path / "run", *config, *text, changed) == 2
    assert f"other/tokenizer.json differs from {made}/ours" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_may_have_a_few_tokens_beyond_the_model(made, tmp_path, capsys):
    theirs = folder_of(tmp_path / "theirs", "llama3")
    page = json.loads(TOKENIZER.read_text())
    form = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    page["added_tokens"] += [dict(id=67, content="<|im_start|>", **form)]
    write(theirs, {"tokenizer.json": page})
    ours = converted(theirs, tmp_path / "ours")
    text = ["--data.source", "text", "--data.path", str(made / "text.txt")]
    assert evaluate.main(["--checkpoint", str(ours), *text]) == 0
    assert len(load_file(theirs / "model.safetensors")["lm_head.weight"]) == 67
    assert PAGES["llama3"]["vocab_size"] == 67
    (tmp_path / "names.txt").write_text("the cat <|im_start|> sat " * 20)
    text[-1] = str(tmp_path / "names.txt")
    capsys.readouterr()
    words = ["--checkpoint", str(ours), *text, "--data.special_tokens", "tokens"]
    assert evaluate.main(words) == 2
    assert "'<|im_start|>' (id 67)" in capsys.readouterr().err
