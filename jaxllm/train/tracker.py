"""Logs to Weights & Biases, through its own package, in addition to metrics.jsonl."""

import importlib.util
import os
from pathlib import Path

from jaxllm.config import Config
from jaxllm.errors import InputError


def check_tracker(config: Config) -> None:
    """Raises InputError if the tracker's package is missing."""
    if config.train.tracker == "wandb" and importlib.util.find_spec("wandb") is None:
        raise InputError(
            "train.tracker=wandb needs the package wandb: pip install 'wandb>=0.28,<0.32', or"
            " uv run --extra wandb train.py; or set train.tracker=none"
        )


class Wandb:
    """A run of Weights & Biases, offline unless WANDB_MODE is set.

    A resumed run becomes a separate run there, in the same group.
    """

    name = "values for wandb"

    def __init__(self, out_dir: Path, config: dict):
        os.environ.setdefault("WANDB_MODE", "offline")
        import wandb

        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "jaxllm"),
                name=out_dir.name,
                group=out_dir.name,
                dir=out_dir,
                config=config,
                # Otherwise it would capture and write to standard output.
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as e:  # such as: no key, no network, a full disk
            raise InputError(
                f"train.tracker=wandb cannot start ({e}); set WANDB_MODE=offline, or"
                " train.tracker=none"
            ) from e
        offline = self.run.settings.mode == "offline"
        folder = Path(self.run.settings.sync_dir)
        self.where = f"offline; `wandb sync {folder}` sends it" if offline else self.run.url

    def write(self, row: dict) -> None:
        """Logs the values of one row; raises OSError for any failure, so that the run continues."""
        values = {k: v for k, v in row.items() if k != "step" and v is not None}
        try:
            self.run.log(values, step=row["step"])
        except Exception as e:
            raise OSError(str(e)) from e

    def close(self) -> None:
        """Waits until everything is written; raises OSError for any failure."""
        try:
            self.run.finish()
        except Exception as e:
            raise OSError(str(e)) from e
