"""Evaluates a run with lm-evaluation-harness (the extra `harness`), for jaxllm evaluate --tasks.

    results = lm_eval.simple_evaluate(model=RunLM("runs/a"), tasks=["arc_easy"])

Texts are tokenized as in the harness's "hf" model, so a run gets the same numbers as its conversion
by jaxllm convert.
"""

import argparse
import json
import logging
from functools import partial
from itertools import batched, islice
from pathlib import Path

import jax
import lm_eval
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, hash_string, make_table
from tqdm import tqdm

from jaxllm.config import SampleConfig, sampling
from jaxllm.config.loading import parse
from jaxllm.errors import InputError, in_short
from jaxllm.infer.decode import open_tokenizer, stream_tokens
from jaxllm.infer.scoring import Scorer
from jaxllm.infer.writer import Speed, Text
from jaxllm.text.files import listed
from jaxllm.weights.pretrained import open_weights

TOKENS = 256  # tokens to write if the task sets no limit, as in "hf"
_OPEN = "\ufdd1"  # marks the end of a message; no text has it
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class RunLM(TemplateLM):
    """A run's newest checkpoint, or `step`'s, on all devices.

    batch_size: rows at once; rounded up to a multiple of the devices.
    Raises InputError if the checkpoint cannot be read.
    """

    def __init__(self, checkpoint: str | Path, step: int | None = None, batch_size: int = 16):
        super().__init__()
        weights = open_weights(checkpoint, step)
        self.tokenizer = open_tokenizer(weights)
        self.scorer = Scorer(weights, int(batch_size))
        self.config, self.step = weights.config, weights.step

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; as in "hf", its name also ends what the model writes."""
        eos, ends = self.tokenizer.eos, sorted(self.tokenizer.ends)
        if eos is None and not ends:
            raise InputError(
                f"no file beside {self.tokenizer.path} names a token that begins or ends a text;"
                " set eos_token in its tokenizer_config.json"
            )
        return ends[0] if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes an empty context and the texts of loglikelihood_rolling."""
        return self.eot_token_id if self.tokenizer.bos is None else self.tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """The ids of a text; add_special_tokens=False omits what the post-processor adds.

        The post-processor adds nothing to a text that already has its first token.
        """
        if add_special_tokens is None:
            first = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(first)
        return (self.tokenizer.prompt if add_special_tokens else self.tokenizer.encode)(string)

    @property
    def tokenizer_name(self) -> str:
        """Part of the file name under which the harness caches what the chat template rendered."""
        return hash_string(f"{self.tokenizer.digest}{self.tokenizer.chat_template()}")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that the harness notes in its results."""
        return self.tokenizer.chat_template() if chat_template else None

    def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without the prompt, its last message stays open."""
        *before, last = chat_history
        if not add_generation_prompt:
            last = last | {"content": f"{last['content']}{_OPEN} "}
        render = partial(self.tokenizer.rendered, answer=add_generation_prompt, whole=False)
        try:
            text, _ = render([*before, last])
        except InputError:  # as "hf": many templates refuse a system message
            text, _ = render([m for m in (*before, last) if m["role"] != "system"])
        if add_generation_prompt:
            return text
        text, _, after = text.rpartition(_OPEN)
        return text if after.startswith(" ") else text.rstrip()  # the template strips messages

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        # A context of spaces alone is empty, too: the harness moves them into the answer.
        start = [self.prefix_token_id]
        return self.scorer([((ids or start) + answer, len(answer)) for _, ids, answer in requests])

    def loglikelihood_rolling(self, requests, **_) -> list[float]:
        """Log-likelihoods of whole texts, in windows of model.max_seq_len."""
        rows, counts = [], []  # windows, and how many each text has
        for request in requests:
            ids, prefix = self.tok_encode(request.args[0]), self.prefix_token_id
            windows = get_rolling_token_windows(ids, prefix, self.config.max_seq_len, context_len=1)
            new = [([*context, targets[-1]], len(targets)) for context, targets in windows]
            rows += new
            counts.append(len(new))
        scores = iter(self.scorer(rows))
        return [sum((score for score, _ in islice(scores, count)), 0.0) for count in counts]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string or the end of the document."""
        encoded = (self.tok_encode(request.args[0]) for request in requests)
        prompts = [ids or [self.prefix_token_id] for ids in encoded]
        kinds: dict[str, list[int]] = {}  # {generation settings: indices of their requests}
        for i, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        batches = []
        for kind, members in kinds.items():
            members.sort(key=lambda i: -len(prompts[i]))
            batches += [(kind, rows) for rows in batched(members, self.scorer.size)]
        texts = [""] * len(requests)
        for kind, members in tqdm(batches, "writing", disable=disable_tqdm):
            config, stops = _sampling(json.loads(kind), self.tokenizer.sampling)
            stops.append(self.tokenizer.decode([self.eot_token_id]))
            most = self.scorer.most
            if most is not None and config.tokens >= most:
                raise InputError(
                    f"{config.tokens} tokens to write are not fewer than"
                    f" model.max_seq_len={most}; lower the task's max_gen_toks"
                )
            room = slice(None) if most is None else slice(config.tokens - most, None)
            # A partial batch repeats its first row, so that one program serves all batches.
            numbers = members + members[:1] * (self.scorer.size - len(members))
            rows = [prompts[i][room] for i in numbers]
            # As "hf" does, texts are decoded without their context.
            written = [Text(self.tokenizer, [], stops, self.tokenizer.ends) for _ in members]
            with jax.set_mesh(self.scorer.mesh):
                model = self.scorer.graph, self.scorer.params
                samples = [(i, 0) for i in numbers]
                Speed(1).fill(written, stream_tokens(*model, rows, config, samples=samples))
            for i, text in zip(members, written, strict=True):
                texts[i] = text.text
        return texts


def _sampling(options: dict, folder: dict | None = None) -> tuple[SampleConfig, list[str]]:
    """The settings and the stop strings of a task's generation_kwargs.

    folder: the settings of the model's folder, which apply except for the temperature.
    """
    options = {name: value for name, value in options.items() if value is not None}
    stops = options.pop("until", None)
    limits = [options.pop(name) for name in _LIMITS if name in options]
    sampled = options.pop("do_sample", None)
    if sampled is not None and not sampled:
        options["temperature"] = 0
    floats = ("temperature", "top_p", "min_p", "repetition_penalty")
    kinds = {"tokens": int, "top_k": int} | dict.fromkeys(floats, float)
    if unknown := options.keys() - kinds.keys():
        raise InputError(
            f"generation_kwargs: {min(unknown)} is not supported; only until,"
            f" {', '.join(_LIMITS)}, do_sample, top_k, {', '.join(floats)}"
        )
    # "hf" is greedy without do_sample and a temperature; transformers' are 1, and top_k 50.
    given = {"tokens": (limits or [TOKENS])[0], "temperature": int(bool(sampled))} | options
    mark = "generation_kwargs: "
    settings = {name: parse(mark + name, str(x), kinds[name]) for name, x in given.items()}
    settings = {"top_k": 50} | (folder or {}) | settings
    return sampling(mark, **settings), [str(stop) for stop in listed(stops) if stop != ""]


def evaluate(args: argparse.Namespace) -> str:
    """The result table of jaxllm evaluate --tasks; raises InputError for bad input."""
    tasks, own = args.tasks.split(","), args.include_path
    if own is not None and not own.is_dir():
        raise InputError(f"--include_path {own} is not a folder")
    if args.out is not None:  # fails now, not after hours
        try:
            args.out.open("a").close()
        except OSError as e:
            raise InputError(f"--out {args.out} cannot be written: {e.strerror}") from e
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _manager(own, tasks)
    model = RunLM(args.checkpoint, args.step, args.batch_size or 16)
    try:
        results = lm_eval.simple_evaluate(
            model,
            tasks=manager.match_tasks(tasks),  # a name may be a pattern, like mmlu_*
            task_manager=manager,
            num_fewshot=args.shots,
            limit=args.limit,
            apply_chat_template=bool(args.apply_chat_template),
            log_samples=False,
        )
    except InputError:
        raise
    # No network, a bad data file, or whatever a mistake in a task's YAML raises in the harness.
    except (OSError, LookupError, TypeError, ValueError, DatasetsError, TemplateError) as e:
        raise InputError(f"--tasks {args.tasks}: {in_short(e)}") from e
    assert results is not None  # the harness returns None only on other ranks
    if args.out is not None:
        page = {name: results[name] for name in ("results", "versions", "n-shot", "n-samples")}
        page |= {"checkpoint": str(args.checkpoint), "step": model.step}
        args.out.write_text(json.dumps(page, indent=2, default=str), encoding="utf-8")
    return make_table(results).strip()


def _manager(include_path: Path | None, tasks: list[str]) -> TaskManager:
    """A manager that knows all of `tasks`; indexes the harness's own thousands only if needed."""
    own = str(include_path) if include_path else None
    for options in ({"include_defaults": False}, {}):
        manager = TaskManager(include_path=own, **options)
        if not (unknown := [name for name in tasks if not manager.match_tasks([name])]):
            return manager
    raise InputError(
        f"--tasks {unknown[0]} is not a task of lm-evaluation-harness or of"
        f" --include_path={own}; `lm-eval ls tasks` lists its tasks"
    )
