"""Measures what fp8 loses of each tensor: the values that saturate and those that become 0."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxllm.layers.linear import use_fp8
from jaxllm.models import create
from jaxllm.sharding import P
from jaxllm.train.step import Trainer

TENSORS = ("input", "weight", "gradient")  # the rows of a probe; its columns:
LOSSES = ("saturated", "zero")  # and the number of values

Shares = dict[str, np.ndarray]  # (3, 2) by the name of a layer


def measurement(trainer: Trainer) -> Callable[[nnx.State, dict], Shares]:
    """A function (parameters, batch) -> shares of every layer's tensors that fp8 loses.

    One forward and backward pass in fp8, whatever train.fp8 says.  Layers that share one matmul
    (q, k, v) report under the first; those that stay in bfloat16 are left out.  The head is in fp8
    if train.fp8 is "all".
    """
    model = nnx.eval_shape(lambda: create(trainer.config.model))
    use_fp8(model.blocks, probes=True)
    if trainer.config.train.fp8 == "all":
        model.fp8_head, model.probe = True, nnx.data(nnx.Param(jnp.zeros((3, 3))))
    graph, abstract = nnx.split(model, nnx.Param)
    places = [path for path, _ in nnx.to_flat_state(abstract) if path[-1] == "probe"]

    # Every process needs all of them.
    @functools.partial(jax.jit, out_shardings=NamedSharding(trainer.mesh, P()))
    def gradients(params, batch):
        flat = dict(nnx.to_flat_state(params))
        like = dict(nnx.to_flat_state(abstract))

        def loss(probes):
            found = {path: like[path].replace(p) for path, p in zip(places, probes, strict=True)}
            whole = nnx.from_flat_state(flat | found)
            return trainer._loss_sum(whole, batch, graph=graph)[0]

        return jax.grad(loss)([jnp.zeros((len(TENSORS), len(LOSSES) + 1))] * len(places))

    def measure(params, batch):
        with jax.set_mesh(trainer.mesh):
            found = map(np.asarray, gradients(params, batch))
        named = {
            ".".join(map(str, path[:-1])) or "head": g
            for path, g in zip(places, found, strict=True)
        }
        return {name: g[:, :-1] for name, g in named.items() if g.any()}

    return measure


def worst(shares: Shares) -> dict[str, tuple[float, str]]:
    """For each kind of tensor and of loss, the largest share and its layer."""
    found = {}
    for i, tensor in enumerate(TENSORS):
        for j, loss in enumerate(LOSSES):
            layer = max(shares, key=lambda name: shares[name][i, j])
            found[f"fp8_{tensor}_{loss}"] = float(shares[layer][i, j]), layer
    return found
