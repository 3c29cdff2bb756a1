"""`jaxllm.load`, and what `help` shows of layers and models."""

import inspect
import json
import math
import pydoc
import shutil
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from huggingface_folders import FIXTURES, folder_of
from loaded_models import logits

import jaxllm
import jaxllm.layers
from jaxllm.errors import InputError, RunError
from jaxllm.infer import generate
from jaxllm.layers import Attention, Linear
from jaxllm.models import MODELS
from jaxllm.weights import convert
from jaxllm.weights.pretrained import open_weights


@pytest.mark.parametrize("name", [slow("gpt2"), "llama3"])
def test_a_folder_and_a_run_generate_and_score(tmp_path, name, capsys):
    theirs = folder_of(tmp_path / "theirs", name)
    shutil.copyfile(FIXTURES / "evaluation" / "tokenizer.json", theirs / "tokenizer.json")
    assert convert.main([str(theirs), str(tmp_path / "run")]) == 0
    text, found = "abcab", []
    capsys.readouterr()
    for folder in (theirs, tmp_path / "run"):
        loaded = jaxllm.load(folder)
        model, tokenizer, config = loaded
        assert config.type == name
        ids = tokenizer.prompt(text)
        z = jax.nn.log_softmax(jnp.asarray(logits(folder, [ids[:-1]])[0]))
        expected = sum(float(z[i, token]) for i, token in enumerate(ids[1:]))
        assert math.isclose(loaded.score(text), expected, rel_tol=0.01)
        assert model(jnp.array([ids])).shape[:2] == (1, len(ids))
        found.append(loaded.generate(text, tokens=6, temperature=0))
        words = f"--checkpoint {folder} --prompt {text} --tokens 6 --temperature 0"
        assert generate.main(words.split()) == 0
        assert capsys.readouterr().out == f"{text}{found[-1]}\n"
    assert found[0] == found[1] != ""
    model.blocks[0].mlp.calls = nnx.Variable(jnp.int32(0))  # of a user's; JAX had no place for it
    assert loaded.generate(text, tokens=6, temperature=0) == found[0]
    assert math.isclose(loaded.score(text), expected, rel_tol=0.01)
    page = tmp_path / "run" / "config.yaml"
    assert open_weights(page.parent, 0.0).step == 0
    with pytest.raises(InputError, match="holds no checkpoint of step '0'; it has 0$"):
        open_weights(page.parent, "0")
    content = page.read_text()
    page.write_text(content.replace("compute_dtype: bfloat16", "compute_dtype: float32"))
    assert jaxllm.load(page.parent).config.compute_dtype == "float32"
    page.write_text(content.replace("norm_eps: 1.0e-05", "norm_eps: 1.0e-04"))
    with pytest.raises(
        InputError, match=r"model\.norm_eps=0\.0001 in .*yaml differs from 1e-05 of"
    ):
        jaxllm.load(page.parent)
    page.write_text(content)
    tokens = page.with_name("tokenizer.json")
    read = json.loads(tokens.read_text())
    tokens.write_text(json.dumps(read, indent=4))
    open_weights(page.parent)  # only its form changed
    tokens.write_text(json.dumps(read | {"pre_tokenizer": None}))
    with pytest.raises(
        InputError, match=r"tokenizer\.json was changed since .*; copy back the one"
    ):
        open_weights(page.parent)


