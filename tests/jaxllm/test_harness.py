"""Compares lm-evaluation-harness on a run with its "hf" model (fixtures/evaluation)."""

import functools
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import slow
from evaluation_run import EXPECTED, TEXTS, run_of
from huggingface_folders import FIXTURES

from jaxllm.errors import InputError
from jaxllm.infer import evaluate
from jaxllm.text import Tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
# The harness and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")
TASKS = ["toy_choice", "toy_rolling", "toy_write"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(TEXTS)  # the tasks give their data relative to the working directory


@pytest.mark.parametrize("name", [n if n == "gpt2" else slow(n) for n in EXPECTED])
def test_metrics_scores_and_texts_equal_hugging_face(name, tmp_path):
    from jaxllm.infer.harness import RunLM, TaskManager

    with jax.default_matmul_precision("highest"):  # a GPU would take TF32
        found = lm_eval.simple_evaluate(
            model=RunLM(run_of(name, tmp_path), batch_size=3),
            tasks=TASKS,
            task_manager=TaskManager(include_path="tasks", include_defaults=False),
            bootstrap_iters=0,
        )
    for task in TASKS:
        expected = EXPECTED[name][task]
        for metric, number in expected["metrics"].items():
            assert found["results"][task][f"{metric},none"] == pytest.approx(number, rel=1e-5)
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        for sample, replies in zip(samples, expected["replies"], strict=True):
            ours = [r[0] if isinstance(r, tuple) else r for r in sample["filtered_resps"]]
            if task == "toy_write":
                assert ours == replies
            else:
                np.testing.assert_allclose(ours, replies, rtol=1e-5)


def test_texts_are_encoded_as_by_the_hf_model():
    """After bos, else eos; what the post-processor adds comes once."""
    from jaxllm.infer.harness import RunLM

    def lm(name):
        found = object.__new__(RunLM)
        found.tokenizer = Tokenizer(FIXTURES / "text" / name)
        return found

    llama, qwen, gpt2 = lm("llama2"), lm("qwen2"), lm("gpt2")
    assert (llama.prefix_token_id, llama.eot_token_id) == (1, 2)  # <s>, </s>
    end = qwen.tokenizer.special["<|im_end|>"]  # Qwen has no bos token
    assert (qwen.prefix_token_id, qwen.eot_token_id) == (end, end)
    assert gpt2.prefix_token_id == gpt2.tokenizer.special["<|endoftext|>"]
    assert llama.tok_encode("the<s>") == [*llama.tokenizer.prompt("the"), 1]
    assert llama.tok_encode("<s>the") == llama.tokenizer.encode("<s>the")
    assert llama.tok_encode("the", add_special_tokens=False) == llama.tokenizer.encode("the")


def test_chats_are_rendered_as_by_the_hf_model():
    """Compared with lm_eval's HFLM of transformers 5.24, which computed these texts."""
    from jaxllm.infer.harness import RunLM

    lm, asked = object.__new__(RunLM), [{"role": "user", "content": "Who?"}]
    lm.tokenizer = Tokenizer(FIXTURES / "text" / "qwen2")
    system = [{"role": "system", "content": "Be brief."}]
    begun = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
    begun += "<|im_start|>assistant\n"
    assert lm.apply_chat_template(system + asked) == begun
    answer = [{"role": "assistant", "content": "Who?"}]  # stays open
    given = system + asked + answer
    assert lm.apply_chat_template(given, add_generation_prompt=False) == f"{begun}Who?"
    assert given[-1] == {"role": "assistant", "content": "Who?"}
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    refuses += "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    name, lm.tokenizer.chat_templates["default"] = lm.tokenizer_name, refuses
    answer[0]["content"] += " "
    assert lm.apply_chat_template(system + asked + answer, False) == "[Who?][Who?"
    assert lm.chat_template(True) == refuses
    assert name.isalnum()
    assert name != lm.tokenizer_name  # the harness keeps requests under this name


def test_an_empty_context_to_continue_is_the_prefix(monkeypatch):
    """As an empty context to score; what followed no token was arbitrary."""
    from jaxllm.infer import harness

    lm, seen = object.__new__(harness.RunLM), []
    lm.tokenizer = Tokenizer(FIXTURES / "text" / "gpt2")
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    lm.scorer = SimpleNamespace(size=2, most=None, graph=None, params=None, mesh=mesh)
    stream = lambda graph, params, rows, *_, **__: seen.extend(rows) or iter(())
    monkeypatch.setattr(harness, "stream_tokens", stream)
    requests = [SimpleNamespace(args=(text, {})) for text in ("", "the")]
    assert lm.generate_until(requests) == ["", ""]
    assert [lm.prefix_token_id] in seen


def test_the_command_runs_tasks_from_a_folder(tmp_path, capsys, monkeypatch):
    from jaxllm.infer import harness

    run = run_of("gpt2", tmp_path)
    capsys.readouterr()
    words = f"--checkpoint {run} --tasks toy_choice --include_path tasks --out {tmp_path}/all.json"
    assert evaluate.main(words.split()) == 0
    out = capsys.readouterr().out
    accuracy = EXPECTED["gpt2"]["toy_choice"]["metrics"]["acc"]
    assert re.search(rf"\|toy_choice\|.*\|acc +\|.*\| *{accuracy:.2g}\|", out), out
    page = json.loads((tmp_path / "all.json").read_text())
    assert page["results"]["toy_choice"]["acc,none"] == accuracy
    manager = functools.partial(
        harness.TaskManager, include_defaults=False
    )  # indexing the defaults takes seconds
    monkeypatch.setattr(harness, "TaskManager", manager)
    for change, named in (
        ("--tasks nothing --include_path tasks", "--tasks nothing is not a task"),
        ("--tasks toy_choice", "--tasks toy_choice is not a task"),
        ("--tasks toy_choice --include_path none", "--include_path none is not a folder"),
        (
            "--tasks toy_choice --include_path tasks --apply_chat_template",
            f"{run} has no chat template: put a chat_template.jinja there",
        ),
        ("--tasks nothing --out no/a.json", "--out no/a.json cannot be written: No such file"),
    ):
        assert evaluate.main(["--checkpoint", str(run), *change.split()]) == 2
        assert capsys.readouterr().err.startswith(f"error: {named}")


def test_a_context_of_spaces_alone_is_scored_after_the_prefix(tmp_path):
    """The harness moves the spaces into the answer; it then had the log-likelihood 0."""
    from lm_eval.api.instance import Instance

    from jaxllm.infer.harness import RunLM

    lm = RunLM(run_of("gpt2", tmp_path), batch_size=2)
    pairs = [("  ", "the"), ("", "  the"), ("\n", "the"), ("", "\nthe")]
    scores = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    assert scores[0] == scores[1]
    assert scores[2] == scores[3]
    assert max(score for score, _ in scores) < -1


def test_a_name_may_be_a_pattern_and_a_bad_task_is_one_line(tmp_path, capsys):
    """As with lm-eval, mmlu_* names all tasks that match."""
    run = run_of("gpt2", tmp_path)
    (tmp_path / "bad").mkdir()
    task = "dataset_path: json\ndataset_kwargs: {data_files: {validation: tasks/toy_write.jsonl}}\n"
    task += "validation_split: validation\noutput_type: generate_until\ndoc_to_target: ''\n"
    changes = dict(
        syntax="doc_to_text: '{{text'",
        split="doc_to_text: ''\nvalidation_split: none",
        metric="doc_to_text: ''\nmetric_list: [{metric: none}]",
        limit="doc_to_text: ''\ngeneration_kwargs: {max_gen_toks: many}",
    )
    for name, change in changes.items():
        path = tmp_path / "bad" / f"{name}.yaml"
        path.write_text(f"task: {name}\n{task}metric_list: [{{metric: exact_match}}]\n{change}\n")
    words = ["--checkpoint", str(run), "--include_path"]
    for name, wanted in zip(
        changes,
        (
            "--tasks syntax: TemplateSyntaxError: ",
            "--tasks split: KeyError: ",
            "--tasks metric: ",
            "generation_kwargs: tokens='many': must be a whole number",
        ),
        strict=True,
    ):
        assert evaluate.main([*words, str(tmp_path / "bad"), "--tasks", name]) == 2
        errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
        assert len(errors) == 1
        assert errors[0].startswith(f"error: {wanted}")
    assert evaluate.main([*words, "tasks", "--tasks", "toy_[cr]*"]) == 0
    out = capsys.readouterr().out
    assert "|toy_choice " in out
    assert "|toy_rolling" in out


def test_the_task_in_the_documentation_runs(tmp_path, capsys, monkeypatch):
    run = run_of("gpt2", tmp_path)
    page = (FIXTURES.parents[1] / "docs" / "inference.md").read_text(encoding="utf-8")
    fenced = page.split("```")[1::2]
    texts = {language: text for language, _, text in (block.partition("\n") for block in fenced)}
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks" / "capitals.yaml").write_text(texts["yaml"])
    (tmp_path / "my_tasks" / "capitals.jsonl").write_text(texts["json"])
    monkeypatch.chdir(tmp_path)
    words = f"--checkpoint {run} --tasks capitals --include_path my_tasks --batch_size 2"
    assert evaluate.main(words.split()) == 0
    assert re.search(r"\|capitals\|.*\|acc +\|", capsys.readouterr().out)


def test_unknown_generation_settings_are_refused():
    from jaxllm.infer.harness import _sampling

    config, stops = _sampling({"until": "x", "do_sample": False, "temperature": 0.7})
    assert (config.tokens, config.temperature, config.top_k, stops) == (256, 0, 50, ["x"])
    given = {"max_gen_toks": None, "max_tokens": "7", "top_k": None, "until": None}
    assert _sampling(given)[0].tokens == 7
    assert _sampling({"until": 5})[1] == _sampling({"until": ["", "5"]})[1] == ["5"]
    with pytest.raises(InputError, match=r"^generation_kwargs: top_p=2.0: must be at most 1$"):
        _sampling({"top_p": 2})
    assert _sampling({"max_new_tokens": 5, "temperature": 0.7})[0].temperature == 0.7
    assert _sampling({"do_sample": True})[0].temperature == 1  # as transformers
    assert _sampling({"do_sample": None})[0].temperature == 0
    config, _ = _sampling({"top_p": 0.5}, {"temperature": 0.7, "top_k": 3, "min_p": 0.1})
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0, 3, 0.5, 0.1)
    with pytest.raises(InputError, match="num_beams is not supported"):
        _sampling({"num_beams": 4})
