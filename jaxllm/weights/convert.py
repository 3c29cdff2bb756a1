"""Converts a Hugging Face folder into a run's directory, or back: jaxllm convert SOURCE OUT

SOURCE determines the direction.  A Hugging Face folder (GPT-2, Llama 3, xLSTM: config.json and
safetensors) becomes a run's directory: a checkpoint of the parameters, and a config.yaml with which
jaxllm train starts from them.  A run's directory becomes a Hugging Face folder.

With --quantize either becomes a folder of packed weights for jaxllm generate and jaxllm evaluate.
It has the matrices of the blocks in few bits, and with --head also the head, which otherwise stays
in bfloat16, like embedding and positions; norms, biases and a vLSTM's two gates stay in float32.
"""

import argparse
import shlex
from pathlib import Path

from jaxllm.config import FORMATS, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jaxllm.config.command_line import Parser, check_exists, check_writable, exit_status
from jaxllm.errors import InputError, RunError
from jaxllm.files import new_folder, write_json
from jaxllm.terminal import counted
from jaxllm.text import Tokenizer, present
from jaxllm.text.files import ALWAYS, Pages, class_of, companions, take_ids, write_text


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: write failed, 2: bad input, 130: interrupted."""
    parser = Parser(prog="jaxllm convert", description=__doc__.partition("\n\n")[2])
    parser.option("source SOURCE", "the folder to convert")
    parser.option("out OUT", "the folder to create")
    parser.option("--step N", "step of the checkpoint of a run to convert (default: the newest)")
    parser.option("--dtype float32|bfloat16", "of tensors to write (default: float32, lossless)")
    parser.option("--merge", "add a run's adapters to its weights (default dtype: bfloat16)")
    formats = "|".join(FORMATS)
    parser.option(f"--quantize {formats}", "pack the weights in this format")
    parser.option(
        "--group 32|64|128|none",
        "with --quantize: weights of a column that share a scale; none: all (default: 128)",
    )
    parser.option(
        f"--head {formats}",
        "with --quantize: pack the head in this format, too (default: it stays in bfloat16)",
    )
    parser.option("--asymmetric", "with --quantize int8 to int1: an offset for each group, too")

    def run() -> None:
        args = parser.parse_args(argv)
        check_exists(args.source)
        convert(args, _packing(args))

    return exit_status(run, interrupted="interrupted: nothing was written")


def _packing(args: argparse.Namespace):
    """The Packing that the options name; None without --quantize."""
    if args.quantize is None:
        if given := [name for name in ("group", "head", "asymmetric") if getattr(args, name)]:
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


def convert(args: argparse.Namespace, packing) -> None:
    """Converts a folder into a new one, which is complete or does not exist.

    args: the options.  Without merge, a run with model.lora becomes a folder of peft.
    packing: a Packing, which makes a folder of packed weights; or None.
    Raises InputError for bad input and if `out` exists, RunError if it cannot be written.
    """
    from jaxllm.weights import adapters, pretrained

    source, out = args.source, args.out.absolute()  # printed commands work in every directory
    dtype, merge = args.dtype, args.merge
    plain = out.is_dir() and not out.is_symlink() and not out.is_mount()  # may be renamed over
    if out.exists() and not (plain and not any(out.iterdir())):
        raise InputError(f"{out} exists: choose another folder")
    check_writable(out)
    weights = pretrained.open_weights(source, args.step)
    adapts, of_run = isinstance(weights, adapters.AdapterWeights), weights.run is not None
    alone = adapts and not merge  # the adapters without their base
    if weights.packing is not None and not adapts:
        raise InputError(f"{source} holds packed weights ({weights.packing}); convert their source")
    if merge and not adapts:
        raise InputError(f"--merge is for adapters, and {source} holds no adapters")
    if alone and packing is not None:
        raise InputError(f"--quantize needs --merge, because {source} holds some adapters")
    if alone and dtype:
        raise InputError("--dtype needs --merge: adapters are written in float32")
    if alone and not of_run:
        raise InputError(f"{source} is a folder of peft already; --merge makes a whole model")
    if dtype and not (adapts or of_run):
        raise InputError(f"--dtype is for a run's directory; {source} is not one")
    try:
        with new_folder(out) as folder:
            if packing is None and (merge or (of_run and not adapts)):
                dtype = dtype or ("bfloat16" if merge else "float32")
                result = _to_huggingface(weights, folder, dtype)
            else:
                result = _to_ours(weights, folder, out, packing, merge)
            if isinstance(weights, adapters.AdapterWeights) and merge:
                weights.verify()
    except (OSError, RunError) as error:
        raise RunError(f"cannot write {out}: {error}") from error
    print(f"{out}: {weights.config.type}, {counted(weights.config.n_layers, 'layer')}; {result}")


def train_section(model: ModelConfig) -> TrainConfig:
    """The default training settings for a model from another library's folder."""
    return TrainConfig(steps=1000, batch_size=8, seq_len=min(1024, model.max_seq_len))


