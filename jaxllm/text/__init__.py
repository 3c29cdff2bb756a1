"""A model's text: to ids and back, what begins and ends a text, special tokens, chats.

tokenizer.py  a folder's tokenizer and the files beside it, or one of our own; others ask this file
files.py      which files of a folder say what
chat.py       the chat template
"""

from jaxllm.text.files import present
from jaxllm.text.tokenizer import AROUND, Tokenizer, train_tokenizer

__all__ = ["AROUND", "Tokenizer", "present", "train_tokenizer"]
