"""What a chat template makes of conversations: their forms, ids, and which tokens have loss."""

import contextlib
import json
import re

import pytest
from conversations import FOLDER, TEMPLATE, pair, with_template

from jaxllm.data import chat
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer
from jaxllm.text.chat import render

MASKS = json.loads((FOLDER / "masks.json").read_text(encoding="utf-8"))


def test_four_forms_give_the_same_messages():
    system = {"role": "system", "content": "S"}
    right = [system, *pair("Q", "A")]
    assert chat.conversation({"messages": right, "tools": None}) == (right, 0)
    said = [("system", "S"), ("human", "Q"), ("gpt", "A")]
    turns = [{"from": role, "value": text} for role, text in said]
    assert chat.conversation({"conversations": turns}) == (right, 0)
    more = dict(tool_calls=[{"function": {"name": "f"}}], reasoning_content="R", weight=0)
    found = chat.conversation({"conversations": [turns[1], turns[2] | more]})
    assert found == ([right[1], right[2] | more], 0)
    for system in ("S", ""):  # an empty one is none, as an empty input
        for key in ("system", "system_prompt"):
            found = chat.conversation({"conversations": turns[1:], key: system})
            assert found == (right[not system :], 0)
    for values in (
        dict(prompt="Q", completion="A", system="S"),
        dict(prompt=right[:2], completion=right[2:]),
        dict(prompt=right[:2], completion="A", system="other"),
    ):
        assert chat.conversation(values) == (right, 2)
    told = dict(instruction="Q", input="", output="A", system="S")
    assert chat.conversation(told) == (right, 0)
    told = dict(instruction="Do", input="this", output="A")
    assert chat.conversation(told) == (pair("Do\n\nthis", "A"), 0)


def told(i: int, template: str) -> list[dict]:
    """A conversation, without the calls that a template leaves out: with them it is refused."""
    gone = {"tool_calls"} if template in ("chatml", "trimmed") else set()
    return [{key: m[key] for key in m if key not in gone} for m in MASKS["conversations"][i]]


PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
CALLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@pytest.mark.parametrize("content", [PARTS, ["A"], {"A": 1}, 42, True])
def test_content_that_a_template_takes_for_none_is_refused(content, tmp_path):
    """Qwen3's template shows content that is no text as an empty one."""
    shows = "{{ m.content if m.content is string }}"
    tokenizer = Tokenizer(with_template(tmp_path / "a", TEMPLATE.replace("{{ m.content }}", shows)))
    given = [pair("Q", content), [*pair("Q", "A"), {"role": "tool", "content": content}]]
    for turns in given + [[*pair(PARTS, "A"), *pair("Q", "A")]] * (content == PARTS):
        with pytest.raises(InputError, match=r"leaves out content \(message \d\): write parts"):
            tokenizer.rendered(turns)


@pytest.mark.parametrize(
    ("shows", "turns"),
    [
        ("{{ m.content[0].text }}{{ m.content[1].text }}", pair(PARTS, PARTS)),
        (
            "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[1].function.name }}",
            [{"role": "assistant", "tool_calls": CALLS}],
        ),
    ],
)
def test_a_part_or_a_call_that_a_template_leaves_out_is_refused(shows, turns, tmp_path):
    for last, name in (("", "all"), (shows[shows.rindex("{{") :], "first")):
        template = TEMPLATE.replace("{{ m.content }}", shows.removesuffix(last))
        tokenizer = Tokenizer(with_template(tmp_path / name, template))
        with pytest.raises(InputError, match=r"\(mess") if last else contextlib.nullcontext():
            text = tokenizer.rendered(turns, answer=False)[0]
            assert text.endswith(("AB<|eot_id|>\n", "fg<|eot_id|>\n"))


def test_arguments_stay_text_where_the_conversation_quotes_them(tmp_path):
    """The quoted text was taken for what `tojson` writes: the call became Python's {'a': 1}."""
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    shows = "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
    tokenizer = Tokenizer(with_template(tmp_path / "a", TEMPLATE.replace("{{ m.content }}", shows)))
    turns = [*pair(json.dumps('{"a": 1}'), "")[:1], {"role": "assistant", "tool_calls": [call]}]
    assert tokenizer.rendered(turns, answer=False)[0].endswith('{"a": 1}<|eot_id|>\n')


