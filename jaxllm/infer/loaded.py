"""A trained model for Python code: `jaxllm.load`."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxllm.config import IGNORE, MeshConfig, ModelConfig, round_up, sampling
from jaxllm.errors import InputError, RunError
from jaxllm.infer import decode
from jaxllm.infer.writer import Text
from jaxllm.models.language_model import LanguageModel
from jaxllm.sharding import make_mesh
from jaxllm.terminal import counted
from jaxllm.text import Tokenizer
from jaxllm.weights.pretrained import open_weights

_loss = jax.jit(lambda graph, params, *x: nnx.merge(graph, params).loss(*x), static_argnums=0)


class Loaded(NamedTuple):
    """A model with its weights on one device, the tokenizer of its folder, and its settings."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: ModelConfig

    def generate(self, prompt: str, **options: Any) -> str:
        """The text that the model writes after `prompt`.

        options: tokens, temperature, top_k, top_p and seed, as in the section `sample` of a
        configuration, min_p and repetition_penalty; their defaults are the folder's.
        """
        graph, params = nnx.split(self.model)
        ids = self.tokenizer.prompt(prompt)
        config = sampling(**self.tokenizer.sampling | options)
        decode.check_fits(ids, config.tokens, decode.most_tokens(self.config))
        with jax.set_mesh(None), jax.transfer_guard("allow"):  # overrides what the caller has set
            found = decode.generate(graph, params, ids, config, ends=self.tokenizer.ends)
        text = Text(self.tokenizer, ids)
        for token in found:
            text.add(token)
        return text.text

    def score(self, text: str) -> float:
        """The log-likelihood of all tokens of a text but its first, in nats."""
        ids = self.tokenizer.prompt(text)
        most = decode.most_tokens(self.config) or 1 << 30
        if not 2 <= len(ids) <= most + 1:
            raise InputError(f"the text has {counted(len(ids), 'token')}; it needs 2 to {most + 1}")
        width = min(round_up(len(ids) - 1, decode.WIDTHS), most)
        row = np.pad(ids, (0, width + 1 - len(ids)), constant_values=IGNORE)[None]
        with jax.set_mesh(None), jax.transfer_guard("allow"):
            tokens, labels = np.maximum(row[:, :-1], 0), row[:, 1:]
            score = -float(_loss(*nnx.split(self.model), tokens, labels))
        if not math.isfinite(score):
            raise RunError("the model's logits are not finite: load another checkpoint")
        return score


def load(path: str | Path, step: int | None = None) -> Loaded:
    """`jaxllm.load`."""
    weights = open_weights(path, step)
    tokenizer = decode.open_tokenizer(weights)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh), jax.transfer_guard("allow"):
        return Loaded(nnx.merge(*decode.load_model(weights, mesh)), tokenizer, weights.config)
