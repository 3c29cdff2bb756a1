"""Damaged and random input gives an error line or a result, but no traceback and no hang."""

import contextlib
import gc
import json
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxllm.config import CONFIG_DIR, Config, command_line, load
from jaxllm.data.shards import check_shard, open_shard
from jaxllm.data.sources import Source
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer, train_tokenizer
from jaxllm.train import report
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.metrics import read_metrics

CONFIGS = sorted(CONFIG_DIR.glob("*.yaml"))
bounded = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["1e400", "-1", "0", "{}", "[1, 2]", "~", "gpt2", ".nan", "1_000", "0x10"]),
)


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@bounded
@given(data=st.data())
def test_configurations(data):
    lines = data.draw(st.sampled_from(CONFIGS)).read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        i = data.draw(st.integers(0, len(lines) - 1))
        key = lines[i].partition(":")[0]
        lines[i] = data.draw(
            st.one_of(
                scalars.map(lambda v, key=key: f"{key}: {v}"),
                st.text(max_size=30),
                st.just(""),
                scalars.map(lambda v, key=key: f"{key}_: {v}"),
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(InputError):
            config = load(str(path))
            assert isinstance(config, Config)


@bounded
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["--config", "llama3_small", "--train.steps", "--model.type", "3"]),
            st.text(max_size=12).filter(lambda w: w not in ("-h", "--help")),
        ),
        max_size=8,
    )
)
def test_command_lines(words):
    with contextlib.suppress(InputError):
        assert isinstance(command_line.read(words).config, Config)


def shards():
    """Bytes that are a shard, or almost."""
    header = st.tuples(
        st.sampled_from([20240520, 20240801, 0, 2**31 - 1]),
        st.sampled_from([1, 7, 0]),
        st.one_of(st.integers(0, 40), st.integers(-(2**31), 2**31 - 1)),
    ).map(lambda h: struct.pack("<3i", *h).ljust(1024, b"\0"))
    whole = st.tuples(header, st.binary(max_size=80)).map(b"".join)
    return st.one_of(whole, whole.map(lambda b: b[:700]), st.binary(max_size=50))


@bounded
@given(content=shards())
def test_shards(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.bin"
        path.write_bytes(content)
        try:
            check_shard(path, Path(folder) / "cache", 30000)
        except InputError:
            return
        tokens = open_shard(path)
        assert np.all(np.asarray(tokens) < 30000)


lines_of_json = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.text(max_size=20).map(lambda t: json.dumps({"text": t}).encode()),
        st.text(max_size=20).map(lambda t: json.dumps(t).encode()),
        st.recursive(
            st.one_of(st.none(), st.integers(), st.text(max_size=5)),
            lambda inner: st.dictionaries(st.sampled_from(["text", "a"]), inner, max_size=2),
            max_leaves=4,
        ).map(lambda v: json.dumps(v).encode()),
    ),
    max_size=6,
).map(b"\n".join)


