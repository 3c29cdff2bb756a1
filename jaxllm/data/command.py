"""jaxllm data: `prepare` turns text into tokens, `train-tokenizer` trains a BPE."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from jaxllm.config.command_line import Parser, exit_status, holds
from jaxllm.config.sections import LARGEST_BPE, SMALLEST_BPE
from jaxllm.data.encoded import prepare_chat
from jaxllm.data.paths import Found, by_split, find_files
from jaxllm.data.prepare import prepare
from jaxllm.data.sources import Source
from jaxllm.errors import InputError
from jaxllm.files import inside
from jaxllm.terminal import counted
from jaxllm.text import Tokenizer, train_tokenizer

_READ = {"text": "as plain text; --special_tokens tokens makes them tokens", "tokens": "as tokens"}


def _parser() -> Parser:
    parser = Parser(prog="jaxllm data", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "prepare",
        help="turn text into llm.c token shards, or conversations into tokens with and without"
        " loss; run it again to continue after an interruption",
    )
    _add_source(command, "|chat")
    command.option("--tokenizer PATH", "a tokenizer.json or its folder", required=True)
    command.option("--out DIR", "folder to write the shards to", required=True)
    command.option("--shard_tokens N", "tokens per shard", default=100_000_000)
    command.option("--val_fraction X", "share of documents to hold out", default=0.01)
    command.option("--special_tokens text|tokens", "what special tokens' names are", default="text")
    command.option("--end_token NAME", "the token between documents (default: the tokenizer's)")
    command.option("--loss assistant|all", "tokens of a chat to predict", default="assistant")
    of_text = ("text_column", "shard_tokens", "val_fraction", "special_tokens", "end_token")
    command.set_defaults(
        run=_prepare,
        of_text={name: command.get_default(name) for name in of_text},
        of_chat={"loss": command.get_default("loss")},
    )

    command = commands.add_parser("train-tokenizer", help="train a byte-level BPE on the text")
    command.set_defaults(run=_train_tokenizer)
    _add_source(command)
    command.option("--vocab_size N", "entries; 256 are bytes", required=True)
    command.option("--out FILE", "the tokenizer.json to write", required=True)
    return parser


def _add_source(command: Parser, more: str = "") -> None:
    command.option(f"--source stdlib|text|jsonl|parquet{more}", "", required=True)
    command.option("--path PATH", "file, folder or quoted glob; stdlib takes none")
    command.option("--text_column NAME", "column of the text", default="text")


def _open(args: Namespace, *, validates: bool) -> Source:
    """Opens and prints the data that the options name; validates: whether a split may validate."""
    if args.path and inside(args.out, Path(args.path).expanduser()):
        raise InputError(f"--out={args.out} is inside --path={args.path}; choose another --out")
    found = find_files(args.source, args.path, key="--path")
    found, val = by_split(args.source, found, None if validates else Found([]))
    if val.files:
        raise InputError(
            f"--path={args.path} has files to train on ({found.files[0][0]}) and to validate on"
            f" ({val.files[0][0]}): prepare each with an --out for data.path and data.val_path"
        )
    print(f"{args.path or args.source}: {found.describe()}{found.left_out}")
    return Source(args.source, found.files, args.text_column)


def _prepare(args: Namespace) -> None:
    for name, value in (args.of_text if args.source == "chat" else args.of_chat).items():
        if getattr(args, name) != value:
            raise InputError(f"--{name} is not for --source={args.source}; omit it")
    if (what := holds(args.out)) not in (None, "prepared data"):
        raise InputError(f"--out={args.out} holds {what}; choose another --out")
    source = _open(args, validates=True)
    tokenizer = Tokenizer(args.tokenizer, end_token=args.end_token)
    if args.source == "chat":
        with _writing(args.out):
            lines = prepare_chat(source, tokenizer, args.loss, args.out)
        print(*lines, sep="\n")
        return
    with _writing(args.out):
        tokens = prepare(source, tokenizer, args)
    print(f"{args.out}: {tokens['train']:,} training, {counted(tokens['val'], 'validation token')}")
    read = _READ[args.special_tokens]
    print(f"{counted(tokens['names'], 'name')} of special tokens in the text, {read}")
    print(tokenizer.documents())
    if not tokens["val"]:
        print("no document is held out: without data.val_path, training holds out the last tokens")


def _train_tokenizer(args: Namespace) -> None:
    source = _open(args, validates=False)
    if args.out.exists() or args.out.is_symlink():
        raise InputError(f"{args.out} exists: choose another --out")
    if not SMALLEST_BPE <= args.vocab_size <= LARGEST_BPE:
        least = f"{SMALLEST_BPE} (every byte, and the end of text)"
        raise InputError(f"--vocab_size={args.vocab_size} is not from {least} to {LARGEST_BPE}")
    if next(source.pieces(), None) is None:
        raise InputError("the data is empty: no document in it has any text")
    with _writing(args.out):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer((x.text for x in source.pieces()), args.vocab_size, args.out)
    print(f"{args.out}: {Tokenizer(args.out).vocab_size:,} entries")


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # such as a full disk
        raise InputError(f"cannot write to {out}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 2: bad input, 130: interrupted."""

    def run() -> None:
        args = _parser().parse_args(argv)
        args.run(args)

    return exit_status(run, interrupted="interrupted: run it again; `prepare` alone goes on")
