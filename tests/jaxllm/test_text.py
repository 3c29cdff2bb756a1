"""Compares jaxllm.text with transformers on the tokenizers of fixtures/text (make_text.py)."""

import datetime
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.chat_templates import TEMPLATES
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.data.corpus import encode
from jaxllm.data.sources import Piece
from jaxllm.errors import InputError
from jaxllm.infer.writer import Text
from jaxllm.text import Tokenizer, chat

FOLDER = Path(__file__).parents[1] / "fixtures" / "text"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
HARD = EXPECTED["HARD"]
FAMILIES = list(EXPECTED["families"])


@pytest.fixture(params=FAMILIES)
def family(request):
    """(tokenizer, expected values) of each family."""
    return Tokenizer(FOLDER / request.param), EXPECTED["families"][request.param]


def test_ids_are_those_of_transformers(family):
    tokenizer, right = family
    assert tokenizer.encode(HARD) == right["hard"]
    texts = [*EXPECTED["ENDS"], right["names"]]
    assert [tokenizer.prompt(text) for text in texts] == right["prompts"]
    assert tokenizer.vocab_size > max(right["hard"])
    plain = tokenizer.encode(right["names"], special=False)
    if 3 not in plain:  # the pieces of a Unigram include the names
        assert not set(plain) & set(tokenizer.special.values())
    assert tokenizer.count_special(right["names"]) >= 2


def test_the_streamed_text_continues_the_prompt(family):
    tokenizer, right = family
    for prompt, text in zip(right["prompts"], right["continued"], strict=False):
        stream = tokenizer.continuation(prompt)
        shown = ""
        for token in right["hard"]:
            stream.add(token)
            assert stream.text.startswith(shown)  # nothing that is certain changes
            shown = stream.text[: stream.certain]
            assert shown.count("\ufffd") <= text.count("\ufffd") <= 1  # HARD has one
        assert stream.text == text


def test_beginnings_and_ends_are_those_of_transformers(family):
    tokenizer, right = family
    assert (tokenizer.bos, tokenizer.eos) == (right["bos"], right["eos"])
    assert tokenizer.ends == set(right["ends"])
    assert tokenizer.describe().count(" or ") == len(right["ends"]) - 1
    ids = tokenizer.begin + tokenizer.finish
    assert tokenizer.eos in ids
    assert tokenizer.begin == tokenizer.prompt("")[:1] or tokenizer.begin == [tokenizer.eos]


def test_chats_are_those_of_transformers(family):
    tokenizer, right = family
    if "chat" in right:
        assert tokenizer.chat(EXPECTED["NO_SYSTEM"])[0] == right["chat"]
    else:
        with pytest.raises(InputError, match="has no chat template"):
            tokenizer.chat(EXPECTED["NO_SYSTEM"])


@pytest.mark.parametrize("template", EXPECTED["templates"])
def test_templates_are_rendered_as_by_transformers(template, tmp_path, monkeypatch):
    today = datetime.datetime(2026, 2, 3)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda: today))
    monkeypatch.setattr(chat, "datetime", clock)
    folder = shutil.copytree(FOLDER / "llama3", tmp_path / "a")
    (folder / "chat_template.jinja").write_text(TEMPLATES[template], encoding="utf-8")
    tokenizer = Tokenizer(folder)  # the file comes before tokenizer_config.json
    for messages, tools, answer, ids in EXPECTED["templates"][template]:
        call = lambda: tokenizer.chat(
            EXPECTED[messages], tools=EXPECTED["TOOLS"] if tools else None, answer=answer
        )
        if ids is None:
            with pytest.raises(InputError, match="the chat template refuses"):
                call()
        else:
            assert call()[0] == ids
    mask = tokenizer.chat(EXPECTED["NO_SYSTEM"], answer=False)[1]
    assert mask == EXPECTED["mask"] if template == "generation" else not any(mask)
