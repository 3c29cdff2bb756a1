"""Writes text with a trained model: jaxllm generate --checkpoint DIR --prompt TEXT

DIR is a run's directory, or a folder of packed weights.  Text goes to stdout, token by token if it
is a single one; the speed goes to stderr.
"""

import argparse
import sys
import time
from pathlib import Path

from jaxllm.config.command_line import Parser, check_exists, exit_status
from jaxllm.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: out of memory, 2: bad input, 130: interrupted."""
    return exit_status(lambda: _run(_read(argv)), memory="lower --batch_size or --tokens")


def _read(argv: list[str] | None) -> argparse.Namespace:
    args = _parser().parse_args(argv)
    _check(args)
    return args


def _parser() -> Parser:
    parser = Parser(prog="jaxllm generate", description=__doc__.partition(": ")[0] + ".")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="a run's directory, or a folder that jaxllm convert --quantize made",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    what.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a file with one prompt per non-blank line"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        metavar="N",
        help="largest number of tokens to write (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0: always the most likely token; higher: more random (default: %(default)s)",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        default=50,
        metavar="K",
        help="sample among the K most likely tokens; 0: all (default: %(default)s)",
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the most likely tokens with total probability P (default: 1, all)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="texts per prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=32,
        metavar="N",
        help="texts to compute at once (default: %(default)s)",
    )
    parser.add_argument(
        "--kv_cache_dtype",
        choices=("auto", "float8"),
        default="auto",
        help="auto: model.compute_dtype; float8: half the bytes, e4m3 (default: %(default)s)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="STRING",
        help="end a text before this string; may be repeated",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raises InputError for a number out of its range or a text that cannot be encoded."""
    for name, least, most in (
        ("tokens", 1, None),
        ("temperature", 0, None),
        ("top_k", 0, None),
        ("top_p", 0, 1),
        ("seed", 0, 2**32 - 1),
        ("samples", 1, None),
        ("batch_size", 1, None),
    ):
        value = getattr(args, name)
        if not (least <= value < float("inf")) or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"from {least} to {most}"
            raise InputError(f"--{name}={value} is not {limit}")
    for text in (args.prompt or "", *args.stop):
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InputError(f"{text!r} is not UTF-8")
    if "" in args.stop:
        raise InputError("--stop is empty: every text would stop at once")


