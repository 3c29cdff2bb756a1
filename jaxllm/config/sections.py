"""The sections of the configuration beside the model's, and `Config`, which holds them all."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxllm.config import yaml_text
from jaxllm.config.model import (
    Count,
    Fraction,
    ModelConfig,
    Natural,
    Positive,
    Section,
    Seed,
    divides,
)

SMALLEST_BPE = 257  # entries of a byte-level BPE: every byte, and the end of text
LARGEST_BPE = 2**22  # its library makes room for all at once, and aborts where there is none


class DataConfig(Section):
    """Where the text comes from."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "shards"] = Field(
        "stdlib", description="stdlib: the source text of Python's own library, always there"
    )
    path: str | None = Field(None, description="file, folder or glob of the training data")
    val_path: str | None = Field(None, description="of the validation data; null: a part held out")
    text_column: str = Field("text", description="the text's column in JSON lines and parquet")
    tokenizer: str | None = Field(
        None, description="a tokenizer.json; null: train a byte-level BPE on the data, once"
    )
    tokenizer_vocab_size: Annotated[int, Field(ge=SMALLEST_BPE, le=LARGEST_BPE)] = Field(
        4096, description="entries of the tokenizer that is trained"
    )
    cache_dir: str | None = Field(
        None,
        description="where trained tokenizers and encoded text are kept; null: jaxllm in"
        " $XDG_CACHE_HOME or ~/.cache",
    )
    pack: Literal["stream", "documents"] = Field(
        "stream",
        description="stream: a sequence runs on over the ends of documents; documents: no token"
        " sees another document, and positions restart with each",
    )
    shuffle: bool = Field(True, description="a new random order of the samples each epoch")
    prefetch: Natural = Field(8, description="batches read ahead; 0: none")

    @model_validator(mode="after")
    def _check(self):
        if self.source != "stdlib" and self.path is None:
            raise ValueError(f"source={self.source} needs data.path")
        return self


class TrainConfig(Section):
    """How long, how much, how often."""

    steps: Annotated[int, Field(ge=1, lt=2**31)] = Field(description="optimizer steps")
    batch_size: Count = Field(description="sequences of one step, over all devices")
    seq_len: Count = Field(description="tokens of one sequence")
    grad_accum: Count = Field(1, description="parts in which the batch is computed, one by one")
    seed: Seed = Field(0, description="seed of the weights and of the data order")
    log_every: Count = Field(1, description="steps between two log lines")
    eval_every: Natural = Field(100, description="steps between two evaluations; 0: at the end")
    eval_batches: Count = Field(8, description="validation batches of one evaluation")
    checkpoint_every: Natural = Field(200, description="steps between checkpoints; 0: at the end")
    keep_checkpoints: Count = Field(2, description="newest checkpoints kept, besides the best")
    skip_spikes: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="skip updates whose loss exceeds the mean of the last 100 by so many standard"
        " deviations; 0: none (updates that are not finite are always skipped)",
    )
    max_skips: Count = Field(5, description="updates skipped in a row that end the run")
    tracker: Literal["none", "wandb"] = Field(
        "none", description="wandb: also logs to Weights & Biases, offline unless WANDB_MODE is set"
    )
    deterministic: bool = Field(
        True, description="bit-for-bit repeatable programs (XLA flags; see README for the cost)"
    )

    @model_validator(mode="after")
    def _check(self):
        divides(self.grad_accum, self.batch_size, "grad_accum", "batch_size")
        return self


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    learning_rate: Positive = Field(description="its peak, which the warm-up reaches")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="after the warm-up; wsd: constant, then a linear fall at the end"
    )
    warmup_steps: Natural = Field(0, description="steps of linear rise: (step + 1) / warmup")
    final_fraction: Fraction = Field(
        0.1, description="learning rate at the end, as a part of the peak"
    )
    decay_fraction: Fraction = Field(
        0.2, description="wsd: the part of all steps in which it falls"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="on matrices only")
    b1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay of the first moment")
    b2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="decay of the second moment")
    eps: Positive = Field(1e-8, description="added to the root of the second moment")
    clip_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="largest global norm of the gradient; 0: no clipping"
    )


class MeshConfig(Section):
    """How the devices are divided: their product is the number of devices."""

    data: Annotated[int, Field(ge=-1)] = Field(
        -1, description="copies of the model that share the batch; -1: all remaining devices"
    )
    fsdp: Count = Field(1, description="devices that share the batch and split the parameters")
    tensor: Count = Field(1, description="devices that split each layer's heads and widths")
    distributed: bool = Field(
        False, description="several hosts: jax.distributed finds them in the cluster's environment"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.data == 0:
            raise ValueError("data=0 must be -1 or at least 1")
        return self


class SampleConfig(Section):
    """The text that the model writes at the end of the run, and on the way."""

    prompt: str = Field("def ", description="what the sample goes on from")
    tokens: Natural = Field(200, description="tokens to write; 0: no sample")
    every: Natural = Field(0, description="steps between two samples; 0: at the end")
    temperature: Annotated[float, Field(ge=0)] = Field(0.8, description="0: the likeliest token")
    top_k: Natural = Field(50, description="choose among the k likeliest; 0: among all")
    seed: Seed = Field(0, description="seed of the choice")

    @model_validator(mode="after")
    def _check(self):
        if any("\ud800" <= c <= "\udfff" for c in self.prompt):
            raise ValueError(f"prompt={self.prompt!r} is not UTF-8")
        return self


class ProfileConfig(Section):
    """A trace of a few steps."""

    steps: str | None = Field(
        None, description="10:15 traces the steps 10 to 14 and prints their ten largest kernels"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.steps is None:
            return self
        if not re.fullmatch(r"[1-9]\d{0,17}:[1-9]\d{0,17}", self.steps, re.ASCII):
            raise ValueError(
                f"steps={self.steps!r} is not FIRST:END; 10:15 traces the steps 10 to 14"
            )
        first, end = self.span
        if first >= end:
            raise ValueError(f"steps={self.steps!r} is empty; the end must exceed the first step")
        return self

    @property
    def span(self) -> tuple[int, int]:
        """(first step, the step after the last); (0, 0): none."""
        first, _, end = (self.steps or "0:0").partition(":")
        return int(first), int(end)


class Config(Section):
    """One complete run."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig
    optimizer: OptimizerConfig
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    sample: SampleConfig = Field(default_factory=SampleConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    @model_validator(mode="after")
    def _check(self):
        if self.train.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len={self.train.seq_len} exceeds"
                f" model.max_seq_len={self.model.max_seq_len}"
            )
        tokens = self.train.batch_size * self.train.seq_len
        if tokens >= 2**31:  # rows are counted in int32
            raise ValueError(
                f"train.batch_size={self.train.batch_size} x train.seq_len={self.train.seq_len} are"
                f" {tokens} tokens a step; at most {2**31 - 1}"
            )
        if self.profile.span[1] - 1 > self.train.steps:
            raise ValueError(
                f"profile.steps={self.profile.steps} ends after train.steps={self.train.steps};"
                f" its end is at most {self.train.steps + 1}"
            )
        return self

    def to_yaml(self) -> str:
        """The complete, resolved configuration; `load` reads it back."""
        return yaml_text.dump(self.model_dump())
