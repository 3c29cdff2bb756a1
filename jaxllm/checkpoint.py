"""Checkpoints through Orbax: asynchronous, complete or absent, the newest n and the best kept.

A checkpoint holds the training state as a flat {name: array} (names like
`params.blocks.0.attention.q.weight.value`) and a JSON page about it: configuration, data
fingerprint and position, every array's shape and dtype.  The validation loss is Orbax's metric.
"""

import contextlib
import logging
import shutil
from math import isnan
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxllm.errors import InputError, RunError


class Checkpoints:
    """The checkpoints of one run, in `directory`."""

    def __init__(self, directory: Path, keep: int):
        # Orbax tells every file that it touches; its tasks what failed, each with a traceback.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.directory = directory.resolve()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._saving: int | None = None  # step of the newest save that was begun

    @property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager; made when first needed, since making it makes the directory."""
        if self._manager is None:
            self._delete_the_unfinished()
            policy = AnyPreservationPolicy(
                [
                    LatestN(self._keep),
                    BestN(
                        get_metric_fn=lambda m: m["val_loss"],
                        reverse=True,
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            )
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policy,
                    # Without it the metrics would not be written: a resumed run would not know
                    # which checkpoint is the best, and delete it.
                    best_fn=lambda m: m["val_loss"],
                    best_mode="min",
                ),
            )
        return self._manager

    def newest(self) -> int | None:
        """Step of the newest complete checkpoint, or None; raises InputError if one is damaged."""
        if not self.directory.is_dir():
            return None
        try:
            return self.manager.latest_step()
        except Exception as e:
            raise InputError(
                f"a checkpoint in {self.directory} is damaged ({_short(e)}); delete its folder"
            ) from e

    def samples(self, step: int, steps: int, fingerprint: str) -> int:
        """Samples that the run of `step` had taken; where to resume in the data.

        Raises InputError if it was no run of more than `step` steps on the data of `fingerprint`.
        """
        run, saved = self.directory.parent, self.about(step)
        data, samples = saved.get("data_fingerprint"), saved.get("samples")
        if "converted_from" in saved:
            raise InputError(
                f"{run} holds weights of jaxllm.convert, not a run to resume; start one"
                f" with --model.init_from {run} and another --out_dir"
            )
        if data != fingerprint:
            raise InputError(
                f"the data changed since the checkpoint (fingerprint {fingerprint},"
                f" was {data}): another corpus, tokenizer or Python version"
            )
        if step >= steps:
            raise InputError(
                f"{run} is at step {step} of train.steps={steps}; raise --train.steps to go on"
            )
        if not isinstance(samples, int) or samples < 0:
            raise self._damaged(step, ValueError(f"samples={samples!r}"))
        return samples

    def about(self, step: int) -> dict[str, Any]:
        """The JSON page of a checkpoint; raises InputError if it is damaged."""
        try:
            page = self.manager.restore(
                step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
            )["about"]
            if not isinstance(page["arrays"], dict):
                raise ValueError("its JSON page lists no arrays")
        except Exception as e:
            raise self._damaged(step, e) from e
        return page

    def restore(self, step: int, abstract_state):
        """The state with the shapes and shardings of `abstract_state`, bit for bit as saved.

        Raises InputError for a checkpoint of another model and for a damaged one.
        """
        wanted = _flat(abstract_state)
        saved = self.about(step)["arrays"]
        for name, leaf in wanted.items():
            shape = [list(leaf.shape), str(leaf.dtype)]
            if saved.get(name) != shape:
                raise InputError(
                    f"checkpoint {self.directory / str(step)} is of another model: {name} is"
                    f" {saved.get(name, 'not in it')}, this model has {shape}"
                )
        if extra := sorted(set(saved) - set(wanted)):
            raise InputError(
                f"checkpoint {self.directory / str(step)} is of another model: it holds {extra[0]},"
                " which this model has not"
            )
        try:
            flat = self.manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            )["state"]
        except Exception as e:
            raise self._damaged(step, e) from e
        return jax.tree.unflatten(
            jax.tree.structure(abstract_state), [flat[name] for name in wanted]
        )

    def save(self, step: int, state, about: dict[str, Any], val_loss: float | None) -> str | None:
        """Begins to save; returns once the arrays are copied off the devices.

        Returns None, or one line about the save before it, or this one, that could not be written
        (a full disk); complete checkpoints stay as they are.
        """
        flat = _flat(state)
        about = dict(about, arrays={k: [list(a.shape), str(a.dtype)] for k, a in flat.items()})
        problem = self._finish()
        self._saving = step
        try:
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(flat), about=ocp.args.JsonSave(about)
                ),
                metrics=None if val_loss is None or isnan(val_loss) else {"val_loss": val_loss},
            )
        except Exception as e:
            return "; ".join(filter(None, (problem, self._failed(e))))
        return problem

    def close(self) -> None:
        """Waits until everything is on disk; raises RunError if the last save failed."""
        if problem := self._finish():
            raise RunError(problem)
        if self._manager is not None:
            self._manager.close()

    def _delete_the_unfinished(self) -> None:
        """Deletes what killed or failed saves left.

        Orbax would do it in a thread of its own; what this meets (a file that just went, for the
        threads of a failed save still tidy up) then becomes the failure of the next save.
        """
        if jax.process_index() == 0:
            for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)

    def _finish(self) -> str | None:
        """Waits for the save under way; one line if it failed."""
        if self._manager is None:
            return None
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            return self._failed(e)
        return None

    def _failed(self, cause: Exception) -> str:
        failed, self._manager = self._manager, None  # the next looks at the directory afresh
        if failed is not None:
            with contextlib.suppress(Exception):
                failed.close()  # its threads still write
        steps = [int(p.name) for p in self.directory.glob("*") if p.name.isdecimal()]
        kept = max(steps, default=None)  # without a manager, which may meet the threads' last files
        return (
            f"the checkpoint of step {self._saving} could not be written ({_short(cause)});"
            f" the newest complete one is {'none' if kept is None else f'of step {kept}'}"
        )

    def _damaged(self, step: int, cause: Exception) -> InputError:
        return InputError(
            f"checkpoint {self.directory / str(step)} is damaged ({_short(cause)});"
            " delete that folder to resume from the one before it"
        )


def _short(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def _flat(tree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
