"""Reads a folder's tokenizer and what the files beside it say about its tokens.

Hugging Face spreads this over several files; where two disagree, transformers' precedence applies.
A run's folder has the same files, but token_ids.json (`IDS`) in place of config.json.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxllm.errors import InputError
from jaxllm.files import on_hub, read_json, write_whole

TOKENIZER = "tokenizer.json"
IDS = "token_ids.json"  # config.json's keys about tokens and sampling
GENERATION = "generation_config.json"
COMPANIONS = (
    "tokenizer_config.json special_tokens_map.json added_tokens.json"
    " chat_template.jinja chat_template.json vocab.json merges.txt tokenizer.model tekken.json"
).split()
ADAPTERS = "adapter_config.json"  # peft's
_UNREAD = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")
_REBUILT = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")  # by transformers
ALWAYS = {"qwen2": "Qwen2Tokenizer", "mistral": "PreTrainedTokenizerFast"}  # whatever is named
END_OF_TEXT = "<|endoftext|>"  # GPT-2's, whose vocab.json does not say that it is special; ours


class Pages:
    """The JSON files beside a tokenizer; {} for a missing one."""

    def __init__(self, folder: Path, present: bool = True):
        def read(name: str, folder: Path = folder) -> dict[str, Any]:
            return read_json(folder / name, optional=True) if present else {}

        self.tokenizer = read("tokenizer_config.json")
        listed = "added_tokens_decoder" in self.tokenizer  # in newer folders, instead of these two
        self.specials = {} if listed else read("special_tokens_map.json")
        self.added = {} if listed else read("added_tokens.json")
        model = _of_model(folder) if present else folder
        self.generation = read(GENERATION, model)
        config = read("config.json", model) or read(IDS, model)
        self.config = {key: config[key] for key in config if key in {*_IDS, *APPLIED, *OTHERS}}
        # Without a generation_config.json transformers takes the settings of config.json.
        self.sampling = self.generation if (model / GENERATION).exists() else self.config
        for page, name in ((self.generation, GENERATION), (self.config, "config.json")):
            _check_types(page, model / name)
        self.model = str(config.get("model_type"))
        self.template = _template(folder, self.tokenizer) if present else {}

    def given(self) -> dict[str, str | dict | None]:
        """{bos_token, ...: value}, in the order in which transformers numbers what is missing."""
        page = self.tokenizer | self.specials
        for key in ("extra_special_tokens", "model_specific_special_tokens"):
            page |= extra if isinstance(extra := page.get(key), dict) else {}
        keys = [key for key in (*_NAMES, *page) if isinstance(page.get(key), str | dict | None)]
        return {key: page[key] for key in keys if key in page and key.endswith("_token")}

    def names(self) -> dict[str, str | None]:
        """{bos_token, eos_token, ...: name}."""
        return {key: _name(value) for key, value in self.given().items()}

    def more(self) -> list[str | dict]:
        """Further special tokens."""
        page, old = self.tokenizer, self.specials
        extra, more = page.get("extra_special_tokens") or {}, "additional_special_tokens"
        if isinstance(extra, dict):
            extra = [*extra.values(), *(page.get(more) or old.get(more) or [])]
        return [*extra, *(old.get("extra_special_tokens") or [])]


_NAMES = [f"{name}_token" for name in "bos eos unk sep pad cls mask".split()]
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "model_type", "tokenizer_class")
# transformers' settings that affect a text: those we apply; others, with the value that is off.
APPLIED = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OTHERS = dict(typical_p=1, num_beams=1, guidance_scale=1, max_length=20) | dict.fromkeys(
    """top_h epsilon_cutoff eta_cutoff no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    sequence_bias penalty_alpha exponential_decay_length_penalty dola_layers watermarking_config
    token_healing stop_strings max_new_tokens min_length min_new_tokens max_time
    encoder_repetition_penalty force_words_ids constraints""".split()
)


def _check_types(page: dict[str, Any], path: Path) -> None:
    """Raises InputError for ids and switches that would otherwise have no or a wrong effect."""
    for key in ("bos_token_id", "eos_token_id"):
        if not all(type(i) is int for i in listed(page.get(key))):
            raise InputError(f"{path}: {key}={page[key]!r:.50} must be an id or a list of ids")
    if page.get("do_sample") not in (True, False, None):
        raise InputError(f"{path}: do_sample={page['do_sample']!r:.50} must be true or false")


def listed(value: Any) -> list[Any]:
    """A list unchanged, None as an empty list, any other value as a list of one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _name(value: Any) -> str | None:
    """The name of a token, which may be given as a dictionary of an AddedToken."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _token(value: Any, **flags: bool) -> AddedToken:
    """A token as a file gives it, with other `flags`."""
    given = value if isinstance(value, dict) else {"content": value}
    # pyrefly: ignore[bad-argument-type]
    return AddedToken(**{key: given[key] for key in given if key != "__type"} | flags)


def _template(folder: Path, page: dict[str, Any]) -> dict[str, str]:
    """{name: chat template}; where files hold templates, tokenizer_config.json's do not count."""
    found, more = {}, sorted(folder.glob("additional_chat_templates/*.jinja"))
    for path in filter(os.path.lexists, (folder / "chat_template.jinja", *more)):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as a chat template: {error}") from error
        found["default" if path.parent == folder else path.stem] = text
    given = found or page.get("chat_template")
    given = given or read_json(folder / "chat_template.json", optional=True).get("chat_template")
    if isinstance(given, list):
        given = {x.get("name"): x.get("template") for x in given if isinstance(x, dict)}
    given = given if isinstance(given, dict) else {"default": given}
    return {str(name): text for name, text in given.items() if isinstance(text, str)}


