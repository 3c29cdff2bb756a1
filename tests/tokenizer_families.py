"""The tokenizers of fixtures/text and what transformers makes of them (make_text.py)."""

import json
import shutil

import tokenizers
from conversations import FOLDER

from jaxllm.text import Tokenizer

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


def folder_of(path, specials=("<a>", "<b>", "<c>", "<d>"), **pages):
    """A tokenizer.json of GPT-2's bytes and `specials`, and the given files beside it."""
    path.mkdir()
    library = tokenizers.Tokenizer.from_file(str(FOLDER / "gpt2" / "tokenizer.json"))
    library.add_special_tokens(list(specials))
    page = json.loads(library.to_str())
    page["added_tokens"] = page["added_tokens"][1:]  # without <|endoftext|>
    (path / "tokenizer.json").write_text(json.dumps(page), encoding="utf-8")
    for name, content in pages.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer(path)