def read_texts(kind, content):
    """Reads a file of this kind: every text is a string, or an InputError names the problem."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{kind}"
        path.write_bytes(content)
        with contextlib.suppress(InputError):
            for piece in Source(kind, [(path.name, path)], "text").pieces():
                assert isinstance(piece.text, str)


@bounded
@given(content=lines_of_json)
def test_json_lines(content):
    read_texts("jsonl", content)


@bounded
@given(content=st.one_of(st.binary(max_size=60), lines_of_json))
@example(content=b"[" * 100_000)
def test_metrics_files(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(content)
        assert all(isinstance(row["step"], int) for row in read_metrics(path))


known = st.sampled_from(["loss", "val_loss", "lr", "sample", "skips", "peak_memory_gib"])


@settings(bounded, max_examples=40)
@given(
    rows=st.lists(st.dictionaries(known, anything), max_size=5),
    step=st.integers(),
    about=anything
    | st.dictionaries(st.sampled_from(["model", "tokens_per_step", "versions", "ops"]), anything),
    config=st.text(max_size=20) | anything.map(json.dumps),
)
def test_reports(rows, step, about, config):
    with tempfile.TemporaryDirectory() as folder:
        run, lines = Path(folder), [json.dumps(row | {"step": step}) for row in rows]
        (run / "metrics.jsonl").write_text("\n".join(lines))
        (run / "config.yaml").write_text(config, encoding="utf-8", errors="replace")
        (run / "run.json").write_text(json.dumps(about))
        with contextlib.suppress(InputError):
            report.write([run, run], run / "x.html")


@st.composite
def damaged(draw, content):
    """The bytes of a good file: truncated, with some bytes changed, or with a part repeated."""
    at = draw(st.integers(0, len(content)))
    kind = draw(st.sampled_from(["cut", "changed", "doubled", "zeros"]))
    if kind == "cut":
        return content[:at]
    if kind == "doubled":
        return content[: at + 10] + content[at:]
    new = draw(st.binary(min_size=1, max_size=8)) if kind == "changed" else b"\0" * 20
    return (content[:at] + new + content[at + len(new) :])[: len(content)]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a parquet file, a tokenizer.json and a checkpoint."""
    folder = tmp_path_factory.mktemp("good")
    texts = [f"text {i} of a document" for i in range(20)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
    train_tokenizer(texts, 260, folder / "tokenizer.json")
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    checkpoints.save(1, STATE, {"samples": 8, "data_fingerprint": ""}, 2.0)
    checkpoints.close()
    return folder


STATE = {"a": np.arange(300.0, dtype=np.float32), "b": np.int32(1)}


@bounded
@given(data=st.data())
def test_parquet(good, data):
    read_texts("parquet", data.draw(damaged((good / "a.parquet").read_bytes())))


@bounded
@given(data=st.data())
def test_tokenizers(good, data):
    page = json.loads((good / "tokenizer.json").read_text())
    if data.draw(st.booleans()):
        part = page  # changes a value somewhere in it
        while isinstance(part, dict) and part:
            key = data.draw(st.sampled_from(list(part)))
            if not isinstance(part[key], dict) or data.draw(st.booleans()):
                part[key] = data.draw(anything)
                break
            part = part[key]
        content = json.dumps(page).encode()
    else:
        content = data.draw(damaged((good / "tokenizer.json").read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(content)
        with contextlib.suppress(InputError):
            tokenizer = Tokenizer(path)
            ids = tokenizer.encode("text of a document")
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            assert isinstance(tokenizer.decode(ids), str)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")
def test_checkpoints(good):
    files = sorted(p for p in (good / "checkpoints" / "1").rglob("*") if p.is_file())

    @settings(bounded, max_examples=20)
    @given(st.data())
    def check(data):
        path = data.draw(st.sampled_from(files))
        content = data.draw(damaged(path.read_bytes()))
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "checkpoints"
            shutil.copytree(good / "checkpoints", copy)
            (copy / path.relative_to(good / "checkpoints")).write_bytes(content)
            checkpoints = Checkpoints(copy, 1)
            with contextlib.suppress(InputError):
                step = checkpoints.newest()
                checkpoints.samples(step, "")
                assert checkpoints.restore(step, STATE)["a"].shape == STATE["a"].shape

    check()
    gc.collect()  # Orbax's leftovers warn now and not in another test


def test_the_strategies_reach_valid_input():
    """A fuzz test that only sees errors would prove nothing."""
    valid = struct.pack("<3i", 20240520, 1, 2).ljust(1024, b"\0") + b"\1\0\2\0"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.bin"
        path.write_bytes(valid)
        assert len(check_shard(path, Path(folder) / "cache", 30000)) == 64
        path.write_bytes(valid[:-1])
        with pytest.raises(InputError):
            check_shard(path, Path(folder) / "cache", 30000)
