"""What the files of a tokenizer's folder say, read as transformers reads them."""

import json
import re
import shutil

import pytest
import tokenizers
from tokenizer_families import EXPECTED, FOLDER, HARD, built, folder_of
from tokenizers import processors

from jaxllm.config.loading import sampling
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer

TOKEN = {"__type": "AddedToken", "content": "<b>", "lstrip": False}
ENDINGS = [  # files, and the (bos, eos, ends, what begins and ends a document) of them
    ({}, (None, None, "", "", "")),
    ({"generation_config": {"eos_token_id": [0, 2]}}, (None, None, "ac", "", "")),
    ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": 2}},
     (None, "c", "b", "c", "")),
    ({"config": {"eos_token_id": 2, "bos_token_id": 3}}, ("d", "c", "c", "c", "")),
    ({"token_ids": {"eos_token_id": 2, "bos_token_id": 3}}, ("d", "c", "c", "c", "")),
    ({"tokenizer_config": {"eos_token": TOKEN}}, (None, "b", "b", "b", "")),
    ({"tokenizer_config": {"eos_token": TOKEN, "bos_token": None}, "config": {"bos_token_id": 0}},
     (None, "b", "b", "b", "")),
    ({"special_tokens_map": {"eos_token": {"content": "<c>"}, "bos_token": "<a>"}},
     ("a", "c", "c", "c", "")),
    ({"special_tokens_map": {"eos_token": "<c>"}, "tokenizer_config": {"eos_token": "<a>"}},
     (None, "c", "c", "c", "")),
    # Newer folders list all tokens; then special_tokens_map.json is a leftover.
    ({"special_tokens_map": {"eos_token": "<c>"},
      "tokenizer_config": {"eos_token": "<a>", "added_tokens_decoder": {"0": TOKEN}}},
     (None, "a", "a", "a", "")),
]  # fmt: skip


@pytest.mark.parametrize(("pages", "right"), ENDINGS)
def test_beginnings_and_ends_come_from_the_files_in_transformers_order(pages, right, tmp_path):
    number = lambda letter: None if letter is None else ids[f"<{letter}>"]
    ids = {f"<{letter}>": 293 + i for i, letter in enumerate("abcd")}
    text = json.dumps(pages)  # ids here count from <a>
    pages = json.loads(text, object_hook=lambda page: {
        key: value if not key.endswith("_id") else [293 + i for i in value]
        if isinstance(value, list) else 293 + value for key, value in page.items()
    })  # fmt: skip
    tokenizer = folder_of(tmp_path / "a", **pages)
    bos, eos, ends, begin, finish = right
    assert (tokenizer.bos, tokenizer.eos) == (number(bos), number(eos))
    assert tokenizer.ends == set(map(number, ends))
    assert tokenizer.begin == list(map(number, begin))
    assert tokenizer.finish == list(map(number, finish))
    assert ("no file" in tokenizer.describe()) == (not ends)
    # An option adds its token, and documents end there.
    chosen = Tokenizer(tmp_path / "a", end_token="<d>")
    assert chosen.ends == tokenizer.ends | {ids["<d>"]}
    assert chosen.begin == [ids["<d>"]]
    # A run keeps all of it.
    tokenizer.copy_to(tmp_path / "run")
    copy = Tokenizer(tmp_path / "run")
    assert (copy.bos, copy.eos, copy.ends) == (tokenizer.bos, tokenizer.eos, tokenizer.ends)
    assert copy.digest == tokenizer.digest
    assert not (tmp_path / "run" / "config.json").exists()