def present(folder: Path) -> bool:
    """Whether a folder holds a tokenizer, even one that cannot be read."""
    return any((folder / name).exists() for name in (TOKENIZER, *_UNREAD))


def _of_model(folder: Path) -> Path:
    """The folder with the model's files: the base's, if a folder of peft's adapters has none."""
    own = any((folder / name).exists() for name in (GENERATION, "config.json", IDS))
    base = read_json(folder / ADAPTERS, optional=True).get("base_model_name_or_path")
    return (isinstance(base, str) and not own and find_base(folder, base)) or folder


def find_base(folder: Path, name: str) -> Path | None:
    """The folder of the base that adapters in `folder` name; None if there is none."""
    return next((x for x in (Path(name).expanduser(), folder / name) if x.is_dir()), None)


def open_library(path: Path, pages: Pages) -> tokenizers.Tokenizer:
    """Opens a tokenizer.json, or vocab.json and merges.txt; raises InputError."""
    folder = path.parent
    fixes = {"split_special_tokens": "remove it"}
    if "istral" in pages.model:  # transformers replaces the regex of such a tokenizer.json
        fixes["fix_mistral_regex"] = "save the tokenizer with transformers 5, then remove it"
    for key in fixes.keys() & {key for key, value in pages.tokenizer.items() if value}:
        raise InputError(f"{folder}: {key}=true is not supported; {fixes[key]}")
    library = _read(path, pages)
    if dropout := getattr(library.model, "dropout", None):
        raise InputError(f"{path}: dropout={dropout:g} makes ids random; set it to null there")
    if post := library.post_processor:
        _check_template(json.loads(post.__getstate__()), path)
    if (kind := class_of(pages)) in _REBUILT:  # the setting overrides the file's
        spaced = bool(pages.tokenizer.get("add_prefix_space"))
        if spaced and kind in _REBUILT[:2]:  # only before the text, not before each digit, too
            library.pre_tokenizer = pre_tokenizers.ByteLevel()
        before = library.pre_tokenizer
        for part in before if isinstance(before, pre_tokenizers.Sequence) else [before]:
            if isinstance(part, pre_tokenizers.ByteLevel):
                part.add_prefix_space = spaced
    if kind in _REBUILT[:2] and END_OF_TEXT in library.get_vocab() | pages.added:
        names = ("bos_token", "eos_token", "unk_token")
        pages.tokenizer = dict.fromkeys(names, END_OF_TEXT) | pages.tokenizer
    library.no_truncation()  # the file may store one, which would cut documents short
    library.no_padding()
    try:
        _add(library, pages)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder}: the tokens of tokenizer_config.json, special_tokens_map.json or"
            f" added_tokens.json cannot be read: {error}"
        ) from error
    if not path.exists():
        _surround(library, pages)
    return library


def _read(path: Path, pages: Pages) -> tokenizers.Tokenizer:
    """The library's tokenizer of a file, or of the vocab.json and merges.txt in its place."""
    folder = path.parent
    if path.name == TOKENIZER and not path.exists():
        if (folder / "vocab.json").exists():
            return _from_merges(folder, pages)
        if present(folder):
            raise InputError(_how_to_convert(folder))
    try:
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read tokenizer {path}: {error.strerror}{on_hub(path)}") from error
    except Exception as error:  # the library raises plain Exceptions
        fix = "; if it is a pointer of Git LFS, run git lfs pull" * (path.stat().st_size < 1000)
        raise InputError(f"{path} is not a tokenizer.json: {error}{fix}") from error


def _how_to_convert(folder: Path) -> str:
    """A line on how to make a tokenizer.json from another file."""
    name = next(name for name in _UNREAD if (folder / name).exists())
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", (folder / name).read_bytes()):
        return (  # transformers would convert it without special tokens
            f"{folder / name} is tiktoken's, as Meta publishes Llama 3: copy tokenizer.json and"
            " tokenizer_config.json there, which its Hugging Face folder has above original/"
        )
    kind, more = "AutoTokenizer", ""
    if name == "tekken.json":  # from which AutoTokenizer would write a tekken.json again
        more = ", bos_token='<s>', eos_token='</s>', add_bos_token=True"
        kind = "PreTrainedTokenizerFast"
    return (
        f'{folder} has {name}, but no tokenizer.json; run in that folder: python -c "from'
        f" transformers import {kind} as A; A.from_pretrained('.'{more}).save_pretrained('.')\""
    )


