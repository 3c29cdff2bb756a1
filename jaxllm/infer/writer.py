"""Writes texts with a model, for jaxllm generate and jaxllm chat."""

import argparse
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import jax
import numpy as np

from jaxllm.config import MeshConfig, SampleConfig, sampling
from jaxllm.errors import InputError
from jaxllm.infer import decode
from jaxllm.sharding import make_mesh
from jaxllm.terminal import counted
from jaxllm.text import Tokenizer
from jaxllm.weights.pretrained import open_weights

_TAIL = 16  # last tokens of a prompt, on which the next token's text may depend
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character


class Writer:
    """A model on one device, and its tokenizer.

    args: the result of `generate.checked`.
    config: how tokens are chosen, by the options or else by the folder.
    """

    def __init__(self, args: argparse.Namespace):
        self._weights = weights = open_weights(args.checkpoint, args.step)
        self._float8 = args.kv_cache_dtype == "float8"
        if self._float8 and weights.config.type == "vlstm":
            raise InputError("--kv_cache_dtype=float8: a vLSTM has no keys and values; omit it")
        self.tokenizer = decode.open_tokenizer(weights)
        settings = self.tokenizer.sampling | args.config.model_dump(exclude_unset=True)
        self.config = sampling(f"settings of {self.tokenizer.folder}: ", **settings)
        self.most = decode.most_tokens(weights.config)
        self._mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self.speed = Speed(decode.block_size())

    def load(self, ends: Iterable[int]) -> None:
        """Loads the model, before the first text; prints to stderr how a text begins and `ends`."""
        with jax.set_mesh(self._mesh):
            graph, params = decode.load_model(self._weights, self._mesh)
            dtype = self._weights.config.compute_dtype
            params = decode.in_compute_dtype(params, dtype, table=False, consume=True)
        self._stream = partial(decode.stream_tokens, graph, params, float8_cache=self._float8)
        print(self.tokenizer.describe(ends), file=sys.stderr)

    def write(
        self,
        prompts: list[list[int]],
        samples: list[tuple[int, int]],
        texts: list["Text"],
        config: SampleConfig,
        *,
        few_shapes: bool = False,
    ) -> None:
        """Adds tokens to `texts`, of which there may be fewer than prompts, until all are done.

        samples, few_shapes: as for `decode.stream_tokens`.
        """
        with jax.set_mesh(self._mesh):
            stream = self._stream(prompts, config, samples=samples, few_shapes=few_shapes)
            self.speed.fill(texts, stream)


class Speed:
    """Fills texts with tokens, counts them, and times the full blocks after each batch's first.

    The first block includes the pass over the prompts and, in the first batch, compilation.  The
    last block takes a full block's time, however few tokens are left.
    """

    def __init__(self, block: int):
        self.block = block
        self.tokens, self.seconds, self.waited = 0, 0.0, 0.0  # waited: until the first blocks
        self.timed, self.timed_seconds = 0, 0.0

    def fill(self, texts: list["Text"], stream: Iterable[np.ndarray]) -> None:
        """Adds a batch's tokens to `texts`, of which there may be fewer, and finishes them."""
        begun, step, blocks = time.perf_counter(), 0, []  # (arrival of a block, tokens before it)
        for step, tokens in enumerate(stream):
            if step and (step - 1) % self.block == 0:
                blocks.append((time.perf_counter(), self.tokens))
            before = sum(text.count for text in texts)
            for text, token in zip(texts, tokens, strict=False):
                text.add(int(token))
            self.tokens += sum(text.count for text in texts) - before
            if all(text.done for text in texts):
                break
        end = time.perf_counter()
        if step % self.block == 0:  # the last block is full
            blocks.append((end, self.tokens))
        if len(blocks) > 2:
            self.timed += blocks[-1][1] - blocks[1][1]
            self.timed_seconds += blocks[-2][0] - blocks[0][0]
        self.seconds += end - begun
        self.waited += blocks[0][0] - begun
        for text in texts:
            text.finish()

    def line(self, size: int) -> str:
        """A line with tokens, time and speed; size: texts at once."""
        text = f"{counted(self.tokens, 'token')} in {self.seconds:.2f} s, {size} at once"
        if not self.timed:
            return f"{text}: too few to separate from the prompts and the compilation"
        waited = f"{self.waited:.1f} s for prompts and compilation"
        return f"{text}: {waited}, then {self.timed / self.timed_seconds:,.0f} tokens/s"


class Text:
    """The text after a prompt, token by token, up to a token of `ends` or a stop string: the one
    that begins first, even if it ends after another.

    text: decode(prompt + ids) without decode(prompt); `finish` removes what stops it.
    certain: length of the part that further tokens cannot change; stop strings may shorten it.
    count: its tokens, without the one that ends it.
    live: print text as soon as it is certain: whole characters that cannot begin a stop string.
    Only the last tokens are decoded again, after earlier tokens on which spaces depend.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        ends: Collection[int] = (),
        live: bool = False,
    ):
        special = tokenizer.special  # their names never become text, so as stops they are ids
        self._tokenizer, self._hidden = tokenizer, frozenset(special.values())
        self._ends = {*ends, *(special[stop] for stop in stops if stop in special)}
        ids = [i for i in prompt if i not in self._hidden]
        start = max(0, len(ids) - _TAIL)
        while start and ids[start] in tokenizer.byte_tokens:  # consecutive ones decode together
            start -= 1
        self._ids = ids[start:]
        self._known, self._begins = len(self._ids), ""  # tokens before the text that `_ids` add to
        self.stops, self.live = stops, live
        self.text, self.certain, self.printed, self.count, self.done = "", 0, 0, 0, False
        self._end = 0  # where a stop string begins in the text

    def add(self, token: int) -> None:
        """Appends a token; does nothing if the text is done."""
        if self.done or token in self._ends:
            self.done = True
            return
        self.count += 1
        # A model may have more ids than the tokenizer; they have no text, either.
        if token in self._hidden or token >= self._tokenizer.vocab_size:
            return
        self._decode(token)
        settled = self.text.rstrip(_UNFINISHED)  # further bytes may complete a character
        first = lambda x: min((i for i in map(x.find, self.stops) if i >= 0), default=len(x))
        self._end, end = map(first, (self.text, settled))
        self.done = end < len(settled) and end <= self._open(settled)
        self._show(min(self._end, self._open(self.text[: self.certain])))

    def _open(self, text: str) -> int:
        """The first place from which the rest of a text is the start of a stop string."""
        begun = {n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])}
        return len(text) - max(begun, default=0)

    def _decode(self, token: int) -> None:
        self._ids.append(token)
        tokenizer = self._tokenizer
        known = tokenizer.decode(self._ids[: self._known], clean=False)
        text = self._begins + tokenizer.decode(self._ids, clean=False)[len(known) :]
        self.text = tokenizer.cleaned(text)
        # The text may end in the first bytes of a character, and tokens of bytes make one text.
        unfinished = text.endswith(_UNFINISHED) or token in tokenizer.byte_tokens
        if not unfinished and not (tokenizer.cleans and " " in text[-3:]):  # " n't" has 4
            self._ids, self._begins = self._ids[-_TAIL:], text
            self._known, self.certain = len(self._ids), len(self.text)

    def finish(self) -> None:
        """Ends the text, and prints what was withheld."""
        self.text, self.done = self.text[: self._end], True
        self._show(len(self.text))

    def _show(self, end: int) -> None:
        if self.live and end > self.printed:
            print(self.text[self.printed : end], end="", flush=True)
            self.printed = end
