"""Text <-> token ids: any tokenizer.json of the `tokenizers` library, or a BPE trained here."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxllm.config import LARGEST_BPE, SMALLEST_BPE
from jaxllm.errors import InputError

END_OF_TEXT = "<|endoftext|>"
# What separates documents in the tokenizers one meets: GPT-2 and ours; Llama 3 (which, like
# llm.c's shards, begins each document with it); others.
_SEPARATORS = (END_OF_TEXT, "<|begin_of_text|>", "<|end_of_text|>", "</s>", "<eos>")
_ENDS = (*_SEPARATORS, "<|eot_id|>")  # also Llama 3's end of an answer


class Tokenizer:
    """A tokenizer.json. Text is always only text: names of special tokens in it stay words.

    Attributes: `vocab_size` (largest id + 1), `end_of_text` (id of the token that begins every
    document, and so separates them), `ends` (ids of all tokens that end a text), `prefix` (the
    id, if any, that the file itself puts before every text: Llama 3's <|begin_of_text|>, of GPT-2
    none), `digest` (SHA-256 of the file).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read tokenizer {path}: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"{path} is no tokenizer.json: {error}") from error
        # A tokenizer.json may carry its last user's truncation, which would cut documents short.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.digest = hashlib.sha256(content).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        separator = next((name for name in _SEPARATORS if name in vocabulary), None)
        if separator is None:
            raise InputError(
                f"{path} has no token that separates documents, expected one of "
                + ", ".join(_SEPARATORS)
            )
        self.end_of_text: int = vocabulary[separator]
        self.ends = frozenset(vocabulary[name] for name in _ENDS if name in vocabulary)
        self.prefix: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids[:1]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without any special token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a text to go on from: behind `prefix`, as the model met its texts."""
        return self.prefix + self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens by their names."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: Path, *, key: str = "data.tokenizer_vocab_size"
) -> None:
    """Trains GPT-2's kind of byte-level BPE, every byte encodable, and saves its tokenizer.json.

    A small text may yield fewer than `vocab_size` entries. The end of text has id 0.
    key: the option's name of `vocab_size`, for the error.
    """
    if not SMALLEST_BPE <= vocab_size <= LARGEST_BPE:
        raise InputError(
            f"{key}={vocab_size} is not from {SMALLEST_BPE} (every byte, and the end of text)"
            f" to {LARGEST_BPE}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    try:  # its own `save` raises Exception on a full disk
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError:
        path.unlink(missing_ok=True)
        raise
