"""The script that times generation, on tiny models."""

import re

import generation_speed
import pytest
from cases import slow
from tiny_models import tiny

from jaxllm import config as configs
from jaxllm.infer import decode

PACKED = ["--quantize", "int4", "--group", "32"]


@pytest.mark.parametrize("options", [slow([]), slow(PACKED), [*PACKED, "--head", "int8"]])
def test_it_times_our_generation(capsys, monkeypatch, options):
    run = configs.load("llama3_small")
    model = tiny("llama3", d_model=64, max_seq_len=64, compute_dtype="bfloat16")
    monkeypatch.setattr(configs, "load", lambda _: run.model_copy(update={"model": model}))
    monkeypatch.setattr(decode, "block_size", lambda: 8)  # a GPU's is 32
    command = ["llama3_small", "--rows", "2", "--prompt", "8", "--tokens", "16", *options]
    assert generation_speed.main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"   2 rows  prompts [\d.]+ ms +[\d.]+ ms a token +[\d,]+ tokens/s", out)


def test_prompts_of_transformers_end_at_the_right():
    ids, mask = generation_speed.padded_left([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(SystemExit, match="--prompt=128 and --tokens=2000 exceed"):
        generation_speed.main(["gpt2_small", "--tokens", "2000"])