def test_what_a_template_leaves_out_or_quotes_twice(tmp_path):
    """Where content is "" and not null, some show no calls: an empty answer would be trained.

    OpenAI's files have the arguments of calls as JSON text, which `tojson` would quote again.
    """
    shows = "{% if m.content is defined %}{{ m.content }}{% else %}{{ m.tool_calls }}{% endif %}"
    tokenizer = Tokenizer(with_template(tmp_path / "a", TEMPLATE.replace("{{ m.content }}", shows)))
    messages = pair("Q", None)
    messages[1]["tool_calls"] = [{"type": "function", "function": {"name": "now"}}]
    assert "'now'" in chat.render(tokenizer, {"messages": messages}, "assistant")[0]
    for messages[1]["content"] in ("", "So:"):
        for shown in (tokenizer.rendered, lambda m: chat.render(tokenizer, {"messages": m}, "all")):
            with pytest.raises((InputError, chat.Refused), match=r"out tool_calls \(message 2"):
                shown(messages)
    messages[1]["function_call"] = messages[1].pop("tool_calls")[0]
    with pytest.raises(InputError, match=r"leaves out function_call \(message 2"):
        tokenizer.rendered(messages)
    shows = "{% for m in messages if m.role != 'tool' %}" + TEMPLATE.partition("%}")[2]
    tokenizer = Tokenizer(with_template(tmp_path / "b", shows))
    for ask in (tokenizer.rendered, lambda m: chat.render(tokenizer, {"messages": m}, "all")):
        assert "A<|eot_id|>" in ask(pair("Q", "A"))[0]
        with pytest.raises((InputError, chat.Refused), match=r"leaves out content \(message 3\)"):
            ask([*pair("Q", "A"), {"role": "tool", "content": "A"}, *pair("Q", "A")])
    calls = lambda arguments: [{"function": {"name": "f", "arguments": arguments}}]
    shows = "{{ m.content or m.tool_calls | tojson }}"
    tokenizer = Tokenizer(with_template(tmp_path / "c", TEMPLATE.replace("{{ m.content }}", shows)))
    for given in ({"a": '"ä"'}, {}):
        asked = [
            {"role": "assistant"} | {"tool_calls": calls(x)}
            for x in (given, json.dumps(given, indent=1))
        ]
        text, other = (tokenizer.rendered([*pair("Q", "A"), message])[0] for message in asked)
        assert text == other
        assert json.dumps(given, ensure_ascii=False) in text
    written = {"role": "assistant", "tool_calls": calls('{"a":1}')}
    shows = "{{ messages[1].tool_calls[0].function.arguments }}"  # R1's takes the text
    assert render(shows, [*pair("Q", "A")[:1], written], {}, False)[0] == '{"a":1}'


@pytest.mark.parametrize("template", MASKS["templates"])
@pytest.mark.parametrize("family", MASKS["masks"])
def test_ids_and_masks_are_those_of_transformers(family, template, tmp_path):
    tokenizer = Tokenizer(with_template(tmp_path / "a", MASKS["templates"][template], family))
    assert chat.has_marks(tokenizer)
    for i, tools, ids, mask in MASKS["masks"][family][template]:
        values = dict(messages=told(i, template), tools=MASKS["tools"] if tools else None)
        if ids is None:
            with pytest.raises(chat.Refused, match="the chat template refuses"):
                chat.render(tokenizer, values, "assistant")
            continue
        ((mine, spoken),) = tokenizer.encode_rendered([chat.render(tokenizer, values, "assistant")])
        assert mine.tolist() == ids
        assert "".join(map(str, spoken.astype(int))) == mask
        assert 0 < spoken.sum() < len(ids)
        ((_, spoken),) = tokenizer.encode_rendered([chat.render(tokenizer, values, "all")])
        assert spoken.all()


def test_what_a_template_does_to_marked_text_is_done_to_the_text():
    """The marks kept `trim` from the spaces, and `length` counted them, unlike in transformers."""
    template = "{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}"
    said = lambda text: [{"role": "assistant", "content": text}]
    for use, text in (("{{ x | trim }}", "a "), ("{{ x | length }}{{ x }}", "a")):
        with pytest.raises(InputError, match="generation %} must be around what is printed"):
            render(template + use, said(text), {})
    assert render(template + "{{ x | trim | upper }}", said("a\ud800"), {}) == ("A?", [(0, 2)])


