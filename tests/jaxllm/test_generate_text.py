"""What generation writes: whole characters up to a stop string, speed, and the command's errors."""

import subprocess
import sys

import pytest
from tokenizer_families import FOLDER

from jaxllm.infer import generate, writer
from jaxllm.infer.writer import Text
from jaxllm.text import Tokenizer


class Letters:
    """A tokenizer of bytes; a character may take several tokens."""

    special, byte_tokens, cleans, vocab_size = {}, frozenset(), False, 256

    def cleaned(self, text):
        return text

    def decode(self, ids, clean=True):
        return bytes(ids).decode(errors="replace")


def test_text_streams_whole_characters_and_ends_before_a_stop_string(capsys):
    text = Text(Letters(), b"x", ["ENDE", "!!"], {0}, live=True)
    shown = []
    for token in "aéEN ENDEx".encode():
        text.add(token)
        shown.append(capsys.readouterr().out)
    text.finish()
    assert shown == ["a", "", "é", "", "", "EN ", "", "", "", "", ""]
    assert (text.text, text.done, capsys.readouterr().out) == ("aéEN ", True, "")
    text = Text(Letters(), [], ["ENDE"], {0}, live=True)
    for token in [*b"aEN", 0, *b"b"]:
        text.add(token)
    text.finish()
    assert capsys.readouterr().out == "aEN"
    stops = ["abcd", "c", "bc!"]  # the first to begin counts, though another ends before it
    for content, wanted in (("xabcdc", "x"), ("xabce", "xab"), ("abc", "ab"), ("abc!d", "a")):
        text = Text(Letters(), b"x", stops, {0}, live=True)
        writer.Speed(1).fill([text], ([token] for token in content.encode()))
        assert (text.text, capsys.readouterr().out) == (wanted, wanted), content
    for content, wanted in (
        ("né", "né"),
        (b"n\xffa", "n"),
        (b"n\xc3", "n"),
        ("né!\N{BELL}\xff", "n"),
    ):
        text = Text(Letters(), b"x", ["\N{REPLACEMENT CHARACTER}", "é!"], {0}, live=True)
        tokens = content.encode() if isinstance(content, str) else content
        writer.Speed(1).fill([text], ([token] for token in tokens))
        assert (text.text, capsys.readouterr().out) == (wanted, wanted), content


def test_ids_beyond_the_tokenizer_do_not_divide_a_row_of_bytes():
    tokenizer = Tokenizer(FOLDER / "llama2")  # a row that is no UTF-8 has no letters
    row = [tokenizer._library.token_to_id(f"<0x{byte:02X}>") for byte in b"ab\xff"]
    ids = [tokenizer.encode("x")[-1], *row[:2], tokenizer.vocab_size, row[2]]
    text = Text(tokenizer, [], [], {0})
    for token in ids:
        text.add(token)
    assert text.text == tokenizer.decode(ids) == "x" + 3 * "\N{REPLACEMENT CHARACTER}"


def test_text_decodes_only_its_last_tokens():
    class Counted(Letters):
        longest = 0

        def decode(self, ids, clean=True):
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    tokenizer = Counted()
    text = Text(tokenizer, [], [], {0})
    content = "Zwölf Boxkämpfer: \N{GRINNING FACE}! " * 9
    broken = content.encode()[:7] + b"\xf0\xff" + content.encode()  # no characters
    for token in broken:
        text.add(token)
    assert text.text == broken.decode(errors="replace")
    assert tokenizer.longest <= 24


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--prompt x", "--checkpoint"),
        (
            "--checkpoint nowhere --prompt x",
            "--checkpoint nowhere does not exist: name a run's directory, packed weights or",
        ),
        ("--checkpoint . --prompts missing.txt", "missing.txt"),
        ("--checkpoint . --prompts -", "--prompts /dev/stdin has no line of text"),
        ("--checkpoint nowhere --prompt x --top_p 1.5", "--top_p=1.5"),
        ("--checkpoint nowhere --prompt x --temperature nan", "--temperature=nan"),
        ("--checkpoint nowhere --prompt x --tokens 0", "--tokens=0"),
        ("--checkpoint nowhere --prompt x --batch_size 0", "--batch_size=0"),
        ("--checkpoint nowhere --prompt x --top_k 2147483648", "--top_k=2147483648"),
        ("--checkpoint nowhere --prompt x --tokens 2147483648", "--tokens=2147483648"),
        ("--checkpoint nowhere --prompt \udcff", "is not UTF-8"),
        ("--checkpoint nowhere --prompt -x", "--prompt: expected one argument (write OPTION=VALUE"),
    ],
)
def test_bad_input_gives_one_line(capsys, monkeypatch, tmp_path, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert generate.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_full_disk_for_the_output_is_an_error():
    code = """import sys
from jaxllm.config import command_line
sys.exit(command_line.exit_status(lambda: print("the text")))"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    error = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, error)


def test_speed_counts_all_tokens_and_times_the_full_blocks_after_the_first(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(writer.time, "perf_counter", lambda: now[0])

    def stream(batch, steps):  # 1 token, and blocks of 2, each of which takes a second
        for n in range(steps):
            now[0] += (batch if n == 1 else 1.0) if n % 2 else 0.0
            yield b"abc\0" if n == 6 else b"abcd"  # one text ends at the seventh step

    def texts():
        return [Text(Letters(), b"x", [], {0}) for _ in range(4)]

    speed = writer.Speed(block=2)
    for batch in (5.0, 1.0):  # the first batch compiles
        written = texts()
        speed.fill(written, stream(batch, 7))
        assert [text.text for text in written] == ["a" * 7, "b" * 7, "c" * 7, "d" * 6]
    assert speed.tokens == 2 * 27
    # The blocks at n = 3 and 5 follow the first: 4 x 3 + 3 tokens in 2 s, twice.
    right = "54 tokens in 10.00 s, 4 at once: 6.0 s for prompts and compilation, then 8 tokens/s"
    assert speed.line(4) == right
    ended = texts()
    speed.fill(ended, iter([bytes(4), b"abcd"]))  # after the last end no token is asked for
    assert (speed.line(4), {text.text for text in ended}) == (right, {""})
    for steps, more in ((8, 4), (9, 8)):  # half of the last block takes as long as all of it
        speed = writer.Speed(block=2)
        speed.fill(texts()[:2], stream(1.0, steps))
        assert (speed.timed, speed.timed_seconds) == (4 + more, 1 + more / 4)
    short = writer.Speed(block=2)
    short.fill(texts()[:1], stream(1.0, 1))
    assert short.line(1).startswith("1 token in 0.00 s, 1 at once: too few")


def test_only_tokens_that_a_text_shows_are_counted():
    for content, count in ((b"aENDEx", 5), (b"ab\0cd", 2), (b"abc", 3)):
        text = Text(Letters(), b"x", ["ENDE"], {0})
        for token in content:
            text.add(token)
        assert text.count == count
