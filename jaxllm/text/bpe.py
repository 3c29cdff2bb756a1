"""Trains a byte-level BPE."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from jaxllm.files import write_whole
from jaxllm.text.files import END_OF_TEXT


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE like GPT-2's, which encodes any byte, and saves its tokenizer.json.

    A small text may yield fewer than `vocab_size` entries. The end-of-text token has id 0.
    """
    library = ByteLevelBPETokenizer()
    options = dict(min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT])
    library.train_from_iterator(texts, vocab_size, **options)
    # The library's `save` raises a plain Exception on a full disk.
    write_whole(path, library.to_str(pretty=True).encode())