def _check_template(post: dict[str, Any], path: Path) -> None:
    """Raises InputError for a post-processor on which the library would panic."""
    for part in post.get("processors", ()):
        _check_template(part, path)
    used = {token["id"] for piece in post.get("single", ()) for token in piece.values()}
    if lacks := used - {"A", *post.get("special_tokens", ())}:
        raise InputError(f"{path}: its post_processor names {min(lacks)}, which it does not define")


def class_of(pages: Pages) -> str | None:
    """The class that transformers takes for a tokenizer; None: it depends on the model's type."""
    if pages.model in ALWAYS:
        return ALWAYS[pages.model]
    usual = {"gpt2": "GPT2Tokenizer", "xlstm": "GPTNeoXTokenizer"}
    named = pages.tokenizer.get("tokenizer_class") or pages.config.get("tokenizer_class")
    named = named or usual.get(pages.model) or "Qwen2Tokenizer" * pages.model.startswith("qwen")
    return str(named).removesuffix("Fast") or None


def _from_merges(folder: Path, pages: Pages) -> tokenizers.Tokenizer:
    """GPT-2's form: bytes as visible characters, and its own regex."""
    if (kind := class_of(pages)) != "GPT2Tokenizer":
        raise InputError(
            f"{folder} has no tokenizer.json, and its vocab.json is not known to be a"
            f" GPT2Tokenizer's (tokenizer_class in tokenizer_config.json: {kind}); if it is, name"
            " that class there, else write a tokenizer.json with transformers' save_pretrained"
        )
    files = folder / "vocab.json", folder / "merges.txt"
    try:
        library = tokenizers.Tokenizer(models.BPE.from_file(*map(str, files)))
    except Exception as error:
        raise InputError(f"{files[0]} and {files[1].name} cannot be read: {error}") from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _surround(library: tokenizers.Tokenizer, pages: Pages) -> None:
    """Makes texts begin and end with the tokens that tokenizer_config.json names."""
    added = {x: pages.tokenizer.get(f"add_{x}_token") for x in ("bos", "eos")}
    bos, eos = (pages.names().get(f"{x}_token") if added[x] else None for x in added)
    single = [name for name in (bos, "$A", eos) if name]
    ids = [(name, library.token_to_id(name)) for name in {bos, eos} if name]
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _add(library: tokenizers.Tokenizer, pages: Pages) -> None:
    """Adds the tokens that only the files beside the tokenizer have, as transformers does.

    The flags in these files count, and a token that has a name such as eos_token is special.
    """
    known = library.get_added_tokens_decoder()
    named = [_token(value, special=True) for value in pages.given().values() if _name(value)]
    more = [_token(value, special=True) for value in pages.more() if _name(value)]
    if (decoder := pages.tokenizer.get("added_tokens_decoder")) is not None:
        found = {int(i): _token(token) for i, token in decoder.items()}
    else:
        specials = {token.content for token in named + more}
        found = {i: _token(name, special=name in specials) for name, i in pages.added.items()}
        found |= known
    new, names = [found[i] for i in sorted(found)], {token.content for token in named}
    for token in new:
        token.special |= token.content in names
    present = {token.content for token in [*known.values(), *new]}
    library.add_tokens([*new, *(token for token in named + more if token.content not in present)])
    if class_of(pages) == "Qwen2Tokenizer":  # transformers makes all its named tokens special
        library.add_tokens([AddedToken(x.content, special=True) for x in named + more])


def ids(value: int | list[int] | None) -> list[int]:
    """The ids of eos_token_id; a negative one means that there is none."""
    return [i for i in listed(value) if i >= 0]


def beside(folder: Path) -> list[str]:
    """Names of the files in which a folder describes its text, except the tokenizer.json."""
    more = [f"{x.parent.name}/{x.name}" for x in folder.glob("additional_chat_templates/*")]
    return [x for x in (*COMPANIONS, GENERATION, IDS, *sorted(more)) if (folder / x).is_file()]


def companions(source: Path) -> dict[str, bytes]:
    """The files in which a folder describes its text, except the tokenizer.json."""
    paths = {GENERATION: _of_model(source) / GENERATION} | {x: source / x for x in beside(source)}
    found = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    config = Pages(source).config
    return found | ({IDS: json.dumps(config).encode()} if config else {})


def write_text(found: dict[str, bytes], target: Path) -> None:
    """Writes a tokenizer.json and `companions`; raises InputError if it would replace others."""
    for path in (target / name for name in (TOKENIZER, *beside(target)) if name != IDS):
        if path.exists() and path.read_bytes() != found.get(str(path.relative_to(target))):
            raise InputError(f"{path} is of another tokenizer: delete it, or name another folder")
    for name, content in found.items():
        (target / name).parent.mkdir(exist_ok=True)
        write_whole(target / name, content)


def take_ids(folder: Path) -> dict[str, Any]:
    """The token ids for a config.json in place of token_ids.json, which is removed."""
    found = read_json(folder / IDS, optional=True)
    found.pop("model_type", None)
    (folder / IDS).unlink(missing_ok=True)
    return found
