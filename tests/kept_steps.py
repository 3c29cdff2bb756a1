"""Run by test_programs.py in a separate process with four forced CPU devices; prints JSON.

Trains a tiny model on a mesh, again, and again from a checkpoint, with the steps that the first run
kept: the other runs cannot trace.
"""

import json
import shutil
import tempfile
from pathlib import Path

import training_runs

import train
from jaxllm.train import programs
from jaxllm.train.step import Trainer

OPTIONS = [
    *("--mesh.fsdp", "2", "--mesh.shard_optimizer", "true"),
    *("--train.verify_every", "7", "--train.steps", "12", "--train.keep_checkpoints", "99"),
]


def never(trainer, *step):
    raise AssertionError("traced again")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, results = Path(temporary), {}
        # As on a GPU.
        programs._path_of_step = lambda trainer, name: folder / "cache" / f"{name}.step"
        tiny = training_runs.write_tiny(folder)

        def losses(name: str, *more: str) -> dict[int, float]:
            out = folder / name
            assert train.main(["--config", str(tiny), "--out_dir", str(out), *OPTIONS, *more]) == 0
            return training_runs.losses(out)

        results["first"] = losses("a")
        Trainer._trace = never
        results["second"] = losses("b")
        for checkpoint in (folder / "b" / "checkpoints").iterdir():  # as if killed after step 5
            if checkpoint.name.isdigit() and int(checkpoint.name) > 5:
                shutil.rmtree(checkpoint)
        results["resumed"] = losses("b", "--resume")
        results["kept"] = [path.name for path in sorted(folder.rglob("*.step"))]
        print(json.dumps(results))


if __name__ == "__main__":
    main()