@pytest.mark.parametrize("marked", [True, False])
def test_an_answer_of_weight_0_has_no_loss(tmp_path, marked):
    template = MASKS["templates"]["chatml"]
    if not marked:
        template = re.sub(r"\{%-? *(end)?generation *-?%\}", "", template)
    tokenizer = Tokenizer(with_template(tmp_path / "a", template, "qwen2"))
    assert chat.has_marks(tokenizer) == marked
    turns = [*pair("Q", "first"), *pair("R", "second"), *pair("S", "third")]
    turns[1]["weight"], turns[3]["weight"], turns[5]["weight"] = 1, 0, None
    text, spans = chat.render(tokenizer, {"messages": turns}, "assistant")
    said = "".join(text[begin:end] for begin, end in spans)
    assert [word in said for word in ("first", "second", "third")] == [True, False, True]
    assert "second" in text
    turns[0]["weight"] = turns[2]["weight"] = 0
    whole, spans_of_all = chat.render(tokenizer, {"messages": turns}, "all")
    without = whole
    for begin, end in spans_of_all[::-1]:
        without = without[:begin] + without[end:]
    heading = "<|im_start|>user\n"
    assert without == f"{heading}Q<|im_end|>\n{heading}R<|im_end|>second<|im_end|>", without
    del turns[0]["weight"], turns[2]["weight"]
    named = {"user": "human", "assistant": "gpt"}
    turns = [{"from": named[m["role"]], "value": m["content"]} | m for m in turns]
    for turn in turns:
        del turn["role"], turn["content"]
    assert chat.render(tokenizer, {"conversations": turns}, "assistant") == (text, spans)
    with pytest.raises(chat.Refused, match="no assistant's turn"):
        chat.render(
            tokenizer,
            {"messages": [pair("Q", "A")[0], pair("Q", "A")[1] | {"weight": 0}]},
            "assistant",
        )
    with pytest.raises(InputError, match="messages: weight=0.5 must be 0 or 1"):
        chat.render(tokenizer, {"messages": [{"role": "user", "weight": 0.5}]}, "assistant")


@pytest.mark.parametrize(
    ("family", "template"),
    [("qwen2", "chatml"), ("llama3", "trimmed"), ("unigram", "bare"), ("tekken", "tools")],
)
def test_prefixes_give_the_masks_of_the_marks(family, template, tmp_path):
    """Without its marks, a template gives the same masks."""
    text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", MASKS["templates"][template])
    assert "generation" not in text.replace("add_generation_prompt", "")
    tokenizer = Tokenizer(with_template(tmp_path / "a", text, family))
    assert not chat.has_marks(tokenizer)
    for i, tools, ids, mask in MASKS["masks"][family][template]:
        values = dict(messages=told(i, template), tools=MASKS["tools"] if tools else None)
        if ids is not None:
            rendered = chat.render(tokenizer, values, "assistant")
            ((mine, spoken),) = tokenizer.encode_rendered([rendered])
            assert mine.tolist() == ids
            assert "".join(map(str, spoken.astype(int))) == mask


SPACED, TRIMMED = ["First answer {}", "Zwei{}"], ["First answer{}", "Zwei{}"]
PUBLISHED = {  # what has loss, with {} for the token that ends a turn
    **dict.fromkeys("generation mistral-v1 mistral qwen2.5 smollm2 zephyr".split(), SPACED),
    **dict.fromkeys(["llama3.1", "llama3.2"], TRIMMED),
    "llama2": [" First answer {}", " Zwei {}"],
    "r1": ["<｜Assistant｜>First answer {}", "<｜Assistant｜>Zwei{}"],
}
FAMILIES = {"qwen2.5": "qwen2", "r1": "r1-distill", "smollm2": "smollm2"}
ENDS = {"qwen2": "<|im_end|>", "r1-distill": "<｜end▁of▁sentence｜>", "smollm2": "<|im_end|>"}


