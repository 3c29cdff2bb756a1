"""Files of a tokenizer's folder that are refused or damaged, each in a line that names it."""

import base64
import contextlib
import json
import re
import shlex
import shutil

import pytest
import tokenizers
from tokenizer_families import FOLDER, built, folder_of

from jaxllm.errors import InputError
from jaxllm.text import Tokenizer, present


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tokenizer.model", "Auto"),
        ("tekken.json", "PreTrained.*, add_bos_token="),
        ("vocab.txt", "Auto"),  # of BERT, as in the Chinese GPT-2s
    ],
)
def test_what_no_library_reads_is_refused_with_the_way_out(name, kind, tmp_path):
    assert not present(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    assert present(tmp_path)
    match = rf"has {name}, but no tokenizer\.json; .* import {kind}"
    with pytest.raises(InputError, match=match) as error:
        Tokenizer(tmp_path)
    # A folder's name may have quotes, so the command names none.
    program = shlex.split(str(error.value).partition("in that folder: ")[2])
    assert program[:2] == ["python", "-c"]
    assert compile(program[2], "it", "exec")
    assert str(tmp_path) not in program[2]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer_config.json", "{", "cannot be read"),
        ("generation_config.json", "[1]", "not an object with keys"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 3}}', "cannot be read"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "cannot be read"),
        ("tokenizer_config.json", '{"split_special_tokens": true}', "split_special_tokens=true"),
        ("special_tokens_map.json", '{"additional_special_tokens": 3}', "cannot be read"),
        ("chat_template.json", '{"chat_template": 3}', "nothing"),
        ("added_tokens.json", '{"a": "b", "c": 1}', "added_tokens.json"),
    ],
)
def test_bad_files_are_named(name, content, named, tmp_path):
    folder = shutil.copytree(FOLDER / "llama2", tmp_path / "a")
    (folder / name).write_text(content)
    refusal = pytest.raises(InputError, match=named)
    with contextlib.nullcontext() if named == "nothing" else refusal:
        Tokenizer(folder)


def test_a_tokenizer_of_tiktoken_is_not_turned_into_one_without_special_tokens(tmp_path):
    """The converter that our command for other files calls knows no names of Llama 3's."""
    ranks = [base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(ranks))
    with pytest.raises(InputError, match=r"tokenizer\.model is tiktoken's, .* above original/$"):
        Tokenizer(tmp_path)


def test_the_flag_of_mistrals_regex_is_not_ignored(tmp_path):
    """transformers would encode a Mistral's text with another regex than the file's."""
    page = {"fix_mistral_regex": True}
    folder_of(tmp_path / "a", tokenizer_config=page, config={"model_type": "llama"})
    folder_of(tmp_path / "b", tokenizer_config={}, config={"model_type": "mistral"})
    with pytest.raises(InputError, match=r"fix_mistral_regex=true is not supported; save the"):
        folder_of(tmp_path / "c", tokenizer_config=page, config={"model_type": "mistral"})


def test_what_a_post_processor_lacks_is_named(tmp_path):
    """The library would panic, or give ids that no model has."""
    folder = shutil.copytree(FOLDER / "llama2", tmp_path / "a")
    page = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    name, post = "<s>", page["post_processor"]
    wrap = lambda part: {"type": "Sequence", "processors": [part]}
    for changed, named in (
        (post | {"special_tokens": {}}, f"names {name}, which it does not define"),
        (wrap(wrap(post | {"special_tokens": {}})), f"names {name}, which it does"),
        (
            post | {"single": [{"Sequence": {"id": "B", "type_id": 0}}]},
            "names B, which it does not",
        ),
        (
            post | {"special_tokens": {name: {"id": name, "ids": [70000], "tokens": [name]}}},
            "puts id 70000 around a text, which is beyond its",
        ),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(page | {"post_processor": changed}))
        with pytest.raises(InputError, match=rf"tokenizer\.json: its post_processor {named}"):
            Tokenizer(folder)


def test_a_chat_template_that_cannot_be_read_is_named(tmp_path):
    """A link to nothing, too: that of tokenizer_config.json would take its place unsaid."""
    folder = shutil.copytree(FOLDER / "llama2", tmp_path / "a")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja cannot be read as"):
        Tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to("../blobs/gone")
    with pytest.raises(InputError, match=r"chat_template\.jinja cannot be read as"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("config", {"eos_token_id": "2"}),
        ("generation_config", {"eos_token_id": [1, "2"]}),
        ("generation_config", {"bos_token_id": 1.0}),
        ("generation_config", {"eos_token_id": True}),
        ("generation_config", {"do_sample": "false"}),
    ],
)
def test_ids_and_switches_of_another_type_are_named(name, page, tmp_path):
    ((key, value),) = page.items()
    with pytest.raises(InputError, match=re.escape(f"{name}.json: {key}={value!r} must be ")):
        folder_of(tmp_path / "a", **{name: page})


def test_a_tokenizer_that_draws_its_pieces_is_refused(tmp_path):
    folder = built(tmp_path, model=tokenizers.models.BPE({"a": 0}, [], dropout=0.1))
    with pytest.raises(InputError, match=r"dropout=0.1 makes ids random; set it to null there"):
        Tokenizer(folder)
