"""The parameters in a run's checkpoint: RunWeights reads them, write_checkpoint writes them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jaxllm import config as configs
from jaxllm.errors import InputError, RunError, in_short, out_of_memory, quiet_orbax
from jaxllm.models import create
from jaxllm.weights import checksums
from jaxllm.weights.huggingface import HuggingFaceWeights
from jaxllm.weights.places import difference, named_params


class RunWeights:
    """The parameters in a run's newest checkpoint, or in `step`'s; the run may go on meanwhile."""

    packing = None

    def __init__(self, directory: Path, step: int | None = None):
        quiet_orbax()
        self.run = configs.load(str(directory / "config.yaml"))
        self.config = self.run.model
        self.folder = self.text = directory
        checkpoints = (directory / "checkpoints").resolve()
        options = ocp.CheckpointManagerOptions(read_only=True)
        checksums.check_losses(checkpoints)  # Orbax reads all of them
        self._manager = ocp.CheckpointManager(checkpoints, options=options)
        steps = sorted(self._manager.all_steps())
        if not steps or (step is not None and step not in steps):
            wanted = "complete checkpoint" if step is None else f"checkpoint of step {step!r}"
            have = f"; it has {', '.join(map(str, steps))}" if steps else ""
            have += ": a run that trains on deletes old ones" * (step in range(1, [0, *steps][-1]))
            raise InputError(f"{directory} holds no {wanted}{have}")
        self.step: int = steps[-1 if step is None else steps.index(step)]
        self._place = directory / "checkpoints" / str(self.step)
        self._check()

    def read(self, names: Iterable[str], like: dict[str, Any] | None = None) -> dict[str, Any]:
        """{our dotted path: float32 array} of some parameters; checks their checksums.

        like: {our dotted path: an array's shape and sharding}; None: for NumPy's arrays.
        """
        unread = np.empty(0, np.float32)
        items = {_stored(n): like[n].update(dtype=np.float32) if like else unread for n in names}
        restore_args = ocp.checkpoint_utils.construct_restore_args(items)
        args = ocp.args.PyTreeRestore(item=items, restore_args=restore_args, partial_restore=True)
        found = self._restore(args)
        if name := checksums.first_mismatch({name: found[name] for name in items}, self._checksums):
            raise self._damaged(f"the checksum of {name} differs")
        return {name: found[_stored(name)] for name in names}

    def param(self, name: str) -> np.ndarray:
        """The parameter of a dotted path, in float32."""
        return self.read([name])[name]

    def load(self, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """{our dotted path: array} of all names in `abstract`, with its shardings and dtypes.

        If the dtypes are not all float32, like the checkpoint's, the devices hold the float32
        arrays of one block at a time.
        """
        plain, parts = all(leaf.dtype == np.float32 for leaf in abstract.values()), {}
        for name in abstract:
            apart = not plain and name.startswith("blocks.")
            parts.setdefault(".".join(name.split(".")[:2]) * apart, []).append(name)
        found = {}
        for names in parts.values():
            arrays = self.read(names, abstract)
            found |= {name: x.astype(abstract[name].dtype) for name, x in arrays.items()}
        return found

    def _check(self) -> None:
        page = self.about = self._restore(ocp.args.JsonRestore(), "about")
        try:
            checksums.check_digest(page)
        except ValueError as e:
            raise self._damaged(str(e)) from e
        self._checksums = page.get("checksums", {})
        kind = nnx.Param if self.config.adapters is None else nnx.LoRAParam
        params = named_params(nnx.state(nnx.eval_shape(lambda: create(self.config)), kind))
        wanted = {_stored(name): [list(p.shape), "float32"] for name, p in params.items()}
        stored = {name: at for name, at in page["arrays"].items() if name.startswith("params.")}
        where = f"checkpoint {self._place}"
        if different := difference(stored, wanted):
            raise InputError(f"{where}: {different}")
        checksums.check_folder(self.folder, page, self.config, where)

    def _restore(self, args: Any, item: str = "state") -> Any:
        try:
            return self._manager.restore(self.step, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as e:
            if out_of_memory(e):
                raise
            raise self._damaged(in_short(e)) from e

    def _damaged(self, why: str) -> InputError:
        older = [step for step in self._manager.all_steps() if step < self.step]
        fix = "there is no earlier one: train or convert again"
        if older:
            fix = f"generate, evaluate and convert take the previous one with --step {max(older)}"
        return InputError(f"checkpoint {self._place} is damaged ({why}); {fix}")


def write_checkpoint(directory: Path, weights: HuggingFaceWeights, about: dict[str, Any]) -> None:
    """Writes the parameters as checkpoint 0 of a run; about: its JSON page.

    Holds one tensor in memory at a time.  Each is read twice, because Orbax writes the checksums
    first.  Raises RunError if the disk fails.
    """
    shapes = named_params(nnx.eval_shape(lambda: create(weights.config)))
    state = {_stored(name): _Unread(weights, name, p.shape) for name, p in shapes.items()}
    about = about | {"arrays": {}, "checksums": {}}
    for name, leaf in state.items():
        about["arrays"][name] = [list(leaf.shape), str(leaf.dtype)]
        about["checksums"] |= checksums.array_checksums({name: leaf.read()})
    quiet_orbax()
    registry = ocp.type_handlers.create_type_handler_registry((_Unread, _UnreadHandler()))
    arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    handlers = {"state": arrays, "about": ocp.JsonCheckpointHandler()}
    about = checksums.with_digest(about)
    saved = {"state": ocp.args.PyTreeSave(state), "about": ocp.args.JsonSave(about)}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    how: dict[str, Any] = {"options": options, "item_handlers": handlers}
    try:
        with ocp.CheckpointManager(directory.resolve(), **how) as manager:
            manager.save(0, args=ocp.args.Composite(**saved))
    except InputError:
        raise
    except Exception as e:
        raise RunError(in_short(e)) from e


class _Unread:
    """A parameter that is read only when Orbax writes it."""

    def __init__(self, weights: HuggingFaceWeights, name: str, shape: tuple[int, ...]):
        self.read = lambda: weights.param(name)
        self.shape, self.dtype = shape, np.dtype(np.float32)


class _UnreadHandler(ocp.type_handlers.NumpyHandler):
    async def serialize(self, values, infos, args=None):
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([value.read()], [info], [arg]):
                written.result()  # otherwise Orbax would hold all tensors until the last is written
        return []


def _stored(name: str) -> str:
    return f"params.{name}.value"
