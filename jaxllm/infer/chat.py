"""Talks with a chat model: jaxllm chat --checkpoint DIR

Ctrl-C ends an answer, Ctrl-D the chat.  /reset forgets the conversation, /system TEXT begins a new
one with a system message.
"""

import argparse
import sys
from collections.abc import Callable

from jaxllm.config.command_line import Parser, exit_status
from jaxllm.errors import InputError, error_line
from jaxllm.infer.generate import add_options, check_utf8, checked


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: out of memory, 2: bad input, 130: interrupted."""
    return exit_status(lambda: _run(_read(argv)), memory="lower --tokens")


def _read(argv: list[str] | None) -> argparse.Namespace:
    title, _, keys = __doc__.partition("\n\n")
    parser = Parser(prog="jaxllm chat", description=title.partition(": ")[0] + ".", epilog=keys)
    add_options(parser, tokens=1024)
    parser.option("--system TEXT", "the system message")
    return checked(parser, argv)


def _run(args: argparse.Namespace) -> None:
    from jaxllm.infer.writer import Writer

    writer = Writer(args)
    chat = Chat(args, writer)
    writer.load(writer.tokenizer.chat_ends)  # before anything is printed
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
        self._args, self._writer, self._answers = args, writer, 0
        self.reset(args.system)

    def reset(self, system: str | None) -> None:
        """Begins a conversation; raises InputError if no chat template takes the system message."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        self._writer.tokenizer.chat([*messages, {"role": "user", "content": "a"}])
        self._system, self.messages = system, messages

    def say(self, line: str) -> None:
        """Runs a command, or prints the answer to a message; an error changes nothing."""
        word, _, rest = line.partition(" ")
        try:
            check_utf8(line)
            if word == "/reset":
                self.reset(self._system)
            elif word == "/system":
                self.reset(rest.strip() or None)
            elif word.startswith("/"):
                raise InputError(f"unknown command {word}; /reset, /system TEXT, Ctrl-D to end")
            else:
                self._answer(line)
        except InputError as error:
            error_line(str(error))

    def _answer(self, line: str) -> None:
        from jaxllm.infer.writer import Text

        writer, tokenizer, config = self._writer, self._writer.tokenizer, self._writer.config
        messages = [*self.messages, {"role": "user", "content": line}]
        ids, _ = tokenizer.chat(messages)
        if writer.most is not None:
            if (room := writer.most - len(ids)) < 1:
                raise InputError(
                    f"the conversation's {len(ids)} tokens fill model.max_seq_len={writer.most};"
                    " /reset begins a new one"
                )
            config = config.model_copy(update={"tokens": min(config.tokens, room)})
        text = Text(tokenizer, ids, self._args.stop, tokenizer.chat_ends, live=True)
        try:
            writer.write([ids], [(self._answers, 0)], [text], config, few_shapes=True)
        except KeyboardInterrupt:
            text.finish()
        print(flush=True)
        self._answers += 1
        self.messages = [*messages, {"role": "assistant", "content": text.text}]
