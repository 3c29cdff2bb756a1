import io
import json
import os
import resource
import subprocess
import sys
from hashlib import sha256

import pytest
import tokenizers
from data_settings import flipped_byte, opened, settings

from jaxllm.data import cache, corpus, prepare, sources
from jaxllm.data.command import main
from jaxllm.data.shards import open_shard
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer, train_tokenizer

DOCUMENTS = [f"document {i} says hello\nand {i * i}\n" for i in range(60)]


@pytest.fixture
def data(tmp_path):
    """A folder of documents in JSON lines and a tokenizer."""
    lines = [json.dumps({"body": text}) + "\n" for text in DOCUMENTS]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text("".join(lines[:25]))
    (tmp_path / "data/b.jsonl").write_text("".join(lines[25:]))
    train_tokenizer(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    return tmp_path


def command(data, out="out", **options):
    options = {
        "source": "jsonl",
        "path": data / "data",
        "text_column": "body",
        "tokenizer": data / "tokenizer.json",
        "out": data / out,
        "shard_tokens": 60,
        "val_fraction": 0.2,
    } | options
    return ["prepare", *(f"--{key}={value}" for key, value in options.items())]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".bin"}


def test_the_shards_open_with_their_tokenizer_and_decode_to_the_text(data, capsys):
    assert main(command(data)) == 0
    shards = sorted(contents(data / "out"))
    assert shards[0] == "train_000000.bin"
    assert shards[-1] == "val_000002.bin"
    sizes = [len(open_shard(data / "out" / name)) for name in shards]
    assert sizes.count(60) == len(sizes) - 2  # all but the last of each split are full

    config = settings(data)
    config.source, config.path = "shards", str(data / "out")
    dataset = opened(config, vocab_size=300)
    text = [dataset.tokenizer.decode(x.read(0, len(x))) for x in (dataset.train, dataset.val)]
    train, val = (x.split("<|endoftext|>")[1:] for x in text)
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert train == [x for x in DOCUMENTS if x in train]
    assert 3 <= len(val) <= 25
    assert f"{len(dataset.train):,} training, {dataset.val_tokens:,}" in capsys.readouterr().out
    flipped_byte(data / "out/val_000002.bin")
    with pytest.raises(InputError, match=r"val_000002\.bin is damaged: its tokens have changed"):
        opened(config, vocab_size=300)


@pytest.mark.parametrize("fraction", [0.01, 0.99])
@pytest.mark.parametrize(("kind", "count"), [("jsonl", 2), ("jsonl", 20), ("text", 48)])
def test_few_documents_still_give_validation_data(data, fraction, kind, count, capsys):
    folder = data / "few"
    folder.mkdir()
    if kind == "jsonl":
        lines = [json.dumps({"body": text}) + "\n" for text in DOCUMENTS[:count]]
        (folder / "a.jsonl").write_text("".join(lines))
    else:
        for i, text in enumerate(DOCUMENTS[:count]):
            (folder / f"{i}.txt").write_text(text)
    options = {"source": kind, "path": folder, "val_fraction": fraction, "shard_tokens": 10**6}
    assert main(command(data, **options)) == 0
    assert sorted(contents(data / "out")) == ["train_000000.bin", "val_000000.bin"]
    assert "held out" not in capsys.readouterr().out
    tokenizer = Tokenizer(data / "tokenizer.json")
    few = "val" if fraction < 0.5 else "train"
    tokens = open_shard(data / "out" / f"{few}_000000.bin")
    assert tokenizer.decode(tokens).count("<|endoftext|>") <= max(1, count // 10)


def test_a_single_document_gives_no_validation_shard_and_still_trains(data, capsys):
    (data / "one.jsonl").write_text(json.dumps({"body": " ".join(DOCUMENTS)}) + "\n")
    assert main(command(data, path=data / "one.jsonl", **{"val_fraction": 0.99})) == 0
    assert all(name.startswith("train") for name in contents(data / "out"))
    assert "without data.val_path, training holds out" in capsys.readouterr().out
    config = settings(data)
    config.source, config.path = "shards", str(data / "out")
    assert opened(config, vocab_size=300).val_tokens > 8


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["os.rename", "prepare.write_json", "ShardWriter.append"])
def test_an_interruption_anywhere_leads_to_the_same_shards(data, monkeypatch, name, after):
    monkeypatch.setattr(corpus, "_BATCH", 250)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # slow on some disks
    assert main(command(data, "whole")) == 0
    whole = contents(data / "whole")
    assert len(whole) > 8

    modules = {"os": prepare.os, "prepare": prepare, "ShardWriter": prepare.ShardWriter}
    owner, function = modules[name.split(".")[0]], name.split(".")[1]
    original = getattr(owner, function)
    kills, step = 0, 7 if function == "append" else 1
    while True:
        calls = 0

        def killed(*args, at=kills * step):
            nonlocal calls
            calls += 1
            if calls <= at:
                return original(*args)
            if after:
                original(*args)
            raise Killed

        out = data / f"out{kills}"
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, killed)
            try:
                assert main(command(data, out.name)) == 0
                break
            except Killed:
                kills += 1
        assert contents(out).items() <= whole.items()  # only complete shards have final names
        assert main(command(data, out.name)) == 0
        assert contents(out) == whole
        written = {name: sha256(content[1024:]).hexdigest() for name, content in whole.items()}
        assert json.loads((out / "prepare.json").read_text())["sha256"] == written
        assert {path.name for path in out.iterdir()} == {
            *whole, ".lock", "prepare.json", "tokenizer.json"
        }  # fmt: skip
    assert kills > 3


