"""Log-likelihoods of texts under a model, for HellaSwag and lm-evaluation-harness."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import IGNORE, MeshConfig, round_up
from jaxllm.errors import InputError, RunError
from jaxllm.infer.decode import WIDTHS, load_model, most_tokens
from jaxllm.models.language_model import LanguageModel
from jaxllm.sharding import make_mesh
from jaxllm.terminal import progress_bar
from jaxllm.weights.pretrained import Weights


class Scorer:
    """Computes log-likelihoods of the ends of token rows with a model on all devices.

    batch_size: rows at once; rounded up to a multiple of the devices, which share them.
    """

    def __init__(self, weights: Weights, batch_size: int):
        self.most, self.mesh = most_tokens(weights.config), make_mesh(MeshConfig())
        self.size = round_up(batch_size, self.mesh.size)
        with jax.set_mesh(self.mesh):
            self.graph, self.params = load_model(weights, self.mesh)
            self._program = jax.jit(self._score)

    def __call__(self, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether every token is the most likely one) of each row's end.

        rows: (ids, number of last ids that are the end), with at least one id before the end.
        A row that is too long for the model loses its first ids; raises InputError if the end
        itself is too long, RunError for a score that is not finite.
        """
        most, longest = self.most, max((count for _, count in rows), default=0)
        if most is not None and longest > most:
            raise InputError(f"a text has {longest} tokens, more than model.max_seq_len={most}")
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        # Sorted by length, so that batches have little padding; the longest come first, so that
        # a lack of memory shows at once.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        with jax.set_mesh(self.mesh), progress_bar("scoring", len(rows), size=False) as done:
            for first in range(0, len(rows), self.size):
                part = order[first : first + self.size]
                width = min(round_up(len(rows[part[0]][0]) - 1, WIDTHS), most or 1 << 30)
                tokens = np.zeros((self.size, width), np.int32)
                labels = np.full((self.size, width), IGNORE, np.int32)
                for row, i in enumerate(part):
                    ids, count = rows[i]
                    ids = ids[-(width + 1) :]
                    tokens[row, : len(ids) - 1] = ids[:-1]
                    end = slice(len(ids) - 1 - count, len(ids) - 1)
                    labels[row, end] = ids[1:][end]
                sums, likeliest = map(np.asarray, self._program(self.params, tokens, labels))
                if not np.isfinite(sums).all():
                    raise RunError("the model's logits are not finite: score another checkpoint")
                for row, i in enumerate(part):
                    scores[i] = float(sums[row]), bool(likeliest[row])
                done(first + self.size)
        return scores

    def _score(self, params, tokens, labels):
        """(sum of the labels' log-probabilities, whether all are the most likely), (B,) each."""
        model: LanguageModel = nnx.merge(self.graph, params)
        hidden = model.hidden(tokens)

        def score(part):  # takes some positions at a time: all logits would be gigabytes
            hidden, labels = part
            z = model.logits(hidden, jnp.float32)[..., : model.config.vocab_size]
            scored = labels != IGNORE
            at = jnp.where(scored, labels, 0)[..., None]
            label = jnp.take_along_axis(jax.nn.log_softmax(z), at, axis=-1)[..., 0]
            return jnp.where(scored, label, 0).sum(-1), ((z.argmax(-1) == labels) | ~scored).all(-1)

        B, T = tokens.shape
        n = WIDTHS if T % WIDTHS == 0 else T
        parts = (x.reshape(B, T // n, n, *x.shape[2:]).swapaxes(0, 1) for x in (hidden, labels))
        sums, likeliest = jax.lax.map(score, tuple(parts))
        return sums.sum(0), likeliest.all(0)