SAMPLING = [  # files, the settings of `Sampling`, and what stderr says
    ({"generation_config": {"eos_token_id": 1, "max_length": 20, "top_k": None}}, {}, ""),
    ({"generation_config": {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.1}},
     {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1},
     "applied by default: temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1"),
    ({"generation_config": {"do_sample": False, "top_k": 0}},
     {"temperature": 0.0, "top_k": 0}, "applied by default: top_k=0, temperature=0.0"),
    ({"config": {"min_p": 0.1, "no_repeat_ngram_size": 1, "num_beams": 1, "typical_p": 1.0}},
     {"min_p": 0.1},
     "applied by default: min_p=0.1; not applied, remove them to silence this:"
     " no_repeat_ngram_size=1"),
    ({"config": {"repetition_penalty": 2.0}, "generation_config": {"suppress_tokens": [7]}},
     {}, "not applied, remove them to silence this: suppress_tokens=[7]"),
    ({"generation_config": {"encoder_no_repeat_ngram_size": 2, "force_words_ids": [[7]]}}, {},
     "not applied, remove them to silence this: encoder_no_repeat_ngram_size=2,"
     " force_words_ids=[[7]]"),
    ({"config": {"encoder_no_repeat_ngram_size": 0, "constraints": None}}, {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("pages", "settings", "said"), SAMPLING)
def test_how_tokens_are_chosen_comes_from_the_file_that_transformers_takes(
    pages, settings, said, tmp_path
):
    """transformers reads config.json's settings without a generation_config.json only."""
    tokenizer = folder_of(tmp_path / "a", **pages)
    tokenizer.copy_to(tmp_path / "run")
    for found in (tokenizer, Tokenizer(tmp_path / "run")):
        line = f"settings of {found.folder}, {said}" if said else ""
        assert (found.sampling, found.describe_sampling()) == (settings, line)
    assert settings.items() <= sampling(**settings).model_dump().items()


def test_adapters_with_a_tokenizer_end_and_sample_as_their_base(tmp_path):
    """Trainers with peft save the tokenizer beside the adapters, but not generation_config.json."""
    settings = {"eos_token_id": [293, 295], "do_sample": True, "temperature": 0.6}
    folder_of(tmp_path / "their base", generation_config=settings, config={"bos_token_id": 296})
    own, named = {"eos_token": "<b>"}, {"base_model_name_or_path": "../their base"}
    tokenizer = folder_of(tmp_path / "own", tokenizer_config=own, adapter_config=named)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.ends) == (296, 294, {293, 295})
    for name in ("run", "merged"):
        tokenizer.copy_to(tmp_path / name)
    found = tokenizer.export_to(tmp_path / "merged", "llama")
    assert (found["bos_token_id"], found.get("eos_token_id")) == (296, None)
    for name in ("run", "merged"):
        copy = Tokenizer(tmp_path / name)
        assert (copy.eos, copy.ends) == (294, {293, 295})
        assert copy.sampling == tokenizer.sampling == {"temperature": 0.6, "top_k": 50}


@pytest.mark.parametrize("around", [(0, 1), (0,), (1,), ()])
def test_what_surrounds_a_text_is_found_whatever_the_alphabet(around, tmp_path):
    """A tokenizer of DNA knows no "a", so what it puts after a text stood before it."""
    names = ["<s>", "</s>"]
    vocabulary = {name: i for i, name in enumerate([*names, *"ACGT"])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.add_special_tokens(names)
    single = "<s> " * (0 in around) + "$A" + " </s>" * (1 in around)
    library.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(names[i], i) for i in around]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.bos == (0 if 0 in around else None)
    assert tokenizer.eos == (1 if 1 in around else None)
    assert tokenizer.begin == list(around[:1])
    assert tokenizer.finish == ([1] if around == (0, 1) else [])
    assert tokenizer.ends == set(around[-1:])
    begins = "begins with <s>" if 0 in around else "has no first token"
    assert re.match(f"text: {begins}[,;]", tokenizer.describe())


def test_tokens_that_only_the_configuration_has_are_added(tmp_path):
    page = {"pad_token": "<pad>", "eos_token": "<a>", "additional_special_tokens": ["<more>"]}
    tokenizer = folder_of(tmp_path / "a", tokenizer_config=page)
    assert tokenizer.encode("x<pad><more>") == [87, 297, 298]
    assert tokenizer.vocab_size == 299
    tokenizer.check(297, tokenizer.encode("x<a>"))
    with pytest.raises(InputError, match=r"the text has '<pad>' \(id 297\), which is beyond"):
        tokenizer.check(297, tokenizer.encode("x<pad>"))
    with pytest.raises(InputError, match="more than the model's 200"):
        tokenizer.check(200)


def test_a_digest_is_of_the_content(tmp_path):
    tokenizer = Tokenizer(shutil.copytree(FOLDER / "llama3", tmp_path / "a"))
    path = tmp_path / "a" / "tokenizer.json"
    page = json.loads(path.read_text(encoding="utf-8"))
    page["truncation"] = {"max_length": 5, "stride": 0, "strategy": "LongestFirst"}
    page["truncation"]["direction"] = "Right"
    page["model"]["merges"] = [" ".join(pair) for pair in page["model"]["merges"]]
    path.write_text(json.dumps(page, indent=3), encoding="utf-8")
    again = Tokenizer(path)
    assert again.digest == tokenizer.digest
    assert again.encode(HARD) == tokenizer.encode(HARD)
    path.write_text(json.dumps(page | {"pre_tokenizer": None}), encoding="utf-8")
    assert Tokenizer(path).digest != tokenizer.digest


def test_vocab_json_and_merges_txt_are_read_as_gpt2s(tmp_path):
    right = Tokenizer(FOLDER / "gpt2")
    folder = tmp_path / "a"
    folder.mkdir()
    model = json.loads(right.path.read_text(encoding="utf-8"))["model"]
    vocab = model["vocab"] | {"<|endoftext|>": right.eos}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    with pytest.raises(InputError, match="not known to be a GPT2Tokenizer's"):
        Tokenizer(folder)  # as transformers, which needs to know the class
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode(f"{HARD}<|endoftext|>") == right.encode(f"{HARD}<|endoftext|>")
    assert (tokenizer.ends, tokenizer.eos) == ({right.eos}, right.eos)
    tokenizer.copy_to(tmp_path / "run")
    assert Tokenizer(tmp_path / "run").digest == tokenizer.digest
    change_to = {"tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(change_to))
    with pytest.raises(InputError, match=r"not known to be a GPT2.*: Qwen2Tokenizer\)"):
        Tokenizer(folder)


def test_a_gpt2_begins_and_ends_as_its_class_and_its_settings_say(tmp_path):
    """As by transformers 5.24, whose class ends texts unless a file names another token."""
    folder = tmp_path / "a"
    folder.mkdir()
    model = json.loads((FOLDER / "gpt2" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    (folder / "added_tokens.json").write_text(json.dumps({"<p>": 294, "<|endoftext|>": 293}))
    page = dict(tokenizer_class="GPT2Tokenizer", pad_token="<p>", bos_token="<b>")
    page |= dict(add_bos_token=True, add_eos_token=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(page))
    Tokenizer(folder).copy_to(tmp_path / "run")
    for path in (folder, tmp_path / "run"):  # vocab.json, and the tokenizer.json made of it
        tokenizer = Tokenizer(path)
        assert tokenizer.prompt("the<p>") == [295, 83, 256, 294, 293]
        assert (tokenizer.bos, tokenizer.eos, tokenizer.ends) == (295, 293, {293})


SHOWN = "{{ messages[0].content }}"


def test_chat_templates_of_a_list_and_of_files(tmp_path):
    named = lambda **texts: [{"name": name, "template": text} for name, text in texts.items()]
    page = {"chat_template": named(default=f"{SHOWN}{{{{ eos_token }}}}", tool_use=f"{SHOWN}b")}
    page |= {"eos_token": "<a>"}
    tokenizer = folder_of(tmp_path / "a", tokenizer_config=page)
    messages = [{"role": "user", "content": "x", "name": None}]
    assert tokenizer.decode(tokenizer.chat(messages)[0]) == "x<a>"
    assert tokenizer.decode(tokenizer.chat(messages, tools=[])[0]) == "xb"
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0] | tojson }}é{{ date }}")
    filed, right = Tokenizer(tmp_path / "a"), '{"role": "user", "content": "x"}énow'
    assert tokenizer.decode(filed.chat(messages, date="now")[0]) == right
    # As by transformers 5.24, the file takes the place of all templates of the configuration.
    assert tokenizer.decode(filed.chat(messages, date="now", tools=[])[0]) == right
    page = {"chat_template": SHOWN + "{{ bos_token }}{{ eos_token }}", "eos_token": "<a>"}
    one = folder_of(tmp_path / "d", tokenizer_config=page, config={"bos_token_id": 294})
    assert (one.bos, one.decode(one.chat(messages)[0])) == (294, "x<a>")  # it names no bos_token
    tokenizer = folder_of(tmp_path / "b", chat_template={"chat_template": SHOWN + "c"})
    assert tokenizer.decode(tokenizer.chat(messages)[0]) == "xc"
    page = {"chat_template": named(tool_use="b", rag="c")}
    with pytest.raises(InputError, match="chat template named default, only tool_use, rag: put"):
        folder_of(tmp_path / "c", tokenizer_config=page).chat(messages)
    with pytest.raises(InputError, match=r"tools must be a list of objects .*, not \['{}'\]$"):
        tokenizer.chat(messages, tools=["{}"])
    for wrong in ("Hi", messages[0], None, ["Hi"], [messages]):
        with pytest.raises(InputError, match=r"^messages must be a list of objects \(JSON\), not "):
            tokenizer.chat(wrong)
    bad = "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% if %}", "{{ 1 / 0 }}"
    for template in bad:
        (tmp_path / "b" / "chat_template.jinja").write_text(template)
        with pytest.raises(InputError, match="the chat template refuses"):
            Tokenizer(tmp_path / "b").chat(messages)


@pytest.mark.parametrize(
    ("given", "right"),
    [({"reasoning": "x"}, "xx"), ({"thinking": "x"}, "xx"), ({"reasoning_content": "x"}, "xx"),
     ({"thinking": "x", "reasoning_content": "y", "reasoning": "z"}, "yx"),
     ({"thinking": None}, "")],
)  # fmt: skip
def test_thoughts_reach_a_template_by_its_name_for_them(given, right, tmp_path):
    """As by transformers 5.24: data has one name, a template reads another."""
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}" + SHOWN
    page = {"chat_template": template}
    tokenizer = folder_of(tmp_path / "a", tokenizer_config=page)
    message = {"role": "assistant", "content": "a"} | given
    assert tokenizer.rendered([message])[0] == right + "a"


