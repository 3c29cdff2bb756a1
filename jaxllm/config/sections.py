"""All sections of the configuration except the model's, and `Config`, which holds them all."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jaxllm.config import yaml_text
from jaxllm.config.model import (
    Count,
    File,
    Fraction,
    ModelConfig,
    Name,
    Natural,
    NotNegative,
    Positive,
    Section,
    Seed,
    divides,
)

SMALLEST_BPE = 257  # entries of a byte-level BPE: every byte, and the end of text
LARGEST_BPE = 2**22  # the library allocates all entries at once, and aborts if it cannot
Decay = Annotated[float, Field(ge=0, le=0.999999)]  # float32 would round 1 - 1e-8 to 1
UTF8 = Annotated[str, AfterValidator(lambda text: text.encode().decode())]


class DataConfig(Section):
    """Where the text comes from."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "shards", "chat"] = Field(
        "stdlib",
        description="format of the data; stdlib: the source text of Python's own library, which"
        " needs no path; chat: conversations in JSON lines and parquet, or prepared",
    )
    path: File | None = Field(None, description="file, folder or glob of the training data")
    val_path: File | None = Field(
        None, description="file, folder or glob of the validation data; null: hold out a part"
    )
    text_column: Name = Field("text", description="column of the text in JSON lines and parquet")
    tokenizer: File | None = Field(
        None, description="a tokenizer.json or its folder; null: train a byte-level BPE on the data"
    )
    special_tokens: Literal["text", "tokens"] = Field(
        "text",
        description="what the names of special tokens in a document are; text: plain text, so that"
        " no document can end itself or imitate a chat; tokens: these tokens",
    )
    end_token: Name | None = Field(
        None, description="the token that ends a document; null: the one that the tokenizer names"
    )
    tokenizer_vocab_size: Annotated[int, Field(ge=SMALLEST_BPE, le=LARGEST_BPE)] = Field(
        4096, description="number of entries of the trained tokenizer"
    )
    cache_dir: File | None = Field(
        None,
        description="folder for trained tokenizers and encoded text; null: jaxllm in"
        " $XDG_CACHE_HOME or ~/.cache",
    )
    pack: Literal["stream", "documents"] = Field(
        "stream",
        description="stream: sequences cross document boundaries; documents: no token sees another"
        " document, and positions restart with each document, as with source=chat always",
    )
    loss: Literal["assistant", "all"] = Field(
        "assistant", description="the tokens of a chat that are predicted: the assistant's, or all"
    )
    too_long: Literal["cut_end", "cut_start", "leave_out"] = Field(
        "cut_end",
        description="what is done with a conversation of more than train.seq_len + 1 tokens",
    )
    shuffle: bool = Field(True, description="draw a new random order of the samples each epoch")
    prefetch: Annotated[int, Field(ge=0, le=1024)] = Field(  # more batches may fill the memory
        8, description="number of batches to read ahead; 0: none"
    )

    def model_post_init(self, _) -> None:
        if self.source != "stdlib" and self.path is None:
            raise ValueError(f"source={self.source} needs data.path")

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is trained on the data, unless the weights have one."""
        return self.tokenizer is None and self.source not in ("shards", "chat")

    @property
    def packed(self) -> bool:
        """Whether batches have segment_ids and positions."""
        return self.pack == "documents" or self.source == "chat"


class TrainConfig(Section):
    """Length of the run, size of a batch, and how often to log, evaluate and save."""

    steps: Annotated[int, Field(ge=1, lt=2**31)] = Field(description="number of optimizer steps")
    batch_size: Count = Field(description="sequences per step, over all devices")
    seq_len: Count = Field(description="tokens per sequence")
    grad_accum: Count = Field(1, description="number of parts to compute the batch in, in turn")
    seed: Seed = Field(0, description="seed of the weights and of the data order")
    log_every: Count = Field(1, description="steps between log lines")
    eval_every: Natural = Field(100, description="steps between evaluations; 0: only at the end")
    eval_batches: Count = Field(8, description="validation batches per evaluation")
    checkpoint_every: Natural = Field(200, description="steps between checkpoints; 0: at the end")
    keep_checkpoints: Count = Field(2, description="newest checkpoints to keep, besides the best")
    skip_spikes: NotNegative = Field(
        0.0,
        description="skip an update whose loss exceeds the mean of the last 100 by this many"
        " standard deviations; 0: never (updates that are not finite are always skipped)",
    )
    max_skips: Count = Field(5, description="end the run after this many skipped updates in a row")
    verify_every: Natural = Field(
        0,
        description="steps between steps that are computed twice and compared bit by bit, to find"
        " silent corruption; 0: none",
    )
    on_corruption: Literal["stop", "rollback"] = Field(
        "stop",
        description="what follows if verify_every finds corruption; rollback: go on from the newest"
        " checkpoint, once for each",
    )
    tracker: Literal["none", "wandb"] = Field(
        "none", description="wandb: also log to Weights & Biases, offline unless WANDB_MODE is set"
    )
    fp8: Literal["none", "matmuls", "all"] = Field(
        "none",
        description="8-bit floating-point operands; matmuls: in the linear layers of the blocks,"
        " forward (e4m3) and backward (gradients e5m2); all: in the head, too; on GPUs since 8.9"
        " (H100)",
    )
    deterministic: bool = Field(True, description="use no XLA operation whose results vary by run")
    autotune: bool = Field(
        True,
        description="on a GPU, in one process, time XLA's matmul kernels once per run and keep the"
        " fastest, for steps 1% faster; another run may keep others, so its last bits may differ",
    )

    def model_post_init(self, _) -> None:
        divides(self.grad_accum, self.batch_size, "grad_accum", "batch_size")
        if self.verify_every and not self.deterministic:
            raise ValueError(f"verify_every={self.verify_every} needs deterministic=true")


class OptimizerConfig(Section):
    """AdamW or Muon, and the learning rates."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for the blocks' matrices, AdamW for all other parameters"
    )
    learning_rate: Positive = Field(description="peak learning rate of AdamW, after the warm-up")
    muon_learning_rate: Positive = Field(
        0.02, description="peak learning rate of Muon, which takes the same schedule"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="shape of the decay after the warm-up; wsd: constant, then linear at the end",
    )
    warmup_steps: Natural = Field(
        0, description="steps of linear warm-up: (step + 1) / warmup_steps of the peak"
    )
    final_fraction: Fraction = Field(0.1, description="final learning rate / the peak")
    decay_fraction: Fraction = Field(0.2, description="wsd: the decay's fraction of all steps")
    weight_decay: NotNegative = Field(0.1, description="weight decay, on matrices only")
    b1: Decay = Field(0.9, description="decay of the first moment")
    b2: Decay = Field(0.95, description="decay of the second moment")
    eps: Positive = Field(1e-8, description="added to the root of the second moment")
    clip_norm: NotNegative = Field(1.0, description="limit of the global gradient norm; 0: none")


