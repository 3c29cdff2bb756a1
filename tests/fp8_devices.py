"""Run by test_fp8.py in a separate process with eight forced CPU devices; prints JSON.

For each model and mesh: the errors of the loss and of each gradient in fp8 against those on one
device, relative root mean squares.  MESHES=all adds models and meshes.
"""

import json
import os

import jax
import numpy as np
from eight_devices import EXACT, batch, trainer, weights

from jaxllm.train.process import set_xla_flags
from jaxllm.train.step import step_model

MESHES = {"llama3": ["fsdp", "fsdp, context, tensor"]}
if os.environ.get("MESHES") == "all":
    MESHES |= {
        model: ["data, fsdp, tensor", "fsdp, context, tensor"] for model in ("llama3", "vlstm")
    }
    MESHES |= {"gpt2": ["data, fsdp, tensor"]}


ROWS = 32  # so that each of four devices casts whole tiles of tokens


def gradients(model: str, mesh: str) -> dict:
    """The loss, and the gradients by parameter."""
    t = trainer(model, mesh, rows=ROWS, **EXACT)
    train = t.config.train.model_copy(update={"fp8": "all"})
    graph = step_model(t.config.model_copy(update={"train": train}))[0]
    grad = jax.jit(
        jax.value_and_grad(lambda params, batch: t._loss_sum(params, batch, graph=graph)[0]),
        out_shardings=(None, t.state_shardings.params),
    )
    with jax.set_mesh(t.mesh):
        params = jax.device_put(weights(model), t.state_shardings.params)
        loss, grads = grad(params, t.put_batch(batch(rows=ROWS)))
    named = {jax.tree_util.keystr(p): np.asarray(g) for p, g in jax.tree.leaves_with_path(grads)}
    return {"loss": np.asarray(loss)} | named


def errors(model: str, mesh: str) -> dict[str, float]:
    one, got = gradients(model, "one"), gradients(model, mesh)
    norm = lambda x: float(np.linalg.norm(x))
    return {name: norm(got[name] - g) / norm(g) for name, g in one.items()}


if __name__ == "__main__":
    set_xla_flags(deterministic=False)  # as train.py does
    found = {model: {mesh: errors(model, mesh) for mesh in some} for model, some in MESHES.items()}
    print(json.dumps(found))
