"""jaxllm convert SOURCE OUT: converts a Hugging Face folder into a run's directory, or back.

SOURCE determines the direction.  A Hugging Face folder (GPT-2, Llama 3, xLSTM: config.json and
safetensors) becomes a run's directory: a checkpoint of the parameters, and a config.yaml with which
jaxllm train starts from them.  A run's directory becomes a Hugging Face folder.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxllm.config.command_line import Parser, check_writable, exit_status
from jaxllm.errors import InputError, RunError


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: write failed, 2: bad input, 130: interrupted."""
    parser = Parser(prog="jaxllm convert", description=__doc__.partition(": ")[2])
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the folder to convert")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--step", type=int, help="the checkpoint of a run to convert (default: the newest)"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="dtype of the Hugging Face tensors to write (default: float32, which is lossless)",
    )

    def run() -> None:
        args = parser.parse_args(argv)
        convert(args.source, args.out, args.step, args.dtype)

    return exit_status(run, interrupted="interrupted: nothing was written")


def convert(source: Path, out: Path, step: int | None = None, dtype: str | None = None) -> None:
    """Converts a folder into a new one, which is complete or does not exist.

    step, dtype: only for a run that becomes a Hugging Face folder.
    Raises InputError for bad input and if `out` exists, RunError if it cannot be written.
    """
    from jaxllm.weights.pretrained import RunWeights, open_weights

    source = source.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists: choose another folder")
    check_writable(out)
    weights = open_weights(source)
    if isinstance(weights, RunWeights):
        if step is not None:
            weights = RunWeights(source, step)
        with _new_folder(out) as folder:
            _to_huggingface(weights, folder, dtype or "float32")
        result = f"the checkpoint of step {weights.step} as a Hugging Face folder"
    else:
        for option, value in (("--step", step), ("--dtype", dtype)):
            if value is not None:
                raise InputError(f"{option} is for a run's directory; {source} is not one")
        with _new_folder(out) as folder:
            _from_huggingface(weights, folder, out)
        result = f"to train: jaxllm train --config {out / 'config.yaml'}"
    print(f"{out}: {weights.config.type}, {weights.config.n_layers} layers; {result}")


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `out`; renames it to `out` on success, else removes it."""
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)  # replaces an empty folder, and fails for anything else
    except (OSError, RunError) as error:
        raise RunError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _from_huggingface(weights, folder: Path, out: Path) -> None:
    from jaxllm.config import Config, OptimizerConfig, TrainConfig
    from jaxllm.weights.pretrained import write_checkpoint

    model = weights.config
    _copy_companions(weights.folder, folder)
    tokenizer = out / "tokenizer.json" if (folder / "tokenizer.json").exists() else None
    config = Config(
        model=model.model_copy(update={"init_from": str(out)}),
        train=TrainConfig(steps=1000, batch_size=8, seq_len=min(1024, model.max_seq_len)),
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=20),
    )
    data = config.data.model_copy(update={"tokenizer": tokenizer and str(tokenizer)})
    config = config.model_copy(update={"data": data})
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    about = {
        "config": config.model_dump(),
        "data_fingerprint": None,
        "samples": 0,
        "converted_from": str(weights.folder),
    }
    write_checkpoint(folder / "checkpoints", weights, about)


def _to_huggingface(weights, folder: Path, dtype: str) -> None:
    import json

    from jaxllm.weights.huggingface import write_tensors
    from jaxllm.weights.huggingface_config import config_json
    from jaxllm.weights.places import places

    config = weights.config
    page = config_json(config, dtype)
    _copy_companions(weights.folder, folder)
    given = weights.run.data.tokenizer
    if not (folder / "tokenizer.json").exists() and given and Path(given).is_file():
        shutil.copyfile(given, folder / "tokenizer.json")
    if (folder / "tokenizer.json").exists():
        if not (folder / "tokenizer_config.json").exists():
            (folder / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
            )
    else:
        print("no tokenizer.json: the run has none (data.tokenizer); copy it there by hand")
    (folder / "config.json").write_text(json.dumps(page, indent=2), encoding="utf-8")
    tensors = (
        (place.name, place.to_theirs(config, weights.read(place.ours))) for place in places(config)
    )
    write_tensors(folder, config, dtype, tensors)


def _copy_companions(source: Path, target: Path) -> None:
    from jaxllm.weights.huggingface import COMPANIONS

    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
