"""How good a model is: python -m jaxllm.evaluate --checkpoint DIR [--data.path PATH ...]

Validation loss and perplexity on the run's own validation data, or on all of the data named with
--data.source and --data.path; with --hellaswag the accuracy on HellaSwag instead.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import numpy as np

from jaxllm.cli import Parser
from jaxllm.errors import InputError
from jaxllm.metrics import error_line

ENDINGS = 4
IGNORE = -100


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 2: bad input, 130: interrupted."""
    try:
        args, overrides = _read(argv)
        if args.hellaswag:
            print(hellaswag(args))
        else:
            print(validation(args, overrides))
    except InputError as error:
        error_line(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _read(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    parser = Parser(
        prog="python -m jaxllm.evaluate",
        description=__doc__.partition("\n\n")[2],
        epilog="--data.KEY VALUE: as in train.py; see train.py --help",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a run's directory")
    parser.add_argument("--step", type=int, help="its checkpoint (default: the newest)")
    parser.add_argument("--hellaswag", type=Path, metavar="FILE", help="its JSON lines")
    parser.add_argument("--batch_size", type=int, help="sequences at once (default: the run's)")
    parser.add_argument("--batches", type=int, help="only the first so many (default: all)")
    args, rest = parser.parse_known_args(argv)
    for name in ("batch_size", "batches"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name}={getattr(args, name)} is not at least 1")
    overrides, words = {}, iter(rest)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not (word.startswith("--data.")):
            raise InputError(f"unknown argument {word}; see --help")
        value = value if equals else next(words, None)
        if value is None or (not equals and value.startswith("--")):
            raise InputError(f"--{key} needs a value")
        overrides[key] = value
    if overrides and args.hellaswag:
        raise InputError(f"--{next(iter(overrides))} is not read with --hellaswag; leave one out")
    return args, overrides


def validation(args: argparse.Namespace, overrides: dict[str, str]) -> str:
    """One line: loss, perplexity and tokens.  Every token but the first is predicted once."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxllm import config as configs
    from jaxllm.data import open_dataset
    from jaxllm.sample import open_run, put_model

    weights = open_run(args.checkpoint, args.step)
    if "data.source" in overrides or "data.path" in overrides:  # other data than the run's: all
        path = None if overrides.get("data.source") == "stdlib" else overrides.get("data.path")
        overrides = {"data.path": "null", "data.val_path": path or "null"} | overrides
    tokenizer = weights.folder / "tokenizer.json"
    if tokenizer.exists():
        overrides = {"data.tokenizer": str(tokenizer)} | overrides
    config = configs.load(str(weights.folder / "config.yaml"), overrides)
    length = config.train.seq_len
    data = open_dataset(
        config.data, seq_len=length, seed=config.train.seed, vocab_size=config.model.vocab_size
    )
    print(f"data: {data.description}", file=sys.stderr)
    mesh, size = _mesh(args.batch_size or config.train.batch_size)
    total, count = 0.0, 0
    with jax.set_mesh(mesh):
        graph, params = put_model(weights, mesh)
        loss_sum = jax.jit(lambda params, x, y: nnx.merge(graph, params).loss(x, y))
        starts = range(0, len(data.val) - 1, length)
        for n, first in enumerate(range(0, len(starts), size)):
            if n == args.batches:
                break
            tokens = np.zeros((size, length), np.int32)
            labels = np.full((size, length), IGNORE, np.int32)
            for row, start in enumerate(starts[first : first + size]):
                window = data.val.read(start, min(start + length + 1, len(data.val)))
                tokens[row, : len(window) - 1] = window[:-1]
                labels[row, : len(window) - 1] = window[1:]
            total += float(loss_sum(params, jnp.asarray(tokens), jnp.asarray(labels)))
            count += int((labels != IGNORE).sum())
    loss = total / count
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return (
        f"step {weights.step}: loss {loss:.4f} nats a token, perplexity {perplexity:.2f},"
        f" {count:,} tokens"
    )


def hellaswag(args: argparse.Namespace) -> str:
    """One line: accuracy by log-likelihood of the ending, as it is (acc) and by the character of
    the ending (acc_norm), with the text as lm-evaluation-harness makes it."""
    questions = read_hellaswag(args.hellaswag)

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxllm.sample import most_tokens, open_run, open_tokenizer, put_model

    weights = open_run(args.checkpoint, args.step)
    tokenizer = open_tokenizer(weights)
    most = most_tokens(weights.config)
    mesh, size = _mesh(args.batch_size or 16)
    rows = []  # (ids, where the ending begins)
    for context, endings, _ in questions:
        begins = len(tokenizer.encode(context))
        for ending in endings:
            ids = tokenizer.encode(f"{context} {ending}")
            cut = 0 if most is None else max(0, len(ids) - 1 - most)
            rows.append((ids[cut:], max(begins - cut, 1)))
    if args.batches:
        rows = rows[: args.batches * size // ENDINGS * ENDINGS]
        if not rows:
            raise InputError(f"--batches={args.batches} of {size} rows hold no question")

    with jax.set_mesh(mesh):
        graph, params = put_model(weights, mesh)

        @jax.jit
        def log_likelihood(params, tokens, labels):
            model = nnx.merge(graph, params)
            z = model(tokens)[..., : model.config.vocab_size].astype(jnp.float32)
            of_label = jnp.take_along_axis(
                jax.nn.log_softmax(z), jnp.maximum(labels, 0)[..., None], axis=-1
            )[..., 0]
            return jnp.where(labels == IGNORE, 0, of_label).sum(-1)

        scores = []
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            longest = max(len(ids) for ids, _ in part) - 1
            longest = -(-longest // 32) * 32  # few shapes, few compilations
            longest = longest if most is None else min(longest, most)
            tokens = np.zeros((size, longest), np.int32)
            labels = np.full((size, longest), IGNORE, np.int32)
            for row, (ids, begins) in enumerate(part):
                tokens[row, : len(ids) - 1] = ids[:-1]
                labels[row, begins - 1 : len(ids) - 1] = ids[begins:]
            found = log_likelihood(params, jnp.asarray(tokens), jnp.asarray(labels))
            scores += np.asarray(found)[: len(part)].tolist()
    scores = np.reshape(scores, (-1, ENDINGS))
    questions = questions[: len(scores)]
    characters = np.array([[len(e) for e in endings] for _, endings, _ in questions])
    right = np.array([label for *_, label in questions])
    acc, acc_norm = (float((s.argmax(-1) == right).mean()) for s in (scores, scores / characters))
    return (
        f"step {weights.step}: HellaSwag acc_norm {acc_norm:.4f}, acc {acc:.4f},"
        f" {len(questions):,} questions"
    )


def read_hellaswag(path: Path) -> list[tuple[str, list[str], int]]:
    """(context, endings, which is right) of every line; raises InputError with its number."""
    questions = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    questions.append(_question(line, f"--hellaswag {path}, line {number}"))
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"--hellaswag {path} cannot be read: {e}") from e
    if not questions:
        raise InputError(f"--hellaswag {path} holds no question")
    return questions


def _question(line: str, where: str) -> tuple[str, list[str], int]:
    try:
        page = json.loads(line)
        if "ctx_a" in page:
            context = f"{page['ctx_a']} {page['ctx_b'].capitalize()}"
        else:
            context = page["ctx"]
        if "activity_label" in page:
            context = f"{page['activity_label']}: {context}"
        endings, label = [_clean(e) for e in page["endings"]], int(page["label"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:100]}"
        raise InputError(f"{where} is no question of HellaSwag ({why})") from e
    context = _clean(context)
    if len(endings) != ENDINGS or not all(endings) or not context or label not in range(ENDINGS):
        raise InputError(
            f"{where}: needs a context, {ENDINGS} endings and a label from 0 to {ENDINGS - 1}"
        )
    return context, endings, label


def _clean(text: str) -> str:
    """Without the marks of WikiHow's pages."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _mesh(batch_size: int):
    """(mesh that divides the batch over all devices, batch size: the next multiple of them)."""
    import jax

    from jaxllm.config import MeshConfig, round_up
    from jaxllm.sharding import make_mesh

    return make_mesh(MeshConfig()), round_up(batch_size, jax.device_count())


if __name__ == "__main__":
    sys.exit(main())
