"""A canary for silent corruption: computes a step twice and compares checksums of its arrays.

Steps are deterministic, so two computations of one step from one state and batch agree in every
bit.  docs/reliability.md says what this finds and what it cannot find.  For a step that is not
finite, `first_not_finite` names the layer.
"""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.errors import Corruption
from jaxllm.models.language_model import LanguageModel, Stream
from jaxllm.train.step import Trainer, TrainState

KINDS = {"before": "", "gradient": "the gradient of ", "after": "the new "}


class Canary:
    """Computes each step twice with one program, which holds one state.

    The program changes parameters and moments only if its checksums equal those passed to it, so
    the first computation changes none.  The host does not wait between the two computations.
    """

    def __init__(self, trainer: Trainer, program: Callable):
        """program: compiled from `trainer.trace_verified_step()`."""
        self.program, self.devices = program, list(trainer.mesh.devices.flat)
        leaves = jax.tree.leaves_with_path(trainer.checked())
        keys = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
        parts = (key.partition(".") for key in keys)
        self.names = [KINDS[part] + name.removesuffix(".value") for part, _, name in parts]
        self.replicas = [self._replicas(leaf) for _, leaf in leaves]
        shape = (len(self.devices), len(leaves), 2)
        self.unseen = jax.device_put(np.zeros(shape, np.uint32), trainer.state_shardings.step)
        self.last: tuple[int, jax.Array, jax.Array] | None = None

    def _replicas(self, leaf: jax.ShapeDtypeStruct) -> list[list[int]]:
        """The devices that hold the same part of an array, as places in the mesh."""
        indices, groups = leaf.sharding.devices_indices_map(leaf.shape), {}
        for i, device in enumerate(self.devices):
            groups.setdefault(str(indices[device]), []).append(i)
        return list(groups.values())

    def take(self, number: int, state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        """Takes step `number`; if its two computations differ, parameters and moments stay."""
        state, _, first = self.program(state, batch, self.unseen)
        state, metrics, second = self.program(state, batch, first)
        self.last = number, first, second
        return state, metrics

    def check(self, step: int) -> None:
        """Raises Corruption, with one line, if `step` was computed twice and something differs."""
        if self.last is None or self.last[0] != step:
            return
        (_, *tables), self.last = self.last, None
        first, second = map(np.asarray, tables)
        # One of the two computations may have been right, so replicas are compared in both.
        for what, differ in (
            ("two computations of it differ in", (first != second).any(2)),
            ("replicas differ in", self._unlike(first) | self._unlike(second)),
        ):
            if differ.any():
                arrays, devices = np.nonzero(differ.any(0))[0], np.nonzero(differ.any(1))[0]
                raise Corruption(
                    f"step {step} is corrupted: {what} {self.names[arrays[0]]}"
                    f"{_more(len(arrays), 'array')} on {self._name(devices[0])}"
                    f"{_more(len(devices), 'device')}"
                )

    def _unlike(self, sums: np.ndarray) -> np.ndarray:
        """(devices, arrays): whether a device's part differs from most of its replicas."""
        unlike = np.zeros(sums.shape[:2], bool)
        for array, groups in enumerate(self.replicas):
            for group in groups:
                values = [sums[device, array].tobytes() for device in group]
                value, count = Counter(values).most_common(1)[0]
                if count < len(group):  # of two that differ, either may be wrong
                    most = count * 2 > len(group)
                    unlike[group, array] = [v != value or not most for v in values]
        return unlike

    def _name(self, place: int) -> str:
        device = self.devices[place]
        process = f" of process {device.process_index}" if jax.process_count() > 1 else ""
        return f"{device} ({device.device_kind}){process}"


def _more(count: int, noun: str) -> str:
    return "" if count == 1 else f" and {count - 1} more {noun}{'s' * (count > 2)}"


def first_not_finite(graph, params, tokens, labels, **documents) -> str:
    """Name of the first layer whose output on this batch has a NaN or an infinity.

    Returns "the gradient" if the forward pass is finite.
    documents: segment_ids and positions, if the batch has them.
    """

    @jax.jit
    def finite(params, tokens, labels, documents):
        model: LanguageModel = nnx.merge(graph, params)
        embedded = model.embedding(tokens, documents.get("positions"))
        stream, outputs = Stream(None, None, embedded), {"embedding": embedded}
        for i, (stream, _) in enumerate(model.walk(embedded, **documents)):
            outputs[f"blocks.{i}"] = stream.sum()
        outputs["norm"] = stream.normed(model.norm)[0]
        outputs["loss"] = model.loss(tokens, labels, **documents)
        return {name: jnp.isfinite(x).all() for name, x in outputs.items()}

    flags = finite(params, tokens, labels, documents)  # jit sorts the keys of a dict
    order = ["embedding", *(f"blocks.{i}" for i in range(len(flags) - 3)), "norm", "loss"]
    return next((name for name in order if not flags[name]), "the gradient")