class MeshConfig(Section):
    """The device mesh; the product of its axes is the number of devices."""

    data: Annotated[int, Field(ge=-1)] = Field(
        -1, description="replicas of the model, which divide the batch; -1: all remaining devices"
    )
    fsdp: Count = Field(1, description="devices that divide the batch and shard the parameters")
    context: Count = Field(1, description="devices that divide each sequence and shard parameters")
    tensor: Count = Field(1, description="devices that divide each layer's heads and widths")
    shard_optimizer: bool = Field(
        False,
        description="split the float32 parameters, the moments and the update over mesh.data, as"
        " ZeRO-1 does; each replica keeps all bfloat16 copies",
    )
    distributed: bool = Field(
        False,
        description="train in several processes, which jax.distributed finds in the environment"
        " of Slurm or Open MPI",
    )


class SampleConfig(Section):
    """The text that the model writes during the run and at its end."""

    prompt: UTF8 | None = Field(
        None,
        description="the text that the sample continues; null: the validation data's first words",
    )
    tokens: Natural = Field(200, description="number of tokens to write; 0: no sample")
    every: Natural = Field(0, description="steps between samples; 0: only at the end")
    temperature: Annotated[float, Field(ge=0)] = Field(
        0.8, description="0: always the most likely token; higher: more random"
    )
    top_k: Natural = Field(50, description="sample among the k most likely tokens; 0: all")
    top_p: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="sample among the most likely tokens with total probability p; 1: all"
    )
    seed: Seed = Field(0, description="seed of the sampling")


class Sampling(SampleConfig):
    """The section `sample` and the settings that only a model's folder has, as in transformers."""

    min_p: Fraction = 0.0  # samples among tokens of at least min_p x the largest probability
    repetition_penalty: Positive = 1.0  # divides positive logits of tokens that the text has


class ProfileConfig(Section):
    """Profiling of a few steps."""

    steps: str | None = Field(
        None, description="10:15 traces steps 10 to 14 and prints their ten longest kernels"
    )

    def model_post_init(self, _) -> None:
        if self.steps is None:
            return
        if not re.fullmatch(r"[1-9]\d{0,17}:[1-9]\d{0,17}", self.steps, re.ASCII):
            raise ValueError(f"steps={self.steps!r} is not FIRST:END; 10:15 traces steps 10 to 14")
        first, end = self.span
        if first >= end:
            raise ValueError(f"steps={self.steps!r} is empty; the end must exceed the first step")

    @property
    def span(self) -> tuple[int, int]:
        """(first step, step after the last); (0, 0) without profiling."""
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

    def model_post_init(self, _) -> None:
        if self.train.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len={self.train.seq_len} exceeds"
                f" model.max_seq_len={self.model.max_seq_len}"
            )
        tokens = self.train.batch_size * self.train.seq_len
        if tokens >= 2**31:  # rows are counted in int32
            raise ValueError(
                f"train.batch_size={self.train.batch_size} x train.seq_len={self.train.seq_len} is"
                f" {tokens} tokens per step; the limit is {2**31 - 1}"
            )
        if (lora := self.model.adapters) and self.model.init_from is None:
            raise ValueError("model.lora needs model.init_from, the weights that it adapts")
        if lora and self.train.fp8 != "none":
            raise ValueError(f"train.fp8={self.train.fp8} does not go with model.lora: use none")
        if self.profile.span[1] - 1 > self.train.steps:
            raise ValueError(
                f"profile.steps={self.profile.steps} ends after train.steps={self.train.steps};"
                f" its end is at most {self.train.steps + 1}"
            )

    def with_model(self, **changes) -> "Config":
        """The run with other values in its section `model`."""
        return self.model_copy(update={"model": self.model.model_copy(update=changes)})

    def to_yaml(self) -> str:
        """The complete configuration as YAML, which `load` reads back."""
        return yaml_text.dump(self.model_dump())
