"""Flips single bits of a training state; with four forced CPU devices it is run by test_verify.py.

As a script it trains a step over two replicas of two shards in two accumulated parts, then flips
one bit of one device's part of a moment, and prints JSON.
"""

import json

import jax
import numpy as np


def flip(x: jax.Array, device: int = 0, word: int = 0, bit: int = 0) -> jax.Array:
    """The array with one bit of one device's part flipped; other devices keep their bits."""
    parts = [np.array(part.data) for part in x.addressable_shards]
    parts[device].view(f"uint{8 * x.dtype.itemsize}").reshape(-1)[word] ^= 1 << bit
    on = [jax.device_put(p, s.device) for p, s in zip(parts, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, on)


def flip_leaf(tree, name: str, **where):
    """The tree with a flipped bit in the first leaf whose path contains `name`."""
    leaves, structure = jax.tree.flatten(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    at = next(i for i, path in enumerate(paths) if name in path)
    leaves[at] = flip(leaves[at], **where)
    return jax.tree.unflatten(structure, leaves)


def problem(canary, step: int) -> str:
    """What the canary says about a step; "" if it is right."""
    from jaxllm.errors import Corruption

    try:
        canary.check(step)
    except Corruption as e:
        return str(e)
    return ""


def main() -> dict[str, str]:
    from eight_devices import STEP_ROWS, batch, trainer

    from jaxllm.train.verify import Canary

    t = trainer("llama3", "data, fsdp", accum=2, rows=STEP_ROWS, kernels="xla")
    canary = Canary(t, t.trace_verified_step().lower().compile())
    rows, state, found = t.put_batch(batch(rows=STEP_ROWS)), t.init(), {}
    for step in (1, 2):
        state, _ = canary.take(step, state, rows)
        found[f"step {step}"] = problem(canary, step)
    state = flip_leaf(state, ".nu['blocks'][0]['mlp']['down']", device=2, word=5, bit=1)
    state, _ = canary.take(3, state, rows)  # the flip came before both computations
    found["moment"] = problem(canary, 3)
    return found


if __name__ == "__main__":
    from jaxllm.train.process import set_xla_flags

    set_xla_flags(deterministic=True)
    print(json.dumps(main()))
