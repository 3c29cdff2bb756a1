"""A trained model for Python code: `jaxllm.load`."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import MeshConfig, ModelConfig, SampleConfig
from jaxllm.infer import decode
from jaxllm.models.language_model import LanguageModel
from jaxllm.sharding import make_mesh
from jaxllm.text import Tokenizer
from jaxllm.weights.pretrained import open_weights


class Loaded(NamedTuple):
    """A model with its weights on one device, the tokenizer of its folder, and its settings."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: ModelConfig

    def generate(self, prompt: str, **options: Any) -> str:
        """The text that the model writes after `prompt`.

        options: tokens, temperature, top_k, seed, as of the section `sample` in a configuration.
        """
        graph, params = nnx.split(self.model, nnx.Param)
        ids, ends = self.tokenizer.prompt(prompt), self.tokenizer.ends
        found = decode.generate(graph, params, ids, SampleConfig(**options), ends=ends)
        return self.tokenizer.decode([*ids, *found])[len(self.tokenizer.decode(ids)) :]

    def score(self, text: str) -> float:
        """The log-likelihood of all tokens of a text but its first, in nats."""
        ids = jnp.array([self.tokenizer.prompt(text)])
        return -float(self.model.loss(ids[:, :-1], ids[:, 1:]))


def load(path: str | Path, step: int | None = None) -> Loaded:
    """`jaxllm.load`."""
    weights = open_weights(path, step)
    tokenizer = decode.open_tokenizer(weights)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = nnx.merge(*decode.load_model(weights, mesh))
    return Loaded(model, tokenizer, weights.config)
