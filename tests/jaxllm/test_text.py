"""Compares jaxllm.text with transformers on the tokenizers of fixtures/text (make_text.py)."""

import contextlib
import datetime
import itertools
import random
import shutil
from types import SimpleNamespace

import pytest
from tokenizer_families import EXPECTED, FAMILIES, FOLDER, HARD, built
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from jaxllm.data.corpus import encode
from jaxllm.data.sources import Piece
from jaxllm.errors import InputError
from jaxllm.infer.writer import Text
from jaxllm.text import Tokenizer, chat


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
    (plain,) = tokenizer.encode_parts([("", right["names"])])
    if 3 not in plain:  # the pieces of a Unigram include the names
        assert not set(plain) & set(tokenizer.special.values())
    assert tokenizer.count_special(right["names"]) >= 2


def test_an_id_that_no_tokenizer_has_is_one_line(family):
    tokenizer, _ = family
    assert tokenizer.decode([10**6]) == ""  # of a model with more entries
    for odd in (-1, 2**32):
        with pytest.raises(InputError, match=f"^id {odd} is no token: ids are from 0 to"):
            tokenizer.decode([0, odd])


def test_the_streamed_text_continues_the_prompt(family):
    tokenizer, right = family
    for prompt, text in zip(right["prompts"], right["continued"], strict=False):
        stream = Text(tokenizer, prompt)
        shown = ""
        for token in right["hard"]:
            stream.add(token)
            assert stream.text.startswith(shown)  # nothing that is certain changes
            shown = stream.text[: stream.certain]
            assert shown.count("\ufffd") <= text.count("\ufffd") <= 1  # HARD has one
        assert stream.text == text


def test_a_text_after_a_long_character_is_decoded_with_all_of_it(family):
    """Llama 2 has 18 bytes of a family, which are a text only as a whole."""
    tokenizer, _ = family
    for said in ("👩‍👩‍👧", "_ so", "👍 so"):
        prompt, whole = (tokenizer.prompt(f"A 👩‍👩‍👧{more}") for more in ("", said))
        assert whole[: len(prompt)] == prompt
        stream = Text(tokenizer, prompt)
        for token in whole[len(prompt) :]:
            stream.add(token)
        text = tokenizer.decode(whole, special=False)
        assert stream.text == text.removeprefix(tokenizer.decode(prompt, special=False))
        assert stream.text == said or 3 in whole  # a Unigram's unknown piece


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
    # The file comes before tokenizer_config.json.
    shutil.copy(FOLDER.parent / "chat" / f"{template}.jinja", folder / "chat_template.jinja")
    tokenizer = Tokenizer(folder)
    for messages, tools, answer, ids in EXPECTED["templates"][template]:
        given = EXPECTED["TOOLS"] if tools else None
        refusal = pytest.raises(InputError, match="the chat template refuses")
        with contextlib.nullcontext() if ids else refusal:
            assert tokenizer.chat(EXPECTED[messages], tools=given, answer=answer)[0] == ids
    mask = tokenizer.chat(EXPECTED["NO_SYSTEM"], answer=False)[1]
    assert mask == EXPECTED["mask"] if template == "generation" else not any(mask)


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
metaspace = lambda scheme, split=False: dict(
    name="llama2", normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace("▁", scheme, split)
)
KINDS = {name: dict(name=name) for name in FAMILIES} | {
    "metaspace-first": metaspace("first"),
    "metaspace-always": metaspace("always"),
    "metaspace-never": metaspace("never", True),
    "no-regex": dict(pre_tokenizer=pre_tokenizers.ByteLevel(False, use_regex=False)),
    "prefix-space": dict(
        name="llama3", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "strip": dict(normalizer=normalizers.Strip()),
    "lowercase": dict(
        normalizer=normalizers.Sequence([normalizers.Lowercase(), normalizers.NFD()])
    ),
    "whitespace": dict(name="unigram", pre_tokenizer=pre_tokenizers.Whitespace()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", ["text", "tokens"])
def test_ids_of_a_cut_document_are_those_of_the_whole(kind, special, tmp_path):
    """Wherever it was cut to be read; a tokenizer that permits a cut encodes the parts apart."""
    tokenizer = Tokenizer(built(tmp_path, **KINDS[kind]))
    name = tokenizer.decode([tokenizer.eos])
    prose = f"The quick brown fox\njumps over{name} the dog.\nIt's 1234567 x\n\n  {HARD}\n" * 90
    cuts = itertools.accumulate(random.Random(0).choices(range(512, 600), k=len(prose) // 600))
    parts = [prose[a:b] for a, b in itertools.pairwise([0, *cuts, len(prose)])]
    pieces = [Piece("a", part, i == 0, i) for i, part in enumerate(parts)]
    pieces += [Piece("b", " fox", True, 0)]
    encoded = [part for batch in encode(iter(pieces), tokenizer, special) for part in batch]
    right = []
    for text in (prose, " fox"):
        (ids,) = tokenizer.encode_parts([("", text)], special=special == "tokens")
        right += [*tokenizer.begin, *ids, *tokenizer.finish]
    assert [i for part in encoded for i in part.ids] == right
    assert sum(part.names for part in encoded) == 90
    assert sum(part.pieces for part in encoded) == len(pieces)
    # A restart goes on after any part.
    first = encoded[0].pieces
    rest = encode(iter(pieces), tokenizer, special, first)
    ids = [i for batch in rest for part in batch for i in part.ids]
    assert [*encoded[0].ids, *ids] == right
    assert len(encoded) > 5 or kind in ("strip", "no-regex", "prefix-space")


def test_a_conversation_marks_nothing_as_the_assistants(tmp_path):
    """What surrounded the assistant's words was two characters, which a text may have."""
    folder = shutil.copytree(FOLDER / "llama3", tmp_path / "a")
    shutil.copy(FOLDER.parent / "chat" / "generation.jinja", folder / "chat_template.jinja")
    said = "\ufdd0mine\ufdd1"
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "yours"}]
    text, spans = Tokenizer(folder).rendered(messages)
    assert said in text
    assert [text[start:end] for start, end in spans] == ["yours<|eot_id|>"]


def test_an_unknown_character_without_a_token_for_it_is_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    Library(models.Unigram([("a", -1.0)], unk_id=None)).save(str(path))
    tokenizer = Tokenizer(path, end_token="a")
    rendered = [("a?", [])]
    calls = (
        lambda: tokenizer.encode("a?"),
        lambda: tokenizer.prompt("a?"),
        lambda: tokenizer.encode_parts([("", "a?")]),
        lambda: tokenizer.encode_rendered(rendered),
    )
    for call in calls:
        with pytest.raises(InputError, match=r"tokenizer.json: Encountered an unknown token"):
            call()
