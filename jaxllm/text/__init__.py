"""A model's text: ids and back, what begins and ends a text, special names, chats.

tokenizer.py  a folder's tokenizer and the files beside it; everything else asks it
files.py      which files of a folder say what
chat.py       the chat template
bpe.py        trains a tokenizer of our own
"""

from jaxllm.text.bpe import train_tokenizer
from jaxllm.text.files import present
from jaxllm.text.tokenizer import AROUND, Tokenizer