def test_names_that_the_tokenizer_lacks_get_the_ids_that_transformers_gives_them(tmp_path):
    """In the order of its attributes, whatever the order in the file (transformers 5.24)."""
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "a")
    names = dict(
        pad_token="<p>", unk_token="<u>", eos_token="<e>", cls_token="<c>", bos_token="<b>"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = Tokenizer(folder)
    assert list(tokenizer.special) == ["<|endoftext|>", "<b>", "<e>", "<u>", "<p>", "<c>"]
    assert (tokenizer.bos, tokenizer.eos) == (294, 295)


NEW = {"content": "<n>", "lstrip": True, "rstrip": False, "normalized": False}
ADDED = [  # files; ids of "a <n>b<m> quick"; what of it is special (transformers 5.24)
    # added_tokens.json gives the order, whatever else names a token and makes it special.
    ({"tokenizer_config": {"eos_token": "<m>"}, "added_tokens": {"<n>": 295, "<m>": 294}},
     [64, 220, 295, 65, 294, 275], "<m>"),
    ({"tokenizer_config": {"extra_special_tokens": ["<n>"]}, "added_tokens": {"<m>": 9, "<n>": 8}},
     [64, 220, 294, 65, 295, 275], "<n>"),
    # Flags that stand beside a name count, also for a name that the vocabulary has.
    ({"special_tokens_map": {"mask_token": NEW}}, [64, 294, 65, 27, 76, 29, 275], "<n>"),
    ({"special_tokens_map": {"mask_token": NEW | {"content": "quick"}}},
     [64, 220, 27, 77, 29, 65, 27, 76, 29, 294], "quick"),
    # added_tokens_decoder comes in place of the older files, and changes flags.
    ({"tokenizer_config": {"added_tokens_decoder": {"294": NEW}, "image_token": "<n>"},
      "added_tokens": {"<m>": 294}, "special_tokens_map": {"extra_special_tokens": ["<m>"]}},
     [64, 294, 65, 27, 76, 29, 275], "<n>"),
    # A dictionary of extra tokens leaves the list of additional ones in force.
    ({"tokenizer_config": {"extra_special_tokens": {"image_token": "<m>"},
                           "additional_special_tokens": ["<n>"]}},
     [64, 220, 295, 65, 294, 275], "<m><n>"),
    ({"tokenizer_config": {"additional_special_tokens": ["<n>"]},
      "special_tokens_map": {"additional_special_tokens": ["<m>"]}},
     [64, 220, 294, 65, 27, 76, 29, 275], "<n>"),
    ({"tokenizer_config": {"model_specific_special_tokens": {"image_token": "<n>"}}},
     [64, 220, 294, 65, 27, 76, 29, 275], "<n>"),
]  # fmt: skip


@pytest.mark.parametrize(("pages", "ids", "special"), ADDED)
def test_tokens_of_the_files_are_those_of_transformers(pages, ids, special, tmp_path):
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "a")
    for name, content in pages.items():
        page = {"tokenizer_class": "PreTrainedTokenizerFast"} if "config" in name else {}
        (folder / f"{name}.json").write_text(json.dumps(page | content))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a <n>b<m> quick") == ids
    assert "".join(name for name in tokenizer.special if name != "<|endoftext|>") == special


