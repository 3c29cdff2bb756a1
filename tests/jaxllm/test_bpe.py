"""Training a tokenizer, and the library's promises on which ours relies."""

import codecs
import json

import pytest
from data_settings import write

from jaxllm.errors import InputError
from jaxllm.text import Tokenizer, train_tokenizer


@pytest.fixture
def tokenizer_path(tmp_path):
    train_tokenizer(["hello world, hello text\n"] * 3, 280, tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def test_every_text_survives_a_round_trip(tokenizer_path):
    tokenizer = Tokenizer(tokenizer_path)
    text = "hello  wörld ☃\r\n\t\0 <|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size <= 280
    assert tokenizer.decode([tokenizer.eos]) == "<|endoftext|>"
    (ids,) = tokenizer.encode_parts([("", text)])
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == text


def test_training_is_deterministic(tokenizer_path):
    again = tokenizer_path.with_name("again.json")
    train_tokenizer(["hello world, hello text\n"] * 3, 280, again)
    assert again.read_bytes() == tokenizer_path.read_bytes()


def test_the_truncation_of_a_tokenizer_is_ignored(tokenizer_path):
    content = json.loads(tokenizer_path.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    write(tokenizer_path, json.dumps(content))
    assert len(Tokenizer(tokenizer_path).encode("a b c d e f")) > 5


def test_bad_tokenizers_are_refused(tmp_path, tokenizer_path):
    with pytest.raises(InputError, match=r"none\.json: No such file"):
        Tokenizer(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"bad\.json is not a tokenizer\.json"):
        Tokenizer(write(tmp_path / "bad.json", "{}"))
    with pytest.raises(InputError, match=r"data\.end_token=<eos> is not a token of"):
        Tokenizer(tokenizer_path, end_token="<eos>")


def test_the_incremental_decoder_exposes_pending_bytes():
    """The byte position in the error relies on this."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    decoder.decode("☃".encode()[:2])
    assert len(decoder.getstate()[0]) == 2
