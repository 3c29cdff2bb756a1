"""Run by test_lora.py with four forced CPU devices: losses and adapters of three steps, as JSON.

For one device, for two that divide the batch, the parameters, the heads or the tokens, and for
four that divide heads and tokens.
"""

import json

import jax
import numpy as np
from lora_models import batch_of, state_of, trainer_of

MESHES = {
    "one": {},
    "data": dict(data=2, shard_optimizer=True),
    "fsdp": dict(data=1, fsdp=2),
}


def run(mesh, quantize, dropout=0.25, **options):
    lora = dict(rank=4, dropout=dropout)
    options = dict(n_layers=1) | options | dict(quantize=quantize)
    trainer = trainer_of(lora, mesh=mesh or None, train=dict(grad_accum=2), **options)
    state, batch = state_of(trainer), trainer.put_batch(batch_of())
    step, losses = trainer.trace_train_step().lower().compile(), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    adapters = np.concatenate([np.ravel(p) for p in jax.tree.leaves(state.params)])
    return {"losses": losses, "adapters": adapters.tolist()}


if __name__ == "__main__":
    found = {name: run(mesh, None) for name, mesh in MESHES.items()}
    # The tensor and the context axis compute each batch in halves, each with its own dropout key.
    halves = dict(tensor=dict(data=1, tensor=2), context=dict(data=1, context=2))
    for name, mesh in dict(one={}, **halves).items():
        found[f"{name}, without dropout"] = run(mesh, None, 0.0)
    found |= {f"{name}, packed": run(MESHES[name], "int8") for name in ("one", "fsdp")}
    # Adam's first steps of three blocks amplify the rounding of sums, so only the losses count.
    for name in ("one", "fsdp"):
        deep = run(MESHES[name], "int8", n_layers=3, remat="block")
        found[f"{name}, packed and recomputed"] = deep | {"adapters": []}
    meshes = dict(one={}, tensor=halves["tensor"], both=dict(data=1, context=2, tensor=2))
    for name, mesh in meshes.items():
        found[f"{name}, packed without dropout"] = run(mesh, "int8", 0.0, n_kv_heads=4)
    print(json.dumps(found))