def _to_ours(weights, folder: Path, out: Path, packing, merge: bool) -> str:
    """Writes packed weights, the adapters of a run, or what `jaxllm train` starts from."""
    from jaxllm.weights import adapters, checksums, huggingface, packed
    from jaxllm.weights.run import write_checkpoint

    tokenizer = str(out / "tokenizer.json") if _copy_text(weights, folder) else None
    run, model = weights.run, weights.config
    if run is None:  # another library's folder
        init_from = str(out if packing is None else weights.folder)
        run = Config(
            model=model.model_copy(update={"init_from": init_from}),
            data=DataConfig(tokenizer=tokenizer),
            train=train_section(model),
            optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=20),
        )
    run = run.model_copy(update={"model": weights.plain}) if merge else run
    (folder / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
    about = {"config": run.model_dump()} | checksums.tokenizer_digest(folder)
    if packing is not None:
        about |= {"step": weights.step, "packed_from": str(weights.folder)}
        size = packed.write_packed(folder, run.model, packing, weights, about)
        use = f"jaxllm generate --checkpoint {shlex.quote(str(out))}"
        return f"{packing}, {size / 1e6:,.1f} MB; to use: {use}"
    if weights.run is not None:
        adapters.write_peft(weights, folder)
        said = f"the adapters of step {weights.step} as a folder of peft"
        if weights.packing:  # without this packing the losses differ: with few bits, a lot
            said += f", which cannot say that their base was {weights.packing}; --merge keeps that"
        if not isinstance(weights.base, huggingface.HuggingFaceWeights):
            said += f"; peft itself cannot read their base {weights.base.folder}: name a Hugging"
            said += f" Face folder of it as base_model_name_or_path in {adapters.PAGE}"
        return said
    check_writable(out, checkpoints=True)
    about |= dict(data_fingerprint=None, samples=0, converted_from=str(weights.folder))
    write_checkpoint(folder / "checkpoints", weights, about)
    train = f"jaxllm train --config {shlex.quote(str(out / 'config.yaml'))}"
    return f"to train on your text: {train} --data.source text --data.path FILE_OR_FOLDER"


def _to_huggingface(weights, folder: Path, dtype: str) -> str:
    from jaxllm.weights import huggingface, huggingface_config, places

    config, tokenizer = weights.config, _copy_text(weights, folder)
    pages = Pages(folder)
    page = huggingface_config.config_json(config, dtype, pages.model)
    page |= tokenizer.export_to(folder, page["model_type"]) if tokenizer else take_ids(folder)
    write_json(folder / "config.json", page, indent=2)
    tensors = (
        (place.name, place.to_theirs(config, {ours: weights.param(ours) for ours in place.ours}))
        for place in places.places(config)
    )
    huggingface.write_tensors(folder, config, dtype, tensors)
    said = f"the checkpoint of step {weights.step} as a Hugging Face folder"
    always = ALWAYS["qwen2"]
    if tokenizer and page["model_type"] == "qwen2" and class_of(pages) != always:
        said += f"; transformers' AutoTokenizer makes a {always} of its tokenizer, which splits"
        said += " text in another way: load it with PreTrainedTokenizerFast"
    return said


def _copy_text(weights, target: Path) -> Tokenizer | None:
    """Copies a folder's files about text; prints why and returns None if no tokenizer is read."""
    folder, run = weights.text, weights.run
    try:
        if not present(folder):
            raise InputError(f"{folder} has no tokenizer.json; copy it there by hand")
        tokenizer = Tokenizer(folder, end_token=run and run.data.end_token)
    except InputError as error:
        if (folder / "tokenizer.json").exists():
            raise
        print(f"no tokenizer is written: {error}")
        write_text(companions(folder), target)
        return None
    tokenizer.check(weights.config.vocab_size)
    tokenizer.copy_to(target)
    return tokenizer
