"""What a folder says about its model's text; data, training, inference and conversion ask it."""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import ByteLevelBPETokenizer, models

from jaxllm.errors import InputError
from jaxllm.files import write_json, write_whole
from jaxllm.text import files
from jaxllm.text.chat import render

_CONTEXT = 16  # characters before a cut that are encoded again with what follows
AROUND = 512  # characters on each side of a cut that are encoded to test it
# The setting that removes spaces before punctuation; a BPE needs the second one, too.
_CLEANS, _FOR_BPE = "clean_up_tokenization_spaces", "_for_bpe_even_though_it_will_corrupt_output"
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_UNRELATED = ("post_processor", "truncation", "padding", "version")  # do not affect ids


class Tokenizer:
    """A tokenizer.json with the files beside it, or a folder of them, as transformers reads them.

    path: a folder or a file.  If a file is not named tokenizer.json, none is read beside it.
    end_token: the name of a token that ends documents, the option data.end_token.
    entries: the model's vocabulary size; `prompt`, `encode` and `chat` refuse ids beyond it.

    vocab_size: largest id + 1.
    bos, eos: the tokens that the files name as the first and the last of a text.
    ends: ids that end a text; empty if nothing names one.
    begin, finish: the ids around a document in training; `begin` is what a prompt begins with,
        or else the end of the document before, as in llm.c's shards; separator: its first, if any.
    special: {name: id} of the special tokens.
    chat_templates: {name: template}.
    """

    def __init__(
        self, path: str | Path, *, end_token: str | None = None, entries: int | None = None
    ):
        path = Path(path).expanduser()
        self.path = path / files.TOKENIZER if path.is_dir() else path
        self.folder = self.path.parent
        self._pages = pages = files.Pages(self.folder, self.path.name == files.TOKENIZER)
        self._library = library = files.open_library(self.path, pages)
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = library.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        names = sorted(filter(None, self.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.chat_templates = pages.template
        byte = re.compile("<0x[0-9A-F]{2}>")
        self.byte_tokens = frozenset(i for name, i in vocabulary.items() if byte.fullmatch(name))

        of_bpe = _FOR_BPE * isinstance(library.model, models.BPE)
        self.cleans = all(map(pages.tokenizer.get, {_CLEANS, _CLEANS + of_bpe}))

        self._beyond: set[str] = set()  # ids that the files name, beyond the vocabulary
        before, after = self._around(vocabulary)
        if (largest := max([*before, *after], default=0)) >= self.vocab_size:
            raise InputError(
                f"{self.path}: its post_processor puts id {largest} around a text, which is beyond"
                f" its {self.vocab_size} entries"
            )
        unknown = getattr(library.model, "unk_token", pages.names().get("unk_token"))
        only = [*self.special.values()] * (len(self.special) == 1 and unknown not in self.special)
        self.bos, self.eos = self._named("bos", before or only), self._named("eos", after or only)
        end = None if end_token is None else vocabulary.get(end_token)
        if end_token is not None and end is None:
            raise InputError(f"data.end_token={end_token} is not a token of {self.path}")
        last = files.listed(self.eos if end is None else end)
        self.begin: list[int] = before or last or files.listed(self.bos)
        self.separator = self.begin[0] if self.begin else None
        self.finish: list[int] = (after or last) if before and last != before else []
        stated = self._stated(pages.generation, "eos") or self._stated(pages.config, "eos")
        stated = stated or files.listed(self.eos) or self.begin[:1]
        self.ends = frozenset(stated + files.listed(end))
        self._before, self._entries = before, entries
        self._checked([])

    @functools.cached_property
    def chat_ends(self) -> frozenset[int]:
        """The ids that end an answer: also eos, and what the chat template puts after one."""
        said = [{"role": role, "content": f"{role}."} for role in ("user", "assistant")]
        ends = self.ends.union(files.listed(self.eos))
        with contextlib.suppress(InputError):
            after = self.rendered(said, answer=False)[0].rpartition("assistant.")[2].strip()
            ends |= {i for name, i in self.special.items() if name and after.startswith(name)}
        return ends

    def _around(self, vocabulary: Iterable[str]) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text that has tokens."""
        for text in ("a", *vocabulary):
            found = self._encoded(text, around=True)
            if 0 in (of_text := found.sequence_ids):
                end = len(of_text) - of_text[::-1].index(0)
                return found.ids[: of_text.index(0)], found.ids[end:]
        return [], []

    def _named(self, kind: str, otherwise: list[int]) -> int | None:
        """The id of the tokenizer's bos or eos token.

        A name, even null, takes precedence over the ids of config.json, and these over `otherwise`:
        what the post-processor adds, or the only special token.
        """
        if f"{kind}_token" in (names := self._pages.names()):
            name = names[f"{kind}_token"]
            return None if name is None else self._library.token_to_id(name)
        found = self._stated(self._pages.config, kind) or otherwise
        return found[0] if found else None

    def _stated(self, page: dict[str, Any], kind: str) -> list[int]:
        """The ids in a file that the tokenizer has; a config.json may hold its class's defaults."""
        ids = files.ids(page.get(key := f"{kind}_token_id"))
        self._beyond |= {f"{key}={i}" for i in ids if i >= self.vocab_size}
        return [i for i in ids if i < self.vocab_size]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all that a text's ids depend on, independent of the file's formatting."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def _content(self, *without: str) -> dict[str, Any]:
        page = json.loads(self._library.to_str())
        return {key: page[key] for key in page if key not in (*_UNRELATED, *without)}

    def describe(self, ends: Iterable[int] | None = None) -> str:
        """What begins and ends a text, in a line; ends: other ids that end it, as `chat_ends`."""
        stops = sorted(self.ends if ends is None else ends)
        before, names = (list(map(self._name, x)) for x in (self._before, stops))
        begins = f"text: begins with {' '.join(before)}" if before else "text: has no first token"
        if self._beyond:
            beyond = ", ".join(sorted(self._beyond))
            begins += f" ({beyond} is beyond the {self.vocab_size} entries, so not used)"
        if names:
            return f"{begins}, ends at {' or '.join(names)}"
        fix = "names a token that ends it: data.end_token or --stop can"
        return f"{begins}; no file beside {self.path} {fix}"

    @functools.cached_property
    def sampling(self) -> dict[str, Any]:
        """The folder's settings of `Sampling`; do_sample=true alone is temperature 1, top_k 50."""
        page = self._pages.sampling
        used = {key: page[key] for key in files.APPLIED if page.get(key) is not None}
        if (samples := used.pop("do_sample", None)) is None:
            return used
        return {"temperature": 1.0, "top_k": 50} | used if samples else used | {"temperature": 0.0}

    def describe_sampling(self) -> str:
        """A line about all settings of sampling that the folder names; empty if it names none."""
        page, off = self._pages.sampling, (None, 0, [], {})
        rest = {k: page[k] for k, x in files.OTHERS.items() if page.get(k) not in (x, *off)}
        unused = "not applied, remove them to silence this"
        parts = {"applied by default": self.sampling, unused: rest}
        named = lambda part: ", ".join(f"{key}={value!r:.50}" for key, value in part.items())
        said = [f"{how}: {named(part)}" for how, part in parts.items() if part]
        return f"settings of {self.folder}, {'; '.join(said)}" if said else ""

    def documents(self) -> str:
        """What stands around a document in training, in a line."""
        if not self.begin:
            why = f"no file beside {self.path} names one; set data.end_token"
            return f"documents follow each other without a token between them: {why}"
        begin, finish = (" ".join(map(self._name, x)) for x in (self.begin, self.finish))
        return f"each document begins with {begin}" + f" and ends with {finish}" * bool(finish)

    def _name(self, i: int) -> str:
        return self._library.id_to_token(i) or f"id {i}"

    def encode(self, text: str) -> list[int]:
        """The ids of a text, in which the names of special tokens are these tokens."""
        return self._checked(self._ids(text, True))

    def prompt(self, text: str) -> list[int]:
        """The ids of a text with those that the post-processor adds."""
        return self._checked(self._encoded(text, around=True).ids)

    def encode_parts(
        self, parts: Sequence[tuple[str, str]], *, special: bool = False
    ) -> list[np.ndarray]:
        """The ids of each (text before, text), where it follows the text before; uses all cores."""
        texts = [before[-_CONTEXT:] + text for before, text in parts]
        found = self._encoded(texts, self._library.encode_batch_fast, special=special)
        skip = [len(self._ids(before[-_CONTEXT:], special)) if before else 0 for before, _ in parts]
        return [np.asarray(x.ids[n:], np.uint32) for x, n in zip(found, skip, strict=True)]

    def can_cut(self, left: str, right: str, *, special: bool = False) -> bool:
        """Whether `encode_parts` gives the ids of left + right, tested on the text at the cut."""
        left, right = left[-AROUND:], right[:AROUND]
        context, ids = left[-_CONTEXT:], functools.partial(self._ids, special=special)
        before, after = ids(context), ids(context + right)
        whole = ids(left) + after[len(before) :]
        return after[: len(before)] == before and ids(left + right) == whole

    def _ids(self, text: str, special: bool) -> list[int]:
        return self._encoded(text, special=special).ids

    def _encoded(self, text, encode: Any = None, *, special=True, around=False) -> Any:
        """The result of `encode`, or of another method of the library, for one text or several.

        special: whether special tokens' names become these; around: with the post-processor's ids.
        """
        self._library.encode_special_tokens = not special
        try:
            return (encode or self._library.encode)(text, add_special_tokens=around)
        except TypeError as error:
            raise InputError(f"{text!r:.50} is not one text in UTF-8") from error
        except Exception as error:
            if type(error) is not Exception:  # such as for a Unigram without a character and unk_id
                raise
            raise InputError(f"{self.path}: {error}") from error

    def count_special(self, text: str) -> int:
        """How many names of special tokens a text has."""
        return len(self._names.findall(text))

    def decode(self, ids: Iterable[int], *, special: bool = True, clean: bool = True) -> str:
        """The text of ids; special: with the names of special tokens; clean: as `cleaned` does."""
        ids = [int(i) for i in ids]
        if odd := [i for i in ids if not 0 <= i < 2**32]:
            raise InputError(f"id {odd[0]} is no token: ids are from 0 to {self.vocab_size - 1}")
        text = self._library.decode(ids, skip_special_tokens=not special)
        return self.cleaned(text) if clean else text

    def cleaned(self, text: str) -> str:
        """A text without spaces before punctuation, if the files ask for it (`cleans`)."""
        for spaced in _SPACED if self.cleans else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
        """The ids of a conversation by the chat template, and a mask of the assistant's tokens.

        options: as in `rendered`.
        The mask needs a template with {% generation %}, else it is all 0.  Raises InputError.
        """
        ((ids, mask),) = self.encode_rendered([self.rendered(messages, **options)])
        return self._checked(ids.tolist()), mask.astype(int).tolist()

    def rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        answer: bool = True,
        whole: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation by the chat template, and its spans of {% generation %}.

        answer: whether the assistant's next message follows (add_generation_prompt).
        whole: whether no messages follow.  Only then is it checked that the template shows all.
        variables, chat_template_kwargs: for the template, such as date_string.
        """
        if not isinstance(more := chat_template_kwargs or {}, dict):
            raise InputError(f"chat_template_kwargs={more!r:.50} must be an object with keys")
        if variables.get("continue_final_message"):
            raise InputError("continue_final_message is not supported: an answer is a new message")
        options = self.chat_names | more | {"add_generation_prompt": answer, "tools": tools}
        return render(self.chat_template(tools), messages, options | variables, whole)

    def chat_template(self, tools: list[dict[str, Any]] | None = None) -> str:
        """The template of a conversation with or without tools; raises InputError without one."""
        templates = self.chat_templates
        kind = "tool_use" if tools is not None and "tool_use" in templates else "default"
        if kind not in templates:
            named = f" named default, only {', '.join(templates)}" * bool(templates)
            fix = "put a chat_template.jinja there"
            raise InputError(f"{self.folder} has no chat template{named}: {fix}")
        return templates[kind]

    def encode_rendered(
        self, rendered: Sequence[tuple[str, list[tuple[int, int]]]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each (text, spans): the ids, and whether each token overlaps a span; on all cores."""
        texts, pairs = [text for text, _ in rendered], []
        found = self._encoded(texts, self._library.encode_batch)
        for encoding, (_, spans) in zip(found, rendered, strict=True):
            begins, ends = np.array(encoding.offsets, int).reshape(-1, 2).T
            mask = np.zeros(len(begins), bool)
            for start, end in spans:
                mask |= (begins < end) & (ends > start)
            pairs.append((np.array(encoding.ids, np.uint32), mask))
        return pairs

    @functools.cached_property
    def chat_names(self) -> dict[str, str]:
        """The names of tokens that a chat template may ask for, such as bos_token."""
        if names := self._pages.names():
            return {key: name for key, name in names.items() if name is not None}
        return self._bos_and_eos()

    def _bos_and_eos(self, end: int | None = None) -> dict[str, str]:
        tokens = {"bos_token": self.bos, "eos_token": end if self.eos is None else self.eos}
        return {key: self._name(i) for key, i in tokens.items() if i is not None}

    def _checked(self, ids: list[int]) -> list[int]:
        if self._entries is not None:
            self.check(self._entries, ids)
        return ids

    def check(self, vocab_size: int, ids: Iterable[int] = ()) -> int:
        """Raises InputError if this cannot be the tokenizer of a model of `vocab_size` entries.

        A few tokens may be beyond it, as long as no text has them.  ids: of a text.
        Returns the bound of the ids.
        """
        if self.vocab_size - vocab_size > vocab_size // 10:
            raise InputError(
                f"{self.path} has {self.vocab_size} entries, more than the model's {vocab_size}"
                " (model.vocab_size): name its own, or raise model.vocab_size of a new model"
            )
        if (beyond := max(ids, default=0)) >= vocab_size:
            raise InputError(
                f"the text has {self._library.id_to_token(int(beyond))!r} (id {beyond}), which is"
                f" beyond the model's {vocab_size} entries: leave it out, or raise model.vocab_size"
            )
        return min(self.vocab_size, vocab_size)

    def check_same(self, other: "Tokenizer", *, chats: bool = False) -> None:
        """Raises InputError unless the other tokenizer's ids mean the same text here.

        This tokenizer may have further tokens, such as those that only files beside it name.
        chats: whether the chat template, if the other has one, must be the same, too.
        """
        mine, theirs = (t._content("added_tokens") for t in (self, other))
        known, used = (t._library.get_vocab(with_added_tokens=True) for t in (self, other))
        if mine != theirs or not used.items() <= known.items():
            raise InputError(
                f"{other.path} differs from {self.path}: their ids do not mean the same text;"
                " encode all data with the model's tokenizer"
            )
        if chats and other.chat_templates not in ({}, self.chat_templates):
            raise InputError(
                f"{other.folder} has another chat template than {self.folder}, which is used: copy"
                " it there, or leave out data.tokenizer"
            )

    def copy_to(self, folder: Path) -> None:
        """Writes the tokenizer.json and its companions, for a run; raises InputError."""
        folder.mkdir(parents=True, exist_ok=True)
        made = not self.path.exists()  # from vocab.json and merges.txt
        whole = self._library.to_str(pretty=True).encode() if made else self.path.read_bytes()
        own = files.companions(self.folder) if self.path.name == files.TOKENIZER else {}
        files.write_text({files.TOKENIZER: whole} | own, folder)

    def export_to(self, folder: Path, model: str) -> dict[str, Any]:
        """Completes a copy for transformers; returns the token ids for its config.json.

        Keeps what the folder said.  Adds an end that the folder did not name, such as
        data.end_token, where transformers looks for it, and a class if `model` implies another.
        """
        found, page = files.take_ids(folder), self._pages.generation
        generates = files.ids(page.get("eos_token_id"))
        named = generates or files.ids(found.get("eos_token_id"))
        if (ends := named + sorted(self.ends - set(named))) != named:
            value = ends[0] if len(ends) == 1 else ends
            if generates:
                write_json(folder / files.GENERATION, page | {"eos_token_id": value})
            else:
                found["eos_token_id"] = value
        found.setdefault("bos_token_id", self.bos)
        path, pages = folder / "tokenizer_config.json", self._pages
        # PreTrainedTokenizerFast reads tokenizer.json as it is.
        named = {"tokenizer_class": files.class_of(pages) or "PreTrainedTokenizerFast"}
        if not path.exists():
            page = self._bos_and_eos(next(iter(ends), None)) | named
            write_json(path, page | {"clean_up_tokenization_spaces": False})  # keeps spaces
        elif pages.model in files.ALWAYS and pages.model != model:
            write_json(path, pages.tokenizer | named)
        elif pages.model != model and "tokenizer_class" not in {*pages.config, *pages.tokenizer}:
            write_json(path, named | pages.tokenizer)
        return found


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE like GPT-2's, which encodes any byte, and saves its tokenizer.json.

    A small text may yield fewer than `vocab_size` entries. The end-of-text token has id 0.
    """
    library = ByteLevelBPETokenizer()
    options = dict(min_frequency=0, show_progress=False, special_tokens=[files.END_OF_TEXT])
    library.train_from_iterator(texts, vocab_size, **options)
    # The library's `save` raises a plain Exception on a full disk.
    write_whole(path, library.to_str(pretty=True).encode())
