"""Text from a trained model: python -m jaxllm.generate --checkpoint DIR --prompt TEXT

DIR is a run's directory.  Text goes to stdout, as it comes if it is one, speed to stderr.
"""

import argparse
import sys
import time
from pathlib import Path

from jaxllm.cli import Parser
from jaxllm.errors import InputError
from jaxllm.metrics import error_line


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 2: bad input, 130: interrupted."""
    try:
        _run(_read(argv))
    except InputError as error:
        error_line(str(error))
        return 2
    except KeyboardInterrupt:
        print("", file=sys.stderr)
        return 130
    return 0


def _read(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m jaxllm.generate",
        description=__doc__.partition(": ")[0] + ".",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a run's directory")
    parser.add_argument("--step", type=int, help="its checkpoint (default: the newest)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="what the text goes on from")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt on each line")
    parser.add_argument("--tokens", type=int, default=200, help="to write (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: the likeliest token (%(default)s)"
    )
    parser.add_argument("--top_k", type=int, default=50, help="0: choose among all (%(default)s)")
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="choose among the likeliest that reach it (1: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice (%(default)s)")
    parser.add_argument("--samples", type=int, default=1, help="texts of each prompt (%(default)s)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="STRING", help="end before it; repeatable"
    )
    args = parser.parse_args(argv)
    for name, least, most in (
        ("tokens", 1, None),
        ("temperature", 0, None),
        ("top_k", 0, None),
        ("top_p", 0, 1),
        ("seed", 0, 2**32 - 1),
        ("samples", 1, None),
    ):
        value = getattr(args, name)
        if not (least <= value < float("inf")) or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"from {least} to {most}"
            raise InputError(f"--{name}={value} is not {limit}")
    if "" in args.stop:
        raise InputError("--stop is empty: it would stop at once")
    return args


def _run(args: argparse.Namespace) -> None:
    prompts = [args.prompt] if args.prompts is None else _lines(args.prompts)
    # JAX takes seconds to import: a wrong command line is told before that.
    import jax

    from jaxllm import sample
    from jaxllm.config import MeshConfig, SampleConfig
    from jaxllm.sharding import make_mesh

    weights = sample.open_run(args.checkpoint, args.step)
    tokenizer = sample.open_tokenizer(weights)
    rows = [ids for prompt in prompts for ids in [tokenizer.encode(prompt)] * args.samples]
    if not all(rows):
        raise InputError("a prompt is empty; give at least one character")
    most = sample.most_tokens(weights.config)
    longest = max(map(len, rows))
    if most is not None and longest + args.tokens > most:
        raise InputError(
            f"the prompt's {longest} tokens and --tokens={args.tokens} exceed"
            f" model.max_seq_len={most}; shorten the prompt or lower --tokens"
        )
    config = SampleConfig(
        tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    texts = [Text(tokenizer, args.stop, live=len(rows) == 1) for _ in rows]
    if len(rows) == 1:
        print(prompts[0], end="", flush=True)
    made = seconds = compiled = 0.0
    with jax.set_mesh(mesh):
        graph, params = sample.put_model(weights, mesh)
        clock = time.perf_counter()
        for n, tokens in enumerate(sample.stream(graph, params, rows, config, top_p=args.top_p)):
            if n == 1:  # the first two compiled their programs
                compiled, clock = time.perf_counter() - clock, time.perf_counter()
            for text, token in zip(texts, tokens, strict=True):
                text.add(int(token))
            made += len(rows) if n > 1 else 0
            seconds = time.perf_counter() - clock
            if all(text.done for text in texts):
                break
    for i, text in enumerate(texts):
        text.finish()
        if len(rows) > 1:
            prompt, number = divmod(i, args.samples)
            print(f"--- prompt {prompt + 1}, sample {number + 1}")
            print(prompts[prompt] + text.text)
    if len(rows) == 1:
        print(flush=True)
    if made:
        print(
            f"{made / seconds:,.0f} tokens/s ({made:.0f} tokens in {seconds:.2f} s, {len(rows)} at"
            f" once; {compiled:.1f} s before them for the prompt and to compile)",
            file=sys.stderr,
        )


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"--prompts {path} cannot be read: {e}") from e
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompts {path} holds no prompt")
    return prompts


class Text:
    """The text of one row, token by token, up to a stop string or the end of the document.

    live: print what is certain at once: whole characters that do not begin a stop string.
    """

    def __init__(self, tokenizer, stops: list[str], live: bool):
        self.tokenizer, self.stops, self.live = tokenizer, stops, live
        self.ids: list[int] = []
        self.text, self.printed, self.done = "", 0, False

    def add(self, token: int) -> None:
        """One more token; without effect on a text that is done."""
        if self.done:
            return
        if token == self.tokenizer.end_of_text:
            self.done = True
            return
        self.ids.append(token)
        self.text = self.tokenizer.decode(self.ids)
        found = [at for at in map(self.text.find, self.stops) if at >= 0]
        if found:
            self.text, self.done = self.text[: min(found)], True
            return
        certain = self.text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character's first bytes
        held = max((_overlap(certain, stop) for stop in self.stops), default=0)
        self._show(len(certain) - held)

    def finish(self) -> None:
        """Prints what was held back."""
        self._show(len(self.text))

    def _show(self, end: int) -> None:
        if self.live and end > self.printed:
            print(self.text[self.printed : end], end="", flush=True)
            self.printed = end


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    return next(n for n in range(len(stop), -1, -1) if text.endswith(stop[:n]))


if __name__ == "__main__":
    sys.exit(main())
