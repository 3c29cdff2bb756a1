"""jaxllm chat and generate --chat, with a model that says what it is told."""

import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conversations import TEMPLATE, with_template
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from tiny_models import tiny
from tokenizer_families import EXPECTED, FOLDER

from jaxllm.errors import InputError
from jaxllm.infer import chat, decode, generate, writer
from jaxllm.text import Tokenizer
from jaxllm.text.chat import render

TOKENIZER = Tokenizer(FOLDER / "llama3")
END = "<|end_of_text|>"
EOM, EOT = (TOKENIZER.special[f"<|{name}|>"] for name in ("eom_id", "eot_id"))
WEIGHTS = dict(text=FOLDER / "llama3", run=SimpleNamespace(data=SimpleNamespace(end_token=None)))


@pytest.fixture
def model(monkeypatch):
    """Takes answers, and what to raise after them; seen: the rows of ids it continued, and how."""
    answers, seen, configs = [], [], []

    def stream(graph, params, rows, config, **_):
        seen.extend(rows)
        configs.append(config)
        said, error = answers.pop(0)
        ids = TOKENIZER.encode(said)[: config.tokens]
        yield from np.array([ids] * len(rows)).T
        if error is not None:
            raise error

    config = tiny("llama3", vocab_size=TOKENIZER.vocab_size, max_seq_len=400)
    weights = SimpleNamespace(config=config, **WEIGHTS)
    monkeypatch.setattr(writer, "open_weights", lambda *_: weights)
    monkeypatch.setattr(decode, "load_model", lambda *_: (None, None))
    monkeypatch.setattr(decode, "in_compute_dtype", lambda params, *_, **__: params)
    monkeypatch.setattr(decode, "stream_tokens", stream)
    return SimpleNamespace(answers=answers, seen=seen, configs=configs)


def ids_of(*messages):
    roles = ("user", "assistant") * len(messages)
    turns = [dict(role=r, content=c) for r, c in zip(roles, messages, strict=False)]
    return TOKENIZER.chat(turns)[0]


def test_generate_answers_a_message(model, capsys, tmp_path):
    model.answers.append(("Hello <|python_tag|>you<|eom_id|> no", None))
    command = f"--checkpoint {tmp_path} --chat --tokens 99 --prompt".split()
    assert generate.main([*command, " Hi! "]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello you\n"  # ends at <|eom_id|>; other special tokens are not shown
    assert model.seen == [ids_of(" Hi! ")]
    assert "ends at <|end_of_text|> or <|eom_id|> or <|eot_id|>" in err


def test_the_token_that_the_template_puts_after_an_answer_ends_one(tmp_path):
    """A base model's files name the end of a document alone."""
    folder = with_template(tmp_path / "base", TEMPLATE.replace("<|eot_id|>", " <|eom_id|>"))
    page = json.loads((folder / "tokenizer_config.json").read_text())
    page["eos_token"] = "<|end_of_text|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(page))
    (folder / "generation_config.json").write_text('{"eos_token_id": 295}')
    tokenizer = Tokenizer(folder)
    assert (tokenizer.ends, tokenizer.chat_ends) == ({295}, {295, EOM})
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert Tokenizer(folder).chat_ends == {295}
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer(folder).chat_ends == {295}
    assert TOKENIZER.chat_ends == TOKENIZER.ends


def test_the_folders_settings_hold_where_no_option_is_given(model, monkeypatch, capsys, tmp_path):
    folder = shutil.copytree(FOLDER / "llama3", tmp_path / "a")
    weights = SimpleNamespace(**vars(writer.open_weights()) | {"text": folder})
    monkeypatch.setattr(writer, "open_weights", lambda *_: weights)
    (folder / "generation_config.json").write_text('{"eos_token_id": 295}')
    command = f"--checkpoint {tmp_path} --tokens 9 --prompt Hi".split()
    for more, ends in ((["--chat"], f"{END} or <|eot_id|>"), ([], END)):  # says what ends it
        model.answers.append(("a", None))
        assert generate.main([*command, *more]) == 0
        assert f", ends at {ends}\n" in capsys.readouterr().err
    page = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5, "min_length": 2}
    (folder / "generation_config.json").write_text(json.dumps(page))
    for given, right in (("", (0.5, 3, 1.0)), ("--temperature 0.8 --top_p 0.9", (0.8, 3, 0.9))):
        model.answers.append(("a", None))
        assert generate.main([*command, *given.split()]) == 0
        config = model.configs.pop()
        assert (config.temperature, config.top_k, config.top_p) == right
        assert (config.tokens, config.repetition_penalty) == (9, 1.5)
        assert "repetition_penalty=1.5; not applied, remove" in capsys.readouterr().err
    (folder / "generation_config.json").write_text('{"top_p": 2}')
    assert generate.main(command) == 2
    assert "settings of " in (said := capsys.readouterr().err)
    assert said.endswith("top_p=2: must be at most 1\n")