def test_texts_and_options_that_do_not_fit_are_one_line(tmp_path):
    theirs = folder_of(tmp_path / "theirs", "llama3")
    shutil.copyfile(FIXTURES / "evaluation" / "tokenizer.json", theirs / "tokenizer.json")
    loaded = jaxllm.load(theirs)
    most = loaded.config.max_seq_len
    options = dict(tokens=3, top_p=0.5, temperature=0, seed=1)
    assert loaded.generate("a", **options) != ""
    numbers = {key: np.array(x)[()] for key, x in options.items()}
    assert loaded.generate("a", **numbers) == loaded.generate("a", **options)
    for use, named in (
        (lambda: loaded.generate("", tokens=1), "the prompt has no tokens"),
        (lambda: loaded.generate("b" * most, tokens=1), f"exceed model.max_seq_len={most}"),
        (lambda: loaded.generate("b", tokens=1, top_p=1.5), "^top_p=1.5: must be at most 1$"),
        (lambda: loaded.generate("b", tokens=np.arange(2)), "^tokens=.*: must be a whole number$"),
        (lambda: loaded.generate("b", max_tokens=1), "^max_tokens: there are only tokens, "),
        (lambda: loaded.generate("b", every=3), "^every: there are only tokens, temperature, "),
        (lambda: loaded.generate(["a", "b"]), r"^\['a', 'b'\] is not one text in UTF-8$"),
        (lambda: loaded.score("a\ud800"), r"^'a\\ud800' is not one text in UTF-8$"),
        (lambda: loaded.score(""), "has 0 tokens; it needs 2"),
        (lambda: loaded.score("b"), f"has 1 token; it needs 2 to {most + 1}$"),
        (lambda: loaded.score("b" * (most + 2)), f"has {most + 2} tokens; it needs"),
    ):
        with pytest.raises(InputError, match=named):
            use()
    with pytest.raises(InputError, match="theirs holds weights of step 0, not of step 3: leave"):
        jaxllm.load(theirs, step=3)
    right = loaded.score("b" * (most + 1)), loaded.generate("a", tokens=3, temperature=0)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))):
        found = loaded.score("b" * (most + 1)), loaded.generate("a", tokens=3, temperature=0)
    assert found == right
    assert right[0] < 0
    with jax.transfer_guard("disallow"), jax.debug_infs(True):
        loaded = jaxllm.load(theirs)
        found = loaded.score("b" * (most + 1)), loaded.generate("a", tokens=3, temperature=0)
    assert found == right
    norm = loaded.model.norm.weight
    norm[...] = norm[...] * jnp.nan
    with pytest.raises(RunError, match="^the model's logits are not finite: load another"):
        loaded.score("ab")


@pytest.mark.parametrize("name", ["llama3", slow("xlstm")])
def test_scores_of_other_lengths_compile_nothing(tmp_path, name, caplog):
    theirs = folder_of(tmp_path / "theirs", name)
    shutil.copyfile(FIXTURES / "evaluation" / "tokenizer.json", theirs / "tokenizer.json")
    loaded = jaxllm.load(theirs)
    loaded.score("ab")
    with jax.log_compiles():
        scores = [loaded.score("ab" + "a" * n) for n in (1, 7, 40)]
    assert "Finished XLA compilation" not in caplog.text
    for n, score in zip((1, 7, 40), scores, strict=True):
        ids = jnp.array([loaded.tokenizer.prompt("ab" + "a" * n)])
        assert math.isclose(score, -loaded.model.loss(ids[:, :-1], ids[:, 1:]), rel_tol=0.01)
    with pytest.raises(InputError, match=r"has 1 token; it needs 2 to (49|\d{10})$"):
        loaded.score("b")


def test_a_folder_without_a_model_or_a_tokenizer_is_one_line(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        jaxllm.load(tmp_path / "no")
    with pytest.raises(InputError, match="tokenizer.json"):
        jaxllm.load(folder_of(tmp_path / "theirs", "gpt2"))


def test_the_version_is_that_of_the_package():
    try:
        assert jaxllm.__version__ == version("jaxllm")
    except PackageNotFoundError:
        pytest.skip("a checkout that is not installed")


LAYERS = [getattr(jaxllm.layers, name) for name in jaxllm.layers.__all__]


@pytest.mark.parametrize("layer", [*LAYERS, *MODELS.values()], ids=lambda layer: layer.__name__)
def test_help_shows_the_arguments(layer):
    text = pydoc.render_doc(layer, renderer=pydoc.plaintext)
    assert "*args" not in text.partition("\n\n")[2].partition("\n")[2].partition("\n")[0]
    expected = list(inspect.signature(layer.__init__).parameters)[1:]
    assert list(inspect.signature(layer).parameters) == expected


def test_attention_says_first_that_it_may_have_no_positions():
    assert "without rope_theta it has no positions" in Attention.__doc__.partition("\n")[0]
    layer = Attention(8, 2, rngs=nnx.Rngs(0))
    assert "positions" in inspect.signature(layer).parameters  # of the call


def test_x_of_another_width_is_one_line():
    for layer in (Linear(8, 4, rngs=nnx.Rngs(0)), Attention(8, 2, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match=r"^x has shape \(1, 2, 9\), not \(\.\.\., in"):
            layer(jnp.ones((1, 2, 9)))
