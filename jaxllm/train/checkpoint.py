"""Checkpoints through Orbax: saves are asynchronous and atomic; the newest n and the best are kept.

A checkpoint holds the training state as a flat {name: array} (names like
`params.blocks.0.attention.q.weight.value`) and a JSON page with the configuration, the data
fingerprint and position, and each array's shape, dtype and checksum.  The validation loss is
Orbax's metric.
"""

import contextlib
import re
import shutil
from collections.abc import Iterable
from math import isnan
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxllm.errors import InputError, RunError, in_short, out_of_memory, quiet_orbax
from jaxllm.weights import checksums
from jaxllm.weights.places import difference


class Checkpoints:
    """The checkpoints of one run, in `directory`."""

    def __init__(self, directory: Path, keep: int):
        quiet_orbax()
        self.directory, self._keep = directory.resolve(), keep
        self._manager: ocp.CheckpointManager | None = None
        self._saving: int | None = None  # step of the latest save, complete or not

    @property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, created when first needed, because it creates the directory."""
        if self._manager is None:
            self._delete_incomplete()
            loss = lambda metrics: metrics["val_loss"]
            best = BestN(
                get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
            )
            options = ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy([LatestN(self._keep), best]),
                # Orbax writes the metrics only with best_fn.  Without them a resumed run would not
                # know the best checkpoint, and would delete it.
                best_fn=loss,
                best_mode="min",
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        return self._manager

    def newest(self) -> int | None:
        """Step of the newest complete checkpoint, or None; raises InputError if one is damaged."""
        if not self.directory.is_dir():
            return None
        checksums.check_losses(self.directory)
        return self.manager.latest_step()

    def samples(self, step: int, fingerprint: str) -> int:
        """Number of samples that the run had taken at `step`: the data position to resume from.

        Raises InputError if the run trained on data with another fingerprint than `fingerprint`.
        """
        run, saved = self.directory.parent, self.about(step)
        if (data := saved.get("data_fingerprint")) != fingerprint:
            raise InputError(
                f"the data changed since the checkpoint (fingerprint {fingerprint},"
                f" was {data}): the corpus, tokenizer or Python version differs; start a new run"
                f" from its weights (--model.init_from {run}, another --out_dir)"
            )
        return saved["samples"]

    def about(self, step: int) -> dict[str, Any]:
        """The JSON page of a checkpoint; raises InputError if it is damaged."""
        try:
            args = ocp.args.Composite(about=ocp.args.JsonRestore())
            page = self.manager.restore(step, args=args)["about"]
            checksums.check_digest(page)
        except Exception as e:
            raise self._damaged(step, e) from e
        return page

    def restore(self, step: int, abstract_state):
        """Restores the saved state bit for bit, with the shardings of `abstract_state`.

        Raises InputError for a damaged checkpoint or one of another model.
        """
        wanted, about = _flat(abstract_state), self.about(step)
        saved, ours = about["arrays"], _shapes(wanted)
        if different := difference(saved, ours, "this model has"):
            place = self.directory / str(step)
            raise InputError(f"checkpoint {place} is of another model: {different}")
        try:
            flat = self.manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            )["state"]
        except Exception as e:
            if out_of_memory(e):
                raise
            raise self._damaged(step, e, wanted) from e
        if name := checksums.first_mismatch(flat, about.get("checksums", {})):
            raise self._damaged(step, ValueError("its checksum differs"), [name])
        if (inside := int(flat.get("step", step))) != step:
            raise self._damaged(step, ValueError(f"it is of step {inside}"))
        # These arrays cannot all be donated to a step: on a CPU some are views of Orbax's buffers.
        # Each is copied, then freed before the next one is copied.
        for name in wanted:
            flat[name] = jax.device_put(flat[name], flat[name].sharding, may_alias=False)
        structure = jax.tree.structure(abstract_state)
        return jax.tree.unflatten(structure, [flat[name] for name in wanted])

    def check_disk_space(self, state) -> None:
        """Raises InputError if the disk has no room for one checkpoint of a state."""
        need = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        existing = next(p for p in (self.directory, *self.directory.parents) if p.exists())
        disk = shutil.disk_usage(existing)
        if disk.total and disk.free < need:  # some file systems report a total of 0
            raise InputError(
                f"out_dir {self.directory.parent}: its disk has {disk.free / 1e6:,.1f} MB free, one"
                f" checkpoint takes {need / 1e6:,.1f} MB; free some space, or name another"
            )

    def save(self, step: int, state, about: dict[str, Any], val_loss: float | None) -> str | None:
        """Starts a save; returns once the arrays are copied off the devices.

        Returns None, or one line if the previous save or this one failed, as on a full disk.
        Complete checkpoints are not affected.
        """
        flat = _flat(state)
        arrays = {"arrays": _shapes(flat), "checksums": checksums.array_checksums(flat)}
        about = checksums.with_digest(about | arrays)
        args = ocp.args.Composite(state=ocp.args.StandardSave(flat), about=ocp.args.JsonSave(about))
        known = val_loss is not None and not isnan(val_loss)
        metrics = checksums.with_digest({"val_loss": val_loss, "step": step}) if known else None
        problem = self._finish()
        self._saving = step
        try:
            self.manager.save(step, args=args, metrics=metrics)
        except Exception as e:
            return "; ".join(filter(None, (problem, self._failed(e))))
        return problem

    def close(self) -> None:
        """Waits until everything is on disk; raises RunError if the last save failed."""
        if problem := self._finish():
            raise RunError(problem)
        if self._manager is not None:
            self._manager.close()

    def _delete_incomplete(self) -> None:
        """Deletes the remains of killed or failed saves.

        Orbax would delete them in a thread.  The threads of a failed save may still delete the same
        files, and the missing files would then make the next save fail.
        """
        if jax.process_index() == 0:
            for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)

    def _finish(self) -> str | None:
        """Waits for the save in progress; returns one line if it failed."""
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as e:
            return self._failed(e)
        return None

    def _failed(self, cause: Exception) -> str:
        failed, self._manager = self._manager, None  # the next manager rereads the directory
        if failed is not None:
            with contextlib.suppress(Exception):
                failed.close()  # its threads may still write
        self._delete_incomplete()  # to free the disk
        if (kept := self.on_disk()) == self._saving:
            return f"a checkpoint before step {kept}'s could not be deleted ({in_short(cause)})"
        return (
            f"the checkpoint of step {self._saving} could not be written ({in_short(cause)});"
            f" the newest complete one is {'none' if kept is None else f'of step {kept}'}"
        )

    def on_disk(self, before: int | None = None) -> int | None:
        """Step of the newest complete checkpoint, or of the newest before a step.

        Reads only the names of the folders: a manager might fail on files that the threads of a
        failed save are still deleting.
        """
        steps = [int(p.name) for p in self.directory.glob("*/") if p.name.isdecimal()]
        return max((s for s in steps if before is None or s < before), default=None)

    def _damaged(self, step: int, cause: Exception, names: Iterable[str] = ()) -> InputError:
        """names: arrays, one of which may have caused the error."""
        folder, older, names = self.directory / str(step), self.on_disk(before=step), list(names)
        if len(names) > 1:  # TensorStore quotes the path of the array that it reads
            quoted = set(re.findall(r"""["']([^"'/]+)/""", str(cause)))
            names = [name for name in names if name in quoted]
        at = f" at {names[0]}" if names else ""
        fix = "there is no earlier one: start a new run"
        if older is not None:
            fix = f"to continue from step {older}, delete that folder and --resume again"
        return InputError(f"checkpoint {folder} is damaged{at} ({in_short(cause)}); {fix}")


def _shapes(flat: dict[str, Any]) -> dict[str, list]:
    return {name: [list(a.shape), str(a.dtype)] for name, a in flat.items()}


def _flat(tree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