def test_prepare_continues_after_sigkill(data):
    """`os._exit` loses buffers and closes no files, as SIGKILL does."""
    code = f"""
import os, sys
from jaxllm.data import corpus, prepare
from jaxllm.data.command import main
corpus._BATCH = 300
original, calls = prepare.ShardWriter.append, 0
def append(*args):
    global calls
    calls += 1
    if calls == 35:
        os._exit(9)
    original(*args)
prepare.ShardWriter.append = append
sys.exit(main({command(data)!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 9, result.stderr
    state = json.loads((data / "out/prepare.json").read_text())
    assert 10 < state["pieces"] < 35
    assert main(command(data, "whole")) == 0
    assert contents(data / "out").items() < contents(data / "whole").items()
    assert main(command(data)) == 0
    assert contents(data / "out") == contents(data / "whole")


def error_of(capsys, argv):
    capsys.readouterr()
    assert main(argv) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("encoding")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_finished_folder_is_not_changed(data, capsys, monkeypatch):
    assert main(command(data)) == 0
    before = {path: path.stat().st_mtime_ns for path in (data / "out").glob("*[!k]")}
    first = capsys.readouterr().out
    assert main(command(data)) == 0
    assert capsys.readouterr().out == first
    assert "other data or options" in error_of(capsys, command(data, **{"shard_tokens": 61}))
    (data / "data/c.jsonl").write_text('{"body": "more"}\n')
    assert "other data or options" in error_of(capsys, command(data))
    assert {path: path.stat().st_mtime_ns for path in (data / "out").glob("*[!k]")} == before
    (data / "out/prepare.json").write_text('{"job"')
    assert "out/prepare.json cannot be read as JSON" in error_of(capsys, command(data))


def test_an_incomplete_folder_does_not_open(data, monkeypatch):
    def killed(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(prepare._Split, "finish", killed)
        with pytest.raises(Killed):
            main(command(data))
    config = settings(data)
    config.source, config.path = "shards", str(data / "out")
    with pytest.raises(ValueError, match=r"out is incomplete: run its `prepare` command again"):
        opened(config, vocab_size=300)


def test_shards_with_another_end_token_open_only_with_its_name(data):
    library = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    library.add_special_tokens(["<|end|>"])
    library.save(str(data / "tokenizer.json"))
    assert main(command(data, end_token="<|end|>")) == 0
    config = settings(data)
    config.source, config.path, config.pack = "shards", str(data / "out"), "documents"
    with pytest.raises(ValueError, match=r"out was prepared with --end_token <\|end\|>: set data"):
        opened(config)
    config.end_token = "<|end|>"
    found = opened(config)
    assert found.separator == library.token_to_id("<|end|>") == found.train.read(0, 1)


def test_shards_that_lost_a_file_beside_their_tokenizer_do_not_open(data):
    (data / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert main(command(data)) == 0
    config = settings(data)
    config.source, config.path = "shards", str(data / "out")
    known = opened(config)
    (data / "out/tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"out/tokenizer_config.json is gone since its shards"):
        opened(config)
    config.tokenizer = str(data / "tokenizer.json")
    assert opened(config).fingerprint == known.fingerprint


def test_a_job_is_known_by_the_content_of_its_files(data, capsys):
    path, words = data / "data/a.jsonl", command(data)
    assert main(words) == 0
    os.utime(path)  # as a copy
    assert main(words) == 0
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"hello", b"HELLO"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "out holds other data or options" in error_of(capsys, words)
    (data / "data/a.jsonl").rename(data / "data/train.jsonl")
    (data / "data/b.jsonl").rename(data / "data/dev.jsonl")
    named = "files to train on (train.jsonl) and to validate on (dev.jsonl): prepare each"
    assert named in error_of(capsys, command(data, "new"))


def test_foreign_shards_are_not_overwritten(data, capsys):
    (data / "out").mkdir()
    (data / "out/train_000000.bin").write_bytes(b"mine")
    assert "of other origin" in error_of(capsys, command(data))
    assert contents(data / "out") == {"train_000000.bin": b"mine"}
    (data / "out2").mkdir()
    (data / "out2/tokenizer.json").write_bytes(b"mine")
    assert "is of another tokenizer" in error_of(capsys, command(data, "out2"))
    assert (data / "out2/tokenizer.json").read_bytes() == b"mine"


@pytest.mark.parametrize(("name", "what"), [("config.yaml", "a run"), ("config.json", "a model")])
def test_the_folder_of_a_run_or_a_model_is_refused(data, capsys, name, what):
    (data / "out").mkdir()
    (data / "out" / name).write_text("")
    assert f"out holds {what}; choose another --out" in error_of(capsys, command(data))
    assert [path.name for path in (data / "out").iterdir()] == [name]
    assert "--out: it is empty; name a" in error_of(capsys, [*command(data), "--out="])


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
)
def test_files_of_another_tokenizer_are_not_taken_as_its_own(data, capsys, name):
    """They stayed in the folder, and every command read them with its tokenizer.json."""
    out = data / "out"
    out.mkdir()
    (out / name).write_text('{"eos_token": "hello"}')
    assert main(command(data)) == 2
    assert f"error: {out / name} is of another tokenizer" in capsys.readouterr().err
    assert not (out / "tokenizer.json").exists()
    (out / name).unlink()
    assert main(command(data)) == 0
    # Its own files may be there, as after an interruption.
    (data / name).write_text("{}")
    (data / "other").mkdir()
    (data / "other" / name).write_text("{}")
    assert main(command(data, "other")) == 0


def test_one_process_at_a_time(data, capsys):
    with cache.lock(data / "out/.lock"):
        assert "another process is writing" in error_of(capsys, command(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/none"}, "--path=/none does not exist"),
        ({"tokenizer": "/none.json"}, "cannot read tokenizer /none.json"),
        ({"text_column": "text"}, "a.jsonl:1 has no text under 'text'"),
        ({"shard_tokens": 0}, "--shard_tokens=0"),
        ({"val_fraction": 1.0}, "--val_fraction=1.0"),
        ({"out": "/dev/null/x"}, "cannot write to /dev/null/x"),
        ({"source": "stdlib"}, "is not read with source=stdlib"),
        ({"out": "data/x"}, "/data; choose another --out"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(data, capsys, options, message):
    assert message in error_of(capsys, command(data, **options))


def test_a_missing_or_truncated_partial_file_is_reported(data, capsys, monkeypatch):
    monkeypatch.setattr(corpus, "_BATCH", 300)

    def killed(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(prepare._Split, "finish", killed)
        with pytest.raises(Killed):
            main(command(data))
    (partial,) = (data / "out").glob(".train_*.partial")
    content = partial.read_bytes()
    partial.write_bytes(content[:1026])
    assert "tokens; delete its folder" in error_of(capsys, command(data))
    partial.unlink()
    assert "is missing" in error_of(capsys, command(data))
    partial.write_bytes(content)
    assert main(command(data)) == 0


def test_a_file_may_have_any_name(data, capsys):
    """As in archives from systems that do not write names in UTF-8."""
    for i, text in enumerate(DOCUMENTS):
        (data / "data" / os.fsdecode(b"caf\xe9%d.txt" % i)).write_text(text)
    assert main(command(data, source="text", path=f"{data}/data/*.txt", text_column="text")) == 0
    assert len([name for name in contents(data / "out") if name.startswith("val")]) > 0


def test_documents_without_text(data, capsys):
    (data / "empty.jsonl").write_text('{"body": ""}\n')
    assert "the data is empty" in error_of(capsys, command(data, path=data / "empty.jsonl"))
    assert main(command(data)) == 0  # into the same folder, which holds nothing yet


def test_a_terminal_shows_a_progress_bar(data, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(command(data)) == 0
    assert "encoding into" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()


def test_an_interruption_gives_status_130(data, monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(sources.Source, "pieces", interrupted)
    assert main(command(data)) == 130
    assert "run it again" in capsys.readouterr().err


def test_train_tokenizer(data, capsys):
    argv = ["train-tokenizer", "--source=jsonl", f"--path={data / 'data'}", "--text_column=body"]
    argv += ["--vocab_size=290", f"--out={data / 'new/tokenizer.json'}"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # a full disk
    try:
        assert "cannot write" in error_of(capsys, argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert main(argv) == 0
    assert Tokenizer(data / "new/tokenizer.json").vocab_size == 290
    assert "exists" in error_of(capsys, argv)
    (link := data / "link.json").symlink_to("nowhere")  # it was replaced by the tokenizer
    assert "exists" in error_of(capsys, [*argv, f"--out={link}"])
    assert link.is_symlink()
    for size in (256, 10**17):
        assert f"--vocab_size={size} is not from 257" in error_of(
            capsys, [*argv, f"--vocab_size={size}", f"--out={data / 'other.json'}"]
        )
    (data / "empty.jsonl").write_text('{"body": ""}\n')  # it gave a tokenizer of bytes alone
    argv += [f"--path={data / 'empty.jsonl'}", f"--out={data / 'other.json'}"]
    assert "the data is empty" in error_of(capsys, argv)
    assert not (data / "other.json").exists()
