"""Evaluates a model: jaxllm evaluate --checkpoint DIR [--data.path PATH ...]

Prints validation loss and perplexity on the run's validation data, or on all data that
--data.source and --data.path name; with --hellaswag the accuracy on HellaSwag instead, with --tasks
the results of lm-evaluation-harness.
"""

import argparse
import math
import re
import sys
from itertools import islice
from pathlib import Path

import numpy as np

from jaxllm.config import IGNORE, Config, MeshConfig, ModelConfig, load, round_up
from jaxllm.config.command_line import Parser, check_exists, exit_status
from jaxllm.data.opening import check_paths, open_dataset
from jaxllm.data.shards import Tokens
from jaxllm.errors import InputError, RunError, in_short
from jaxllm.files import parse_json, read_lines
from jaxllm.infer.generate import add_checkpoint
from jaxllm.terminal import counted, progress_bar
from jaxllm.text import Tokenizer
from jaxllm.weights.convert import train_section

_DECODED = 1 << 20  # tokens to decode at once; a character that is cut counts a few bytes more
ENDINGS = 4  # endings per question of HellaSwag
# {option: what it applies to}
VALID_WITH = {"batches": ("data",), "limit": ("--hellaswag", "--tasks")}
_OF_TASKS = "shots", "include_path", "out", "apply_chat_template"
VALID_WITH |= dict.fromkeys(_OF_TASKS, ("--tasks",))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: out of memory, 2: bad input."""
    return exit_status(lambda: _run(_read(argv)), memory="lower --batch_size")


def _read(argv: list[str] | None) -> argparse.Namespace:
    """The options, with the data's options as `overrides`; raises InputError for bad ones."""
    parser = Parser(
        prog="jaxllm evaluate",
        description=__doc__.partition("\n\n")[2],
        epilog="--data.KEY VALUE works as in jaxllm train; see jaxllm train --help",
    )
    add_checkpoint(parser)
    what = parser.add_mutually_exclusive_group()
    parser.option("--hellaswag FILE", "HellaSwag as JSON lines", among=what)
    parser.option("--tasks NAME,...", "tasks of lm-evaluation-harness", among=what)
    parser.option("--batch_size N", "rows in a batch (default: the run's for the loss, else 16)")
    parser.option("--batches N", "for the loss: use only the first N batches")
    parser.option("--limit N", "for HellaSwag and tasks: use only the first N questions")
    parser.option("--shots N", "for tasks: solved examples before each question")
    parser.option("--include_path DIR", "for tasks: a folder of your own, as YAML")
    parser.option("--apply_chat_template", "for tasks: ask as in a chat", default=None)
    parser.option("--out FILE", "for tasks: write all results here, as JSON")
    args, rest = parser.parse_known_args(argv)
    for name, least in (("batch_size", 1), ("batches", 1), ("limit", 1), ("shots", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise InputError(f"--{name}={getattr(args, name)} is not at least {least}")
    if args.tasks is not None and not all(args.tasks.split(",")):
        raise InputError(f"--tasks={args.tasks!r} has an empty name; separate names by one comma")
    args.overrides = parser.overrides(rest)
    if odd := [key for key in args.overrides if not key.startswith("data.")]:
        raise InputError(f"unknown argument --{odd[0]}; see --help")
    kind = "--hellaswag" if args.hellaswag else "--tasks" if args.tasks else "data"
    given = {name: kinds for name, kinds in VALID_WITH.items() if getattr(args, name) is not None}
    for option, kinds in (given | dict.fromkeys(args.overrides, ("data",))).items():
        if kind not in kinds:
            raise InputError(f"--{option} applies to {' and '.join(kinds)}, not to {kind}")
    check_exists(args.checkpoint, "--checkpoint ")
    return args


def _run(args: argparse.Namespace) -> None:
    if args.hellaswag:
        print(hellaswag(args))
    elif args.tasks:
        try:
            from jaxllm.infer.harness import evaluate
        except ModuleNotFoundError as e:
            fix = "install lm-evaluation-harness: uv run --extra harness, or pip install lm_eval"
            raise InputError(f"--tasks: {e}; {fix}") from e
        print(evaluate(args))
    else:
        print(validation(args))


def validation(args: argparse.Namespace) -> str:
    """One line with loss, perplexity and tokens; predicts every token but the first once."""
    is_run = (args.checkpoint / "config.yaml").is_file()
    config = _configuration(args.checkpoint, args.overrides) if is_run else None
    # Imported late, because JAX takes seconds and a wrong path should fail at once.
    import jax
    from flax import nnx

    from jaxllm.infer.decode import load_model
    from jaxllm.sharding import make_mesh
    from jaxllm.weights.pretrained import open_weights

    weights = open_weights(args.checkpoint, args.step)
    if config is None:
        if not args.overrides:
            raise InputError(
                f"{weights.folder} has no config.yaml, which names the data: add --data.path, or"
                " use --hellaswag or --tasks"
            )
        config = _configuration(weights.text, args.overrides, weights.config)
    if config.data.trains_tokenizer:
        raise InputError(
            f"{weights.folder} has no tokenizer.json, and a new tokenizer would not match its"
            " weights; copy the tokenizer.json that encoded the model's data there"
        )
    data = open_dataset(config, training=False)
    where = config.data.val_path or config.data.path or config.data.source
    said = f"data: {counted(data.val_tokens, 'token')} of {where} ({data.description})"
    print(said, file=sys.stderr)
    mesh = make_mesh(MeshConfig())
    total, count, rows = 0.0, 0, len(data.samples(data.val, whole=True))
    size = round_up(min(args.batch_size or config.train.batch_size, rows), mesh.size)
    rows = min(rows, size * (args.batches or rows))
    with jax.set_mesh(mesh), progress_bar("evaluating", rows, size=False) as done:
        graph, params = load_model(weights, mesh)
        loss_sum = jax.jit(lambda params, batch: nnx.merge(graph, params).loss(**batch))
        for n, batch in enumerate(islice(data.val_batches(size, 0, 1), args.batches), 1):
            total += float(loss_sum(params, batch))
            count += int((batch["labels"] != IGNORE).sum())
            done(n * size)
    if not math.isfinite(loss := total / count):
        raise RunError(f"the model's loss is {loss}: evaluate another checkpoint with --step")
    perplexity = math.exp(loss) if loss < 700 else math.inf
    text = f"step {weights.step}: loss {loss:.4f} nats a token, perplexity {perplexity:.2f}"
    text += f", {counted(count, 'token')}"
    tokenizer, val = data.tokenizer, data.val  # all tokens of Tokens have loss
    if tokenizer and isinstance(val, Tokens) and (size := text_bytes(tokenizer, val, count)):
        text += f", {total / math.log(2) / size:.4f} bits a byte"
    return text


def text_bytes(tokenizer: Tokenizer, tokens: Tokens, count: int) -> int:
    """Bytes of the text of the first `count` predicted tokens, without special tokens."""
    total, around = 0, [*tokenizer.begin, *tokenizer.finish]
    for first in range(1, count + 1, _DECODED):
        ids = tokens.read(first, min(first + _DECODED, count + 1))
        # Text by text, because some tokenizers begin each with a space, which decoding drops.
        for text in np.split(ids, np.flatnonzero(np.isin(ids, around))):
            total += len(tokenizer.decode(text, special=False, clean=False).encode())
    return total


def _configuration(
    folder: Path, overrides: dict[str, str], model: ModelConfig | None = None
) -> Config:
    """The configuration of the run in `folder`, with the data that the overrides name.

    model: for a folder that is not a run's; `train` is then the section that convert writes.
    """
    path = overrides.get("data.path", overrides.get("data.val_path", "null"))
    if "data.source" in overrides or "data.path" in overrides:  # evaluate on all of this data
        overrides = {"data.path": path, "data.val_path": path} | overrides
    own = folder / "tokenizer.json"
    given = overrides.get("data.tokenizer")
    overrides = overrides | ({"data.tokenizer": str(own)} if own.exists() else {})
    if model is None:
        config = load(str(folder / "config.yaml"), overrides)
    else:
        source = "jsonl" if re.search(r"\.(jsonl|ndjson|json)(\.gz|\.zst)?$", path) else "text"
        config = load(f"{model.type}_small", {"data.source": source} | overrides)
        config = config.model_copy(update={"model": model, "train": train_section(model)})
    check_paths(config.data, training=False)
    if own.exists() and given not in (None, "null"):
        Tokenizer(own).check_same(Tokenizer(given), chats=config.data.source == "chat")
    return config


def hellaswag(args: argparse.Namespace) -> str:
    """One line with the accuracies on HellaSwag.

    acc chooses the ending by its log-likelihood, acc_norm by its log-likelihood per character.
    Texts are prepared as in lm-evaluation-harness.
    """
    lines, where = read_lines(args.hellaswag, "--hellaswag"), f"--hellaswag {args.hellaswag}, line"
    questions = [_question(line, f"{where} {number}") for number, line in lines][: args.limit]

    from jaxllm.infer.decode import open_tokenizer
    from jaxllm.infer.scoring import Scorer
    from jaxllm.weights.pretrained import open_weights

    weights = open_weights(args.checkpoint, args.step)
    tokenizer = open_tokenizer(weights)
    rows = []  # (ids, tokens of the ending)
    for context, endings, _ in questions:
        begins = len(tokenizer.prompt(context))
        for ending in endings:
            ids = tokenizer.prompt(f"{context} {ending}")
            rows.append((ids, max(len(ids) - begins, 1)))
    scores = Scorer(weights, args.batch_size or 16)(rows)
    scores = np.reshape([score for score, _ in scores], (-1, ENDINGS))
    characters = np.array([[len(e) for e in endings] for _, endings, _ in questions])
    right = np.array([label for *_, label in questions])
    acc, acc_norm = (float((s.argmax(-1) == right).mean()) for s in (scores, scores / characters))
    return (
        f"step {weights.step}: HellaSwag acc_norm {acc_norm:.4f}, acc {acc:.4f},"
        f" {counted(len(questions), 'question')}"
    )


def _question(line: str, where: str) -> tuple[str, list[str], int]:
    """(context, endings, index of the right one); raises InputError with `where`, the line."""
    try:
        page = parse_json(line)
        split = "ctx_a" in page
        context = f"{page['ctx_a']} {page['ctx_b'].capitalize()}" if split else page["ctx"]
        if "activity_label" in page:
            context = f"{page['activity_label']}: {context}"
        endings, label = [_clean(e) for e in page["endings"]], int(page["label"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise InputError(
            f"{where} is not a question of HellaSwag ({in_short(e)}); it needs ctx, or ctx_a and"
            " ctx_b, endings and label"
        ) from e
    context = _clean(context)
    if len(endings) != ENDINGS or not all(endings) or not context or label not in range(ENDINGS):
        raise InputError(f"{where}: needs ctx, {ENDINGS} endings, a label from 0 to {ENDINGS - 1}")
    return context, endings, label


def _clean(text: str) -> str:
    """Removes the markup of WikiHow's pages."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
