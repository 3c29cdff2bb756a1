"""The tokenizers of fixtures/text and what transformers makes of them (make_text.py)."""

import json
import shutil

import tokenizers
from conversations import FOLDER

EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
HARD = EXPECTED["HARD"]
FAMILIES = list(EXPECTED["families"])


def built(folder, name="gpt2", added=(), **parts):
    """The tokenizer of a family with other parts and `added` tokens."""
    path = shutil.copytree(FOLDER / name, folder / "changed", dirs_exist_ok=True) / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    for key, part in parts.items():
        setattr(library, key, part)
    library.add_tokens(list(added))
    library.save(str(path))
    return path.parent