def test_the_name_of_a_special_token_stops_a_text(model, capsys, tmp_path):
    """It never becomes text, so as a string it was never found."""
    model.answers.append(("Hello <|python_tag|>you<|eom_id|>", None))
    command = f"--checkpoint {tmp_path} --chat --tokens 99 --stop <|python_tag|> --prompt Hi"
    assert generate.main(command.split()) == 0
    assert capsys.readouterr().out == "Hello \n"


def test_generate_answers_conversations(model, capsys, tmp_path):
    conversations = [
        EXPECTED["MESSAGES"],
        {"messages": EXPECTED["CALLS"], "tools": EXPECTED["TOOLS"], "date_string": "today"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(x) + "\n\n" for x in conversations))
    model.answers.append(("Hi<|eot_id|>.", None))
    command = f"--checkpoint {tmp_path} --chat --tokens 4 --prompts {path}"
    assert generate.main([*command.split(), "--tokens", "1"]) == 2
    assert "exceed model.max_seq_len=400" in capsys.readouterr().err
    path.write_text(json.dumps(conversations[0]) + "\n" + json.dumps(conversations[0][1:]))
    assert generate.main(command.split()) == 0
    answer = "--- prompt {}, sample 1\nHi\n"
    assert capsys.readouterr().out == answer.format(1) + answer.format(2)
    right = [TOKENIZER.chat(EXPECTED[name])[0] for name in ("MESSAGES", "NO_SYSTEM")]
    assert model.seen == right


