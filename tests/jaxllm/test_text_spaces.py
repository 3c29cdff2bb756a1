"""Spaces that a tokenizer's settings add before a text, or take away before punctuation."""

import json
import shutil

import pytest
from tokenizer_families import FOLDER, built
from tokenizers import pre_tokenizers

from jaxllm.infer.writer import Text
from jaxllm.text import Tokenizer


@pytest.mark.parametrize(("family", "pages"), [("unigram", 1), ("gpt2", 2)])
def test_spaces_before_punctuation_go_if_the_files_say_so(family, pages, tmp_path):
    """As by transformers 5.24: of a BPE's text only with a second setting."""
    spaced, right = "the dog . so ? a ' b do n't he 's", "the dog. so? a'b don't he's"
    folder = shutil.copytree(FOLDER / family, tmp_path / "a")
    page = json.loads((folder / "tokenizer_config.json").read_text())
    for i, more in enumerate(("", "_for_bpe_even_though_it_will_corrupt_output"), 1):
        page[f"clean_up_tokenization_spaces{more}"] = True
        (folder / "tokenizer_config.json").write_text(json.dumps(page))
        tokenizer = Tokenizer(folder)
        ids = tokenizer.encode(spaced)
        assert tokenizer.decode(ids, special=False) == (right if i >= pages else spaced)
        assert tokenizer.decode(ids, special=False, clean=False) == spaced
    text, shown = Text(tokenizer, ids[:1]), ""
    for token in ids[1:]:
        text.add(token)
        assert text.text.startswith(shown)  # nothing that is certain changes
        shown = text.text[: text.certain]
    assert tokenizer.decode(ids[:1], special=False) + text.text == right


def test_a_space_before_the_first_word_is_the_settings(tmp_path):
    """As by transformers 5.24, whose GPT2Tokenizer has it from tokenizer_config.json."""
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "a")
    plain = Tokenizer(folder)
    page = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(page | {"add_prefix_space": True}))
    spaced = Tokenizer(folder)
    for text in ("the quick", " the quick"):
        assert spaced.encode(text) == plain.encode(" the quick")
    assert spaced.digest != plain.digest


@pytest.mark.parametrize(
    ("family", "kind", "spaced"),
    [
        ("smollm2", "GPT2Tokenizer", True),  # one of several pre-tokenizers
        ("qwen2", None, True),  # by config.json's model_type
        ("gpt2", "GPTNeoXTokenizerFast", True),
        ("gpt2", "PreTrainedTokenizerFast", False),
        ("tekken", "PreTrainedTokenizerFast", False),
    ],
)
def test_which_tokenizers_have_a_space_before_the_first_word(family, kind, spaced, tmp_path):
    """As by transformers 5.24: other classes take the tokenizer.json as it is."""
    folder = shutil.copytree(FOLDER / family, tmp_path / "a")
    plain = Tokenizer(folder)
    page = json.loads((folder / "tokenizer_config.json").read_text())
    page |= {"add_prefix_space": True} | ({"tokenizer_class": kind} if kind else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(page))
    text = "fox 12" if family == "smollm2" else "the fox"  # whose digits are pieces
    assert Tokenizer(folder).encode(text) == plain.encode(" " * spaced + text)


@pytest.mark.parametrize(
    ("model", "kind", "spaced"),
    [
        ("qwen2", "PreTrainedTokenizerFast", True),
        ("qwen3", "PreTrainedTokenizerFast", False),
        ("qwen3", "GPT2Tokenizer", True),
        ("qwen3", None, True),
        ("mistral", "GPT2Tokenizer", False),
    ],
)
def test_which_models_have_a_class_of_tokenizer_whatever_is_named(model, kind, spaced, tmp_path):
    """As by transformers 5.24, which takes the class that a Qwen3 names, but no Qwen2's."""
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "a")
    page = {"add_prefix_space": True} | ({"tokenizer_class": kind} if kind else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(page))
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    plain = Tokenizer(FOLDER / "gpt2")
    assert Tokenizer(folder).encode("the fox") == plain.encode(" " * spaced + "the fox")


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizerFast"])
def test_a_space_before_the_first_word_that_only_the_file_has(kind, tmp_path):
    """As by transformers 5.24: a class that builds its tokenizer anew has none by default."""
    plain = Tokenizer(FOLDER / "gpt2")
    folder = built(tmp_path, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    spaced = kind == "PreTrainedTokenizerFast"
    assert Tokenizer(folder).encode("the fox") == plain.encode(" " * spaced + "the fox")
