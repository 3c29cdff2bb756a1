"""Writes text with a trained model: jaxllm generate --checkpoint DIR --prompt TEXT

DIR is a run's directory, packed weights or a Hugging Face folder.  Text goes to stdout, token by
token if it is a single one; what ends it and the speed go to stderr.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxllm.config import SampleConfig, sampling
from jaxllm.config.command_line import Parser, check_exists, exit_status
from jaxllm.errors import InputError
from jaxllm.files import parse_json, read_lines

SETTINGS = ("temperature", "top_k", "top_p", "seed")  # as in the section `sample`


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: out of memory, 2: bad input."""
    return exit_status(lambda: _run(_read(argv)), memory="lower --batch_size or --tokens")


def _read(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="jaxllm generate", description=__doc__.partition(": ")[0] + ".")
    what = parser.add_mutually_exclusive_group(required=True)
    parser.option("--prompt TEXT", "the text to continue", among=what)
    parser.option("--prompts FILE", "one prompt per non-blank line; -: standard input", among=what)
    parser.option(
        "--chat",
        "the prompt is a message to a chat model; each line of --prompts is a conversation:"
        ' JSON messages, or {"messages": ..., "tools": ...}',
    )
    parser.option("--samples N", "texts per prompt", default=1)
    parser.option("--batch_size N", "texts to compute at once", default=32)
    add_options(parser, tokens=200)
    return checked(parser, argv)


def add_checkpoint(parser: Parser) -> None:
    """Adds the options that name a model."""
    parser.option(
        "--checkpoint DIR",
        "a run's directory, a Hugging Face folder, or what jaxllm convert --quantize made",
        required=True,
    )
    parser.option("--step N", "step of the checkpoint (default: the newest)")


def add_options(parser: Parser, tokens: int) -> None:
    """Adds the options that generate and chat share; tokens: the default of --tokens."""
    add_checkpoint(parser)
    parser.option("--tokens N", "largest number of tokens to write", default=tokens)
    for name in SETTINGS:
        field = SampleConfig.model_fields[name]
        first = "" if name == "seed" else "the folder's, else "
        said = f"{field.description} (default: {first}{field.default})"
        parser.option(f"--{name} {'X' if isinstance(field.default, float) else 'N'}", said)
    parser.option(
        "--kv_cache_dtype auto|float8",
        "auto: model.compute_dtype; float8: half the bytes, e4m3",
        default="auto",
    )
    parser.option(
        "--stop STRING",
        "end a text before this string, or at this special token; may be repeated",
        action="append",
        default=[],
    )


def checked(parser: Parser, argv: list[str] | None) -> argparse.Namespace:
    """The arguments, with the sampling settings as `config`; raises InputError for bad ones."""
    args = parser.parse_args(argv)
    for name in ("tokens", "samples", "batch_size"):
        if not 1 <= getattr(args, name, 1) < 2**31:
            raise InputError(f"--{name}={getattr(args, name)} is not from 1 to {2**31 - 1}")
    for text in (*map(vars(args).get, ("prompt", "system")), *args.stop):
        check_utf8(text or "")
    if "" in args.stop:
        raise InputError("--stop is empty: every text would stop at once")
    settings = {name: x for name in SETTINGS if (x := getattr(args, name)) is not None}
    args.config = sampling("--", tokens=args.tokens, **settings)
    check_exists(args.checkpoint, "--checkpoint ")
    return args


def check_utf8(text: str) -> None:
    """Raises InputError for surrogates, which Python puts in place of bytes that are not UTF-8."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise InputError(f"{text!r:.50} is not UTF-8")


def _run(args: argparse.Namespace) -> None:
    texts = [args.prompt]
    if args.prompts is not None:
        file = Path("/dev/stdin") if args.prompts == Path("-") else args.prompts
        texts = [line for _, line in read_lines(file, "--prompts")]
    chats = [_conversation(args, text, n) for n, text in enumerate(texts, 1)] if args.chat else None
    # Imported late, because JAX takes seconds and a bad command line should fail at once.
    from jaxllm.infer.decode import check_fits
    from jaxllm.infer.writer import Text, Writer

    writer = Writer(args)
    tokenizer, prompts = writer.tokenizer, []
    for n, text in enumerate(texts):
        try:
            ids = tokenizer.prompt(text) if chats is None else tokenizer.chat(**chats[n])[0]
            check_fits(ids, args.tokens, writer.most)
        except InputError as e:
            raise InputError(f"prompt {n + 1}: {e}" if len(texts) > 1 else str(e)) from e
        prompts.append(ids)
    ends, shown = tokenizer.ends, texts
    if chats is not None:
        ends, shown = tokenizer.chat_ends, [""] * len(texts)
    writer.load(ends)  # before anything is printed
    total = len(prompts) * args.samples
    size = min(args.batch_size, total)
    if total == 1:
        print(shown[0], end="", flush=True)
    for first in range(0, total, size):
        numbers = range(first, min(first + size, total))
        samples = [divmod(number, args.samples) for number in numbers]
        samples += [samples[0]] * (size - len(samples))  # one shape, one program
        rows = [prompts[prompt] for prompt, _ in samples]
        written = [
            Text(tokenizer, row, args.stop, ends, live=total == 1) for row in rows[: len(numbers)]
        ]
        writer.write(rows, samples, written, writer.config)
        for (prompt, copy), text in zip(samples, written, strict=False):
            if total > 1:
                print(f"--- prompt {prompt + 1}, sample {copy + 1}")
                print(shown[prompt] + text.text, flush=True)
    if total == 1:
        print(flush=True)
    print(writer.speed.line(size), file=sys.stderr)


def _conversation(args: argparse.Namespace, text: str, number: int) -> dict[str, Any]:
    """The arguments of Tokenizer.chat for a message, or for a line of JSON."""
    if args.prompts is None:
        return {"messages": [{"role": "user", "content": text}]}
    try:
        page = parse_json(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"--prompts {args.prompts}, conversation {number}: not JSON: {e}") from e
    page = {"messages": page} if isinstance(page, list) else page
    messages = page.get("messages") if isinstance(page, dict) else None
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
        raise InputError(
            f"--prompts {args.prompts}, conversation {number} is neither a list of messages nor an"
            ' object with one under "messages"; a message is {"role": "user", "content": "..."}'
        )
    # The other keys are for the template, except names of `Tokenizer.chat`'s own arguments.
    return {key: value for key, value in page.items() if key not in ("self", "answer")}