def test_what_else_stands_beside_messages_is_for_the_template(model, capsys, tmp_path):
    asked = [{"role": "user", "content": "a\ud800b"}]  # JSON may hold half a character
    page = {"messages": asked, "documents": [{"text": "x"}], "self": 1, "answer": 0, "id": 3}
    (tmp_path / "a.jsonl").write_text(json.dumps(page))
    model.answers.append(("Hi<|eot_id|>", None))
    command = f"--checkpoint {tmp_path} --chat --prompts {tmp_path / 'a.jsonl'}"
    assert generate.main(command.split()) == 0, capsys.readouterr().err
    assert model.seen == [ids_of("a?b")]
    template = "{{ documents[0].text }}{{ messages[0].content }}"
    assert render(template, asked, {"documents": [{"text": "x"}]})[0] == "xa?b"
    assert render("{{ documents }}", [], {})[0] == "None"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "conversation 2: not JSON"),
        ('[{"role": "user", "role": "system"}]', "2: not JSON: an object has 'role' twice"),
        ("[]", "conversation 2 is neither a list of messages"),
        ('{"messages": "x"}', "conversation 2 is neither a list of messages"),
        ("[3]", "conversation 2 is neither a list of messages"),
        ('[{"role": "tool"}]', "error: prompt 2: the chat template refuses the conversation"),
        ('{"messages": [{}], "tools": "x"}', "prompt 2: tools must be a list of objects"),
        ('{"messages": [{}], "tools": 5}', "prompt 2: tools must be a list of objects"),
        ('{"messages": [{}], "continue_final_message": true}', "2: continue_final_message is not"),
    ],
)
def test_bad_conversations_give_one_line(model, capsys, tmp_path, line, named):
    (tmp_path / "a.jsonl").write_text('[{"role": "user", "content": "x"}]\n' + line)
    command = f"--checkpoint {tmp_path} --chat --prompts {tmp_path / 'a.jsonl'}"
    assert generate.main(command.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err


def test_content_is_never_printed_as_python_prints_it():
    """transformers' text of Llama 3.1's template has "[{'type': 'text', ..." in it."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    template = (FOLDER.parent / "chat/llama3.1.jinja").read_text()
    for text in (template, "{{ '' + messages[0].content }}"):
        for messages in (parts, [{"role": "user", "content": {"a": 1}}]):
            with pytest.raises(InputError, match="content must be text: join the texts of its p"):
                render(text, messages, {"bos_token": ""})
    assert render("{{ messages[0].content[0].text }}", parts, {})[0] == "Hi"  # it takes them


def test_a_chat_remembers_what_was_said(model, capsys, monkeypatch, tmp_path):
    lines = ["Hi", "", "How?", "/nope", "/reset", "Hi", "/system Be brief.", "Hi", "x" * 400]
    lines += ["caf\udce9", "/system \udce9", "So?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    model.answers += [("Hello<|eot_id|>", None), ("Fine ", KeyboardInterrupt())]
    model.answers += [("A<|eom_id|>", None), ("B<|eot_id|>", None), ("C<|eot_id|>", None)]
    assert chat.main(f"--checkpoint {tmp_path} --tokens 99".split()) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\nFine \nA\nB\nC\n"
    brief = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    more = [*brief, {"role": "assistant", "content": "B"}, {"role": "user", "content": "So?"}]
    assert model.seen == [
        ids_of("Hi"),
        ids_of("Hi", "Hello", "How?"),  # Ctrl-C ended the answer
        ids_of("Hi"),
        TOKENIZER.chat(brief)[0],
        TOKENIZER.chat(more)[0],
    ]
    assert "unknown command /nope; /reset, /system TEXT" in err
    assert "error: 'caf\\udce9' is not UTF-8\nerror: '/system \\udce9' is not UTF-8\n" in err
    assert "tokens fill model.max_seq_len=400; /reset begins a new one" in err


def test_a_refused_system_message_leaves_the_chat_as_it_was(model, capsys, monkeypatch, tmp_path):
    folder = with_template(tmp_path / "t", TEMPLATE.replace("critic", "system"))
    weights = SimpleNamespace(**vars(writer.open_weights()) | {"text": folder})
    monkeypatch.setattr(writer, "open_weights", lambda *_: weights)
    monkeypatch.setattr("sys.stdin", io.StringIO("/system Be brief.\nHi\n/reset\nHi\n"))
    model.answers += [("A<|eot_id|>", None), ("B<|eot_id|>", None)]
    assert chat.main(f"--checkpoint {tmp_path}".split()) == 0
    out, err = capsys.readouterr()
    assert (out, err.count("no systems")) == ("A\nB\n", 1)
    assert model.seen[0] == model.seen[1]


def test_a_chat_needs_a_template(model, capsys, monkeypatch, tmp_path):
    weights = SimpleNamespace(
        config=tiny("llama3", vocab_size=294), text=FOLDER / "gpt2", run=WEIGHTS["run"]
    )
    monkeypatch.setattr(writer, "open_weights", lambda *_: weights)
    assert chat.main(["--checkpoint", str(tmp_path)]) == 2
    assert "gpt2 has no chat template" in capsys.readouterr().err


def test_a_terminal_has_a_history(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        ask = chat._line_reader()
        keys.send_text("one\n")
        assert ask("> ") == "one"
        keys.send_text("\x1b[A, two\n")  # the key Up
        assert ask("> ") == "one, two"
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            ask("> ")
