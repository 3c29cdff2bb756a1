"""Conversations, and folders of tokenizers with a chat template, with which tests train."""

import json
import shutil
from pathlib import Path

import data_settings
import numpy as np

from jaxllm.config import DataConfig

FOLDER = Path(__file__).parent / "fixtures" / "text"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}"
    "{% endif %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>\n"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
FORGETS = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.revindex < 3 else 'so' }}")
T = 48  # tokens of a row
WORDS = "cat dog fox sat ran the quick brown lazy".split()


def with_template(folder, template, name="llama3"):
    """The folder of a tokenizer with another template; None: with none."""
    shutil.copytree(FOLDER / name, folder)
    page = json.loads((folder / "tokenizer_config.json").read_text())
    page.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(page))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def pair(asked, said):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def write(path, lines):
    path.write_text("".join(f"{json.dumps(x) if isinstance(x, dict) else x}\n" for x in lines))
    return path


def talks(count, seed=0):
    """Conversations of one to three turns of 1 to 6 words."""
    rng = np.random.default_rng(seed)
    words = lambda: " ".join(rng.choice(WORDS, rng.integers(1, 7)))
    turns = lambda: pair(words(), words())
    return [{"messages": sum((turns() for _ in range(n)), [])} for n in rng.integers(1, 4, count)]


def settings(folder):
    """Of data: 40 conversations in `folder`, and a tokenizer with a chat template."""
    with_template(folder / "model", TEMPLATE)
    write(folder / "a.jsonl", talks(40))
    return dict(
        source="chat",
        path=str(folder / "a.jsonl"),
        tokenizer=str(folder / "model"),
        cache_dir=str(folder / "cache"),
    )


def opened(config, seq_len=T, **changes):
    return data_settings.opened(DataConfig(**config | changes), seq_len=seq_len, seed=3)


def rows_of(data):
    return [data.train[i] for i in range(len(data.train))]