@pytest.mark.parametrize("template", PUBLISHED)
def test_loss_is_on_what_the_assistant_says_in_published_templates(template, tmp_path):
    """Only R1's heading has loss, because what asks for an answer there is not in an answer."""
    text = (FOLDER.parent / "chat" / f"{template}.jinja").read_text()
    family = FAMILIES.get(template, "llama3")
    tokenizer = Tokenizer(with_template(tmp_path / "a", text, family))
    messages = [*pair("Q one", "First answer "), *pair("R two", "Zwei")]
    text, spans = chat.render(tokenizer, {"messages": messages}, "assistant")
    said = [said.format(ENDS.get(family, "<|eot_id|>")) for said in PUBLISHED[template]]
    assert [text[a:b] for a, b in spans] == said
    begun = {"messages": messages[1:]}  # by the assistant, after what the template says itself
    if template in ("llama2", "mistral-v1", "mistral"):
        with pytest.raises(chat.Refused, match="roles must alternate"):
            chat.render(tokenizer, begun, "assistant")
    else:
        text, spans = chat.render(tokenizer, begun, "assistant")
        assert [text[a:b] for a, b in spans] == said


@pytest.mark.parametrize("template", [TEMPLATE, MASKS["templates"]["chatml"]])
def test_a_prompt_has_no_loss_even_where_the_assistant_speaks_in_it(template, tmp_path):
    tokenizer = Tokenizer(with_template(tmp_path / "a", template))
    values = dict(prompt=[*pair("Q", "first"), *pair("R", "second")[:1]], completion="third")
    text, spans = chat.render(tokenizer, values, "assistant")
    assert [text[a:b] for a, b in spans] == ["third" + END[template]]


def test_only_the_answers_without_loss_lose_it_where_a_template_marks_the_last_one(tmp_path):
    """Marks were counted, so the last answer's was taken for that of an answer in the prompt."""
    marked = "{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
    shown = "{{ m.content }}<|eot_id|>"
    template = TEMPLATE.replace(
        shown, f"{{% if loop.last %}}{marked}{{% else %}}{shown}{{% endif %}}"
    )
    tokenizer = Tokenizer(with_template(tmp_path / "a", template))
    turns = [*pair("Q", "first"), *pair("R", "second")]
    turns[1]["weight"] = 0
    for values in (dict(prompt=turns[:3], completion="second"), dict(messages=turns)):
        text, spans = chat.render(tokenizer, values, "assistant")
        assert [text[a:b] for a, b in spans] == ["second<|eot_id|>"]
    forgets = template.replace("{{ m.role }}", "{{ m.role if loop.last else 'x' }}")
    tokenizer = Tokenizer(with_template(tmp_path / "b", forgets))
    with pytest.raises(chat.Refused, match="renders earlier messages differently"):
        chat.render(tokenizer, values, "assistant")


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ("llama2", None),
        ("mistral", None),
        ("mistral", [{"type": "function", "function": {"name": "f"}}]),
    ],
)
def test_a_first_message_without_loss_that_a_template_moves_is_refused(template, tools, tmp_path):
    """Llama 2 shows a system message in the next one, Mistral it and tools in the last question."""
    text = (FOLDER.parent / "chat" / f"{template}.jinja").read_text()
    tokenizer = Tokenizer(with_template(tmp_path / "a", text))
    turns = [*pair("Q", "A"), *pair("R", "B")[:1]]
    if not tools:
        turns.insert(0, {"role": "system", "content": "S"})
    turns[0]["weight"] = 0
    with pytest.raises(chat.Refused, match="does not show where a message of weight 0 is"):
        chat.render(tokenizer, dict(messages=turns, tools=tools), "all")


END = {TEMPLATE: "<|eot_id|>", MASKS["templates"]["chatml"]: "<|im_end|>"}


def test_todays_date_is_not_in_the_ids_but_a_conversations_variables_are(tmp_path):
    dated = "{{ strftime_now('%d %b %Y') }}{{ mood }}{{ tools }}" + TEMPLATE
    tokenizer = Tokenizer(with_template(tmp_path / "a", dated))
    values = {"messages": pair("Q", "A")}
    text, spans = chat.render(tokenizer, values, "assistant")
    assert text.startswith("26 Jul 2024None<|start")
    # A conversation may have variables of its own, as by TRL.
    values["chat_template_kwargs"] = {"mood": "glad", "add_generation_prompt": True, "tools": 1}
    glad = text.replace("None", "gladNone")
    moved = [(begin + 4, end + 4) for begin, end in spans]
    assert chat.render(tokenizer, values, "assistant") == (glad, moved)
    with pytest.raises(chat.Refused, match=r"kwargs=\[1\] must be an object with keys$"):
        chat.render(tokenizer, values | {"chat_template_kwargs": [1]}, "assistant")
