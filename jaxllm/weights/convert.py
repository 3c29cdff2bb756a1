"""Converts a Hugging Face folder into a run's directory, or back: jaxllm convert SOURCE OUT

SOURCE determines the direction.  A Hugging Face folder (GPT-2, Llama 3, xLSTM: config.json and
safetensors) becomes a run's directory: a checkpoint of the parameters, and a config.yaml with which
jaxllm train starts from them.  A run's directory becomes a Hugging Face folder.

With --quantize either becomes a folder of packed weights for jaxllm generate and jaxllm evaluate.
It has the matrices of the blocks in few bits, and with --head the head's.  The embedding, the
positions and else the head stay in bfloat16; norms, biases and the two gates of a vLSTM in float32.
"""

import argparse
import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxllm.config import FORMATS, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jaxllm.config.command_line import Parser, check_exists, check_writable, exit_status
from jaxllm.errors import InputError, RunError


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: write failed, 2: bad input, 130: interrupted."""
    parser = Parser(prog="jaxllm convert", description=__doc__.partition("\n\n")[2])
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the folder to convert")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--step", type=int, help="step of the checkpoint of a run to convert (default: the newest)"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="dtype of the Hugging Face tensors to write (default: float32, which is lossless)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add the adapters of a run with model.lora to its weights (default dtype: bfloat16)",
    )
    parser.add_argument("--quantize", choices=FORMATS, help="pack the weights in this format")
    parser.add_argument(
        "--group",
        choices=["32", "64", "128", "none"],
        help="with --quantize: weights of a column that share a scale; none: all (default: 128)",
    )
    parser.add_argument(
        "--head",
        choices=FORMATS,
        help="with --quantize: pack the head in this format, too (default: it stays in bfloat16)",
    )
    parser.add_argument(
        "--asymmetric",
        action="store_true",
        help="with --quantize int8 to int1: an offset for each group, too",
    )

    def run() -> None:
        args = parser.parse_args(argv)
        check_exists(args.source)
        convert(args.source, args.out, args.step, args.dtype, _packing(args), args.merge)

    return exit_status(run, interrupted="interrupted: nothing was written")


def _packing(args: argparse.Namespace):
    """The Packing that the options name; None without --quantize."""
    if args.quantize is None:
        given = [name for name in ("group", "head", "asymmetric") if getattr(args, name)]
        if given:
            raise InputError(f"--{given[0]} needs --quantize, one of {', '.join(FORMATS)}")
        return None
    if args.dtype is not None:
        raise InputError(f"--dtype {args.dtype} is for a Hugging Face folder, not for --quantize")
    from jaxllm.weights.packed import Packing

    format, bits = FORMATS[args.quantize]
    if args.asymmetric and format != "int":
        raise InputError(f"--quantize {args.quantize} has no offsets: leave out --asymmetric")
    group = None if args.group == "none" else int(args.group or 128)
    head = FORMATS[args.head] if args.head else None
    return Packing(format, bits, group, not args.asymmetric, head)


def convert(
    source: Path,
    out: Path,
    step: int | None = None,
    dtype: str | None = None,
    packing=None,
    merge: bool = False,
) -> None:
    """Converts a folder into a new one, which is complete or does not exist.

    step: only for a run; dtype: only for a run that becomes a Hugging Face folder.
    packing: a Packing, which makes a folder of packed weights.
    merge: of adapters; without it, a run with model.lora becomes a folder of peft.
    Raises InputError for bad input and if `out` exists, RunError if it cannot be written.
    """
    from jaxllm.weights.adapters import AdapterWeights
    from jaxllm.weights.packed import PackedWeights
    from jaxllm.weights.pretrained import open_weights

    source, out = source.expanduser(), out.absolute()  # what is printed works in every directory
    plain = out.is_dir() and not out.is_symlink() and not out.is_mount()  # may be renamed over
    if out.exists() and not (plain and not any(out.iterdir())):
        raise InputError(f"{out} exists: choose another folder")
    check_writable(out)
    weights = open_weights(source, step)
    adapts, of_run = isinstance(weights, AdapterWeights), getattr(weights, "run", None) is not None
    alone = adapts and not merge  # the adapters without their base
    if isinstance(weights, PackedWeights):
        raise InputError(
            f"{source} holds packed weights ({weights.packing}); convert the run or the folder that"
            " they were made from"
        )
    if merge and not adapts:
        raise InputError(f"--merge is for adapters, and {source} holds no adapters")
    if alone and packing is not None:
        raise InputError(f"--quantize needs --merge, because {source} holds some adapters")
    if alone and dtype:
        raise InputError("--dtype needs --merge: adapters are written in float32")
    if alone and not of_run:
        raise InputError(f"{source} is a folder of peft already; --merge makes a whole model")
    for name, given, fits in (("step", step, of_run), ("dtype", dtype, adapts or of_run)):
        if given is not None and not fits:
            raise InputError(f"--{name} is for a run's directory; {source} is not one")
    with _new_folder(out) as folder:
        if packing is not None:
            result = _to_packed(weights, folder, out, packing)
        elif alone:
            result = _to_peft(weights, folder)
        elif adapts or of_run:
            result = _to_huggingface(weights, folder, dtype or ("bfloat16" if merge else "float32"))
        else:
            result = _from_huggingface(weights, folder, out)
    print(f"{out}: {weights.config.type}, {weights.config.n_layers} layers; {result}")


def _command(*words: str | Path) -> str:
    return shlex.join(["jaxllm", *map(str, words)])


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


def _from_huggingface(weights, folder: Path, out: Path) -> str:
    from jaxllm.weights.pretrained import write_checkpoint

    check_writable(out, checkpoints=True)
    tokenizer = out / "tokenizer.json" if _copy_text(weights, folder) else None
    config = _config_to_train(weights.config, init_from=out, tokenizer=tokenizer)
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    about: dict = dict(config=config.model_dump(), data_fingerprint=None, samples=0)
    about["converted_from"] = str(weights.folder)
    write_checkpoint(folder / "checkpoints", weights, about)
    train = _command("train", "--config", out / "config.yaml")
    return f"to train on your text: {train} --data.source text --data.path FILE_OR_FOLDER"


def _config_to_train(model: ModelConfig, init_from: Path, tokenizer: Path | None):
    """The configuration of a run that trains on from the weights of a Hugging Face folder.

    tokenizer: the path that the folder's tokenizer.json will have.
    """
    return Config(
        model=model.model_copy(update={"init_from": str(init_from)}),
        data=DataConfig(tokenizer=str(tokenizer) if tokenizer else None),
        train=TrainConfig(steps=1000, batch_size=8, seq_len=min(1024, model.max_seq_len)),
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=20),
    )


def _to_packed(weights, folder: Path, out: Path, packing) -> str:
    from jaxllm.weights.adapters import AdapterWeights
    from jaxllm.weights.packed import write_packed

    copied = _copy_text(weights, folder)
    adapts = isinstance(weights, AdapterWeights)
    model = weights.plain if adapts else weights.config
    if (run := getattr(weights, "run", None)) is None:
        tokenizer = out / "tokenizer.json" if copied else None
        run = _config_to_train(model, weights.folder, tokenizer)
    config = run.model_copy(update={"model": model}) if adapts else run
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    about = {"step": getattr(weights, "step", 0), "packed_from": str(weights.folder)}
    size = write_packed(folder, model, packing, weights.param, about)
    if adapts:
        weights.verify()
    use = _command("generate", "--checkpoint", out)
    return f"{packing}, {size / 1e6:,.1f} MB; to use: {use}"


def _to_huggingface(weights, folder: Path, dtype: str) -> str:
    import json

    from jaxllm.text.files import copy_companions, take_ids
    from jaxllm.weights.adapters import AdapterWeights
    from jaxllm.weights.huggingface import write_tensors
    from jaxllm.weights.huggingface_config import config_json
    from jaxllm.weights.places import places
    from jaxllm.weights.pretrained import text_folder

    config = weights.config
    page = config_json(config, dtype)
    if tokenizer := _tokenizer(weights):
        page |= tokenizer.export_to(folder)
    else:
        copy_companions(text_folder(weights), folder)
        page |= take_ids(folder)
    (folder / "config.json").write_text(json.dumps(page, indent=2), encoding="utf-8")
    tensors = (
        (place.name, place.to_theirs(config, {ours: weights.param(ours) for ours in place.ours}))
        for place in places(config)
    )
    write_tensors(folder, config, dtype, tensors)
    if isinstance(weights, AdapterWeights):
        weights.verify()
    return f"the checkpoint of step {weights.step} as a Hugging Face folder"


def _to_peft(weights, folder: Path) -> str:
    from jaxllm.weights.adapters import PAGE, write_peft
    from jaxllm.weights.huggingface import HuggingFaceWeights

    _copy_text(weights, folder)
    (folder / "config.yaml").write_text(weights.run.to_yaml(), encoding="utf-8")
    write_peft(weights, folder)
    said = f"the adapters of step {weights.step} as a folder of peft"
    if isinstance(weights.base, HuggingFaceWeights):
        return said
    return (
        f"{said}; peft itself cannot read their base {weights.base.folder}: name a Hugging Face"
        f" folder of it as base_model_name_or_path in {PAGE}"
    )


def _copy_text(weights, target: Path) -> bool:
    """Copies what a folder says about its text; returns whether it has a tokenizer that is read."""
    from jaxllm.text.files import copy_companions
    from jaxllm.weights.pretrained import text_folder

    if tokenizer := _tokenizer(weights):
        tokenizer.copy_to(target)
    else:
        copy_companions(text_folder(weights), target)
    return tokenizer is not None


def _tokenizer(weights):
    """The tokenizer of a run or a folder; None, said on the screen, without one that is read."""
    from jaxllm.text import Tokenizer, present
    from jaxllm.weights.pretrained import text_folder

    run = getattr(weights, "run", None)
    given = run and run.data.tokenizer
    path = folder = text_folder(weights)
    if not (path / "tokenizer.json").exists() and given and Path(given).expanduser().exists():
        path = Path(given)
    try:
        if path == folder and not present(path):
            raise InputError(f"{path} has no tokenizer.json; copy it there by hand")
        tokenizer = Tokenizer(path, end_token=run and run.data.end_token)
    except InputError as error:
        if (folder / "tokenizer.json").exists():
            raise
        print(f"no tokenizer is written: {error}")
        return None
    tokenizer.check(weights.config.vocab_size)
    return tokenizer
