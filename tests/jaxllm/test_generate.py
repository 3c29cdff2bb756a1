"""Generation with caches against the full forward pass, and the command on a run's directory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import generate, sample
from jaxllm.config import GPT2Config, Llama3Config, SampleConfig, VLSTMConfig
from jaxllm.models import create

SHAPE = dict(
    vocab_size=250,
    n_layers=2,
    n_heads=2,
    d_model=64,
    max_seq_len=64,
    compute_dtype="float32",
    residual_dtype="float32",
    kernels="xla",
)
MODELS = {
    "gpt2": lambda: GPT2Config(**SHAPE),
    "llama3": lambda: Llama3Config(**SHAPE, n_kv_heads=1, d_ff=128),
    "vlstm": lambda: VLSTMConfig(**SHAPE, d_ff=128, chunk_size=4),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_greedy_rows_of_several_lengths_follow_the_full_forward_pass(name):
    model = create(MODELS[name]())
    graph, params = nnx.split(model, nnx.Param)
    # Weights so large that tokens depend on the whole text, and gates that let it in.
    params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, params)
    if name == "vlstm":
        for block in params["blocks"].values():
            block["vlstm"]["i"]["bias"][...] = jnp.zeros(2)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [100], [249, 3, 17]]
    greedy = SampleConfig(tokens=12, temperature=0.0)
    got = np.stack(list(sample.stream(graph, params, prompts, greedy)), axis=1)
    forward = jax.jit(lambda p, tokens: nnx.merge(graph, p)(tokens)[..., :250])
    text = np.zeros((3, 20), np.int32)
    for row, prompt, answer in zip(text, prompts, got, strict=True):
        row[: len(prompt) + 12] = [*prompt, *answer]
    likeliest = np.asarray(forward(params, text)).argmax(-1)
    for row, prompt, answer in zip(likeliest, prompts, got, strict=True):
        assert row[len(prompt) - 1 : len(prompt) + 11].tolist() == answer.tolist()
    assert len(set(got.ravel().tolist())) > 8


def test_top_p_keeps_the_likeliest_that_reach_it():
    logits = jnp.log(jnp.array([0.1, 0.5, 0.3, 0.1]))
    keys = jax.random.split(jax.random.key(0), 64)
    for top_p, kept in ((0.0, {1}), (0.4, {1}), (0.6, {1, 2}), (1.0, {0, 1, 2, 3})):
        assert {int(sample.choose(logits, k, 1.0, 0, top_p)) for k in keys} == kept


class Letters:
    """A tokenizer of bytes, whose characters may take several tokens."""

    end_of_text = 0

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_text_is_streamed_in_whole_characters_and_ends_before_a_stop_string(capsys):
    text = generate.Text(Letters(), ["ENDE", "!!"], live=True)
    shown = []
    for token in "aéEN ENDEx".encode():
        text.add(token)
        shown.append(capsys.readouterr().out)
    text.finish()
    assert shown == ["a", "", "é", "", "", "EN ", "", "", "", "", ""]
    assert (text.text, text.done, capsys.readouterr().out) == ("aéEN ", True, "")
    text = generate.Text(Letters(), ["ENDE"], live=True)
    for token in [*b"aEN", Letters.end_of_text, *b"b"]:
        text.add(token)
    text.finish()
    assert capsys.readouterr().out == "aEN"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--prompt x", "--checkpoint"),
        ("--checkpoint nowhere --prompt x", "nowhere is neither"),
        ("--checkpoint nowhere --prompts missing.txt", "missing.txt"),
        ("--checkpoint nowhere --prompt x --top_p 1.5", "--top_p=1.5"),
        ("--checkpoint nowhere --prompt x --temperature nan", "--temperature=nan"),
        ("--checkpoint nowhere --prompt x --tokens 0", "--tokens=0"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert generate.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err
