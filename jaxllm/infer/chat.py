"""Talks with a chat model: jaxllm chat --checkpoint DIR

Ctrl-C ends an answer, Ctrl-D the chat.  /reset forgets the conversation, /system TEXT begins a new
one with a system message.
"""

import argparse
import sys
from collections.abc import Callable

from jaxllm.config.command_line import Parser, check_exists, exit_status
from jaxllm.errors import InputError, error_line
from jaxllm.infer.generate import add_options, check, sampling


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: out of memory, 2: bad input, 130: interrupted."""
    return exit_status(lambda: _run(_read(argv)), memory="lower --tokens")


def _read(argv: list[str] | None) -> argparse.Namespace:
    title, _, keys = __doc__.partition("\n\n")
    parser = Parser(prog="jaxllm chat", description=title.partition(": ")[0] + ".", epilog=keys)
    add_options(parser, tokens=1024)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    args = parser.parse_args(argv)
    check(args)
    return args


def _run(args: argparse.Namespace) -> None:
    check_exists(args.checkpoint, "--checkpoint ", "packed weights")
    from jaxllm.infer.writer import Writer

    writer = Writer(args.checkpoint, args.step, args.kv_cache_dtype == "float8")
    chat = Chat(args, writer)
    chat.check()
    writer.load()  # before anything is printed
    print(writer.tokenizer.describe(), file=sys.stderr)
    ask = _line_reader()
    while True:
        try:
            line = ask("> ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line:
            chat.say(line)


def _line_reader() -> Callable[[str], str]:
    if not sys.stdin.isatty():
        return lambda _: input()
    from prompt_toolkit import PromptSession

    return PromptSession().prompt


class Chat:
    """A conversation."""

    def __init__(self, args: argparse.Namespace, writer):
        self._args, self._writer = args, writer
        self._answers = 0
        self.reset(args.system)

    def reset(self, system: str | None) -> None:
        """Begins a new conversation."""
        self._system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def check(self) -> None:
        """Raises InputError if there is no chat template, or it refuses the system message."""
        self._writer.tokenizer.chat([*self.messages, {"role": "user", "content": "a"}])

    def say(self, line: str) -> None:
        """Obeys a command, or prints the answer to a message."""
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.reset(self._system)
        elif word == "/system":
            self.reset(rest.strip() or None)
        elif word.startswith("/"):
            error_line(f"unknown command {word}; /reset, /system TEXT, Ctrl-D ends the chat")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        from jaxllm.infer.writer import Text

        writer, tokenizer = self._writer, self._writer.tokenizer
        messages = [*self.messages, {"role": "user", "content": line}]
        config = sampling(self._args)
        try:
            ids, _ = tokenizer.chat(messages)
            room = config.tokens if writer.most is None else writer.most - len(ids)
            if room < 1:
                raise InputError(
                    f"the conversation's {len(ids)} tokens fill model.max_seq_len={writer.most};"
                    " /reset begins a new one"
                )
            config = config.model_copy(update={"tokens": min(config.tokens, room)})
            writer.check(ids, config.tokens)
        except InputError as error:  # the conversation stays as it was
            error_line(str(error))
            return
        text = Text(tokenizer, ids, self._args.stop, tokenizer.chat_ends, live=True)
        try:
            number = [(self._answers, 0)]
            writer.write([ids], number, [text], config, self._args.top_p, few_shapes=True)
        except KeyboardInterrupt:
            text.finish()
        print(flush=True)
        self._answers += 1
        self.messages = [*messages, {"role": "assistant", "content": text.text}]
