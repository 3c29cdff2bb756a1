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
# Tokens that separate documents: that of GPT-2 and our BPEs; that of Llama 3, which begins each
# document with it, as llm.c's shards do; those of other tokenizers.
_SEPARATORS = (END_OF_TEXT, "<|begin_of_text|>", "<|end_of_text|>", "</s>", "<eos>")
_ENDS = (*_SEPARATORS, "<|eot_id|>")  # the last one ends an answer of Llama 3


class Tokenizer:
    """A tokenizer.json. The names of special tokens in a text are encoded as plain text.

    vocab_size: largest id + 1.
    end_of_text: id of the token that begins, and so separates, documents.
    ends: ids of all tokens that end a text.
    prefix: the id that the file puts before every text, if any (Llama 3's <|begin_of_text|>).
    digest: SHA-256 of the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read tokenizer {path}: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exceptions
            raise InputError(f"{path} is not a tokenizer.json: {error}") from error
        # The file may store a truncation, which would cut documents short.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.digest = hashlib.sha256(content).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        separator = next((name for name in _SEPARATORS if name in vocabulary), None)
        if separator is None:
            raise InputError(
                f"{path} has no token that separates documents; expected one of "
                + ", ".join(_SEPARATORS)
            )
        self.end_of_text: int = vocabulary[separator]
        self.ends = frozenset(vocabulary[name] for name in _ENDS if name in vocabulary)
        self.prefix: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids[:1]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt: `prefix`, which begins every text in training, then text."""
        return self.prefix + self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text; uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with the names of special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: Path, *, key: str = "data.tokenizer_vocab_size"
) -> None:
    """Trains a byte-level BPE like GPT-2's, which encodes any byte, and saves its tokenizer.json.

    A small text may yield fewer than `vocab_size` entries. The end-of-text token has id 0.
    key: the option that holds `vocab_size`, for errors.
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
    try:  # the library's `save` raises a plain Exception on a full disk
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError:
        path.unlink(missing_ok=True)
        raise