def _run(args: argparse.Namespace) -> None:
    prompts = [args.prompt] if args.prompts is None else _lines(args.prompts)
    check_exists(args.checkpoint, "--checkpoint ", "packed weights")
    # Imported late, because JAX takes seconds and a bad command line should fail at once.
    import jax

    from jaxllm.config import MeshConfig, SampleConfig
    from jaxllm.infer import decode
    from jaxllm.sharding import make_mesh

    weights = decode.open_run(args.checkpoint, args.step)
    float8 = args.kv_cache_dtype == "float8"
    if float8 and weights.config.type == "vlstm":
        raise InputError(
            "--kv_cache_dtype=float8: a vLSTM keeps a state, not keys and values; leave it out"
        )
    tokenizer = decode.open_tokenizer(weights)
    ids = [tokenizer.prompt(text) for text in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise InputError(f"the prompt {prompt!r} has no tokens; give at least one character")
    most = decode.most_tokens(weights.config)
    longest = max(map(len, ids))
    if most is not None and longest + args.tokens > most:
        raise InputError(
            f"the prompt's {longest} tokens and --tokens={args.tokens} exceed"
            f" model.max_seq_len={most}; shorten the prompt or lower --tokens"
        )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    total = len(prompts) * args.samples
    size = min(args.batch_size, total)
    speed = Speed(decode.block_size())
    with jax.set_mesh(mesh):
        graph, params = decode.load_model(weights, mesh)
        # Once for all texts.
        dtype = weights.config.compute_dtype
        params = decode.in_compute_dtype(params, dtype, table=False, consume=True)
        if total == 1:
            print(prompts[0], end="", flush=True)
        for first in range(0, total, size):
            numbers = range(first, min(first + size, total))
            samples = [divmod(number, args.samples) for number in numbers]
            samples += [samples[0]] * (size - len(samples))  # one shape, one program
            rows = [ids[prompt] for prompt, _ in samples]
            texts = [Text(tokenizer, args.stop, live=total == 1) for _ in numbers]
            config = SampleConfig(
                tokens=args.tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                seed=args.seed,
            )
            speed.begin()
            stream = decode.stream_tokens(
                graph,
                params,
                rows,
                config,
                samples=samples,
                top_p=args.top_p,
                float8_cache=float8,
            )
            for tokens in stream:
                before = sum(text.count for text in texts)
                for text, token in zip(texts, tokens, strict=False):
                    text.add(int(token))
                speed.add(sum(text.count for text in texts) - before)
                if all(text.done for text in texts):
                    break
            speed.end()
            for number, text in zip(numbers, texts, strict=True):
                text.finish()
                if total > 1:
                    prompt, copy = divmod(number, args.samples)
                    print(f"--- prompt {prompt + 1}, sample {copy + 1}")
                    print(prompts[prompt] + text.text, flush=True)
    if total == 1:
        print(flush=True)
    print(speed.line(size), file=sys.stderr)


class Speed:
    """Counts tokens, and times those after the first block of each batch.

    The first block includes the pass over the prompts and, in the first batch, compilation, so its
    time is not a measure of speed.
    """

    def __init__(self, block: int):
        self.block = block
        self.tokens, self.seconds = 0, 0.0  # of all blocks
        self.timed, self.timed_seconds = 0, 0.0  # after the first block

    def begin(self) -> None:
        """Starts a batch."""
        self.steps, self.begun, self.clock = 0, time.perf_counter(), None

    def add(self, tokens: int) -> None:
        """Counts a step: every row has a new token, and `tokens` of them belong to texts."""
        if self.steps == 1:  # the first block has arrived
            self.clock = time.perf_counter()
        if self.steps > self.block:
            self.timed += tokens
        self.tokens += tokens
        self.steps += 1

    def end(self) -> None:
        """Ends a batch."""
        now = time.perf_counter()
        self.seconds += now - self.begun
        if self.clock is not None:
            self.timed_seconds += now - self.clock

    def line(self, size: int) -> str:
        """A line with tokens, time and speed; size: texts at once."""
        text = f"{self.tokens:,} tokens in {self.seconds:.2f} s, {size} at once"
        if not self.timed:
            return f"{text}: too few to separate from the prompts and the compilation"
        waited = self.seconds - self.timed_seconds
        return (
            f"{text}: {waited:.1f} s for prompts and compilation, then"
            f" {self.timed / self.timed_seconds:,.0f} tokens/s"
        )


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"--prompts {path} cannot be read: {e}") from e
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompts {path} holds no prompt")
    return prompts


class Text:
    """The text of one row, decoded token by token up to a stop string or the end of the document.

    live: print text as soon as it is certain: whole characters that cannot begin a stop string.
    """

    def __init__(self, tokenizer, stops: list[str], live: bool):
        self.tokenizer, self.stops, self.live = tokenizer, stops, live
        self.text, self.printed, self.done = "", 0, False
        self.count = 0  # tokens, excluding the one that ends the document
        # Only the last tokens are decoded again, because their text may depend on a neighbor.
        # `whole` is the text up to the last whole character; it includes `before` of these tokens.
        self.ids: list[int] = []
        self.before, self.whole = 0, ""

    def add(self, token: int) -> None:
        """Appends a token; does nothing if the text is done."""
        if self.done:
            return
        if token in self.tokenizer.ends:
            self.done = True
            return
        self.ids.append(token)
        self.count += 1
        known = self.tokenizer.decode(self.ids[: self.before])
        self.text = self.whole + self.tokenizer.decode(self.ids)[len(known) :]
        found = [at for at in map(self.text.find, self.stops) if at >= 0]
        if found:
            self.text, self.done = self.text[: min(found)], True
            return
        # A replacement character at the end may be the first bytes of a character.
        certain = self.text.rstrip("\N{REPLACEMENT CHARACTER}")
        if certain == self.text:
            self.ids, self.whole = self.ids[self.before :], self.text
            self.before = len(self.ids)
        withheld = max((_overlap(certain, stop) for stop in self.stops), default=0)
        self._show(len(certain) - withheld)

    def finish(self) -> None:
        """Prints the text that was withheld."""
        self._show(len(self.text))

    def _show(self, end: int) -> None:
        if self.live and end > self.printed:
            print(self.text[self.printed : end], end="", flush=True)
            self.printed = end


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of `text` that begin `stop`."""
    return next(n for n in range(len(stop), -1, -1) if text.endswith(stop[:n]))