def test_an_id_that_the_tokenizer_lacks_neither_begins_nor_ends_a_text(tmp_path):
    """A small GPT-2 of transformers has the ids of the large one in its config.json."""
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "a")
    page = dict(model_type="gpt2", bos_token_id=50256, eos_token_id=50256)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps(page))
    tokenizer, right = Tokenizer(folder), EXPECTED["families"]["gpt2"]
    assert (tokenizer.bos, tokenizer.eos) == (right["bos"], right["eos"])
    assert tokenizer.ends == {right["eos"]}
    assert tokenizer.begin == [right["eos"]]
    assert "eos_token_id=50256 is beyond the 294 entries, so not used" in tokenizer.describe()


def test_an_unknown_token_alone_neither_begins_nor_ends_a_text(tmp_path):
    model = tokenizers.models.WordLevel({"<u>": 0, "a": 1}, unk_token="<u>")
    folder = built(tmp_path, model=model)
    page = json.loads((folder / "tokenizer.json").read_text())
    page["added_tokens"] = [page["added_tokens"][0] | {"id": 0, "content": "<u>"}]
    for unknown, right in (("<u>", None), ("a", 0)):
        page["model"]["unk_token"] = unknown
        (other := tmp_path / "other.json").write_text(json.dumps(page))
        tokenizer = Tokenizer(other)
        assert (tokenizer.bos, tokenizer.eos) == (right, right)


def test_what_has_a_name_is_special_in_qwens_class(tmp_path):
    """As by transformers 5.24, which drops its flags; other classes keep the file's token."""
    texts = {}
    for kind in ("qwen2", "gpt2"):
        folder = shutil.copytree(FOLDER / kind, tmp_path / kind)
        page = json.loads((folder / "tokenizer_config.json").read_text())
        page["additional_special_tokens"] = ["<tool_call>"]
        token = dict(content="<n>", lstrip=True, rstrip=True, normalized=False)
        (folder / "tokenizer_config.json").write_text(json.dumps(page | {"pad_token": token}))
        tokenizer = Tokenizer(folder)
        texts[kind] = tokenizer.decode(tokenizer.encode("x<tool_call>y <n> z"), special=False)
    assert texts == {"qwen2": "xy  z", "gpt2": "xyz"}
