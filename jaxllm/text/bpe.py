"""Trains a byte-level BPE."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxllm.files import write_whole
from jaxllm.text.files import END_OF_TEXT


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE like GPT-2's, which encodes any byte, and saves its tokenizer.json.

    A small text may yield fewer than `vocab_size` entries. The end-of-text token has id 0.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],  # the only one, so it begins and ends texts
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The library's `save` raises a plain Exception on a full disk.
    write_whole(path, tokenizer.to_str(pretty=True).encode())
