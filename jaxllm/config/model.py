"""The model sections of the configuration: the settings of each architecture."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

Dtype = Literal["bfloat16", "float16", "float32"]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
# These limits exceed any trainable model, yet an error comes before anything large is built.
Layers = Annotated[int, Field(ge=1, le=4096)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Positive = Annotated[float, Field(ge=1e-30, le=1e30)]  # float32 rounds none to 0
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(min_length=1)]
# Absolute, so that what a run stores is found from any folder.
File = Annotated[Name, AfterValidator(lambda path: os.path.abspath(Path(path).expanduser()))]
IGNORE = -100  # label without loss
# The matrices of a Llama's block, by Hugging Face's names.
TARGETS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
Quantized = Literal["int8", "int4", "int2", "int1", "fp8", "2:4-int8", "2:4-int4"]
# (format, bits) of pallas_kernels.quantize
FORMATS: dict[str, tuple[Any, int]] = {f"int{bits}": ("int", bits) for bits in (8, 4, 2, 1)}
FORMATS |= {"fp8": ("fp8", 8)} | {f"2:4-int{bits}": ("2:4", bits) for bits in (8, 4)}


class Section(BaseModel):
    """Base class of all sections; rejects unknown keys and wrong types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RopeScaling(Section):
    """Llama 3.1's scaling of the low rotary frequencies to longer contexts.

    It repeats the op's RopeScaling with limits and descriptions, because importing the op would
    import JAX, which takes seconds, before the configuration is checked.  A test keeps both equal.
    """

    factor: float = Field(
        8.0, ge=1, le=1e30, description="divisor of the low frequencies (Llama 3.1: 8, 3.2: 32)"
    )
    low_freq_factor: Positive = Field(
        1.0, description="wavelengths above O / low_freq_factor are scaled in full"
    )
    high_freq_factor: Positive = Field(
        4.0, description="wavelengths below O / high_freq_factor are not scaled"
    )
    original_max_position_embeddings: Count = Field(
        8192, description="O, the context length before scaling, in tokens"
    )
    attention_factor: Positive | None = Field(
        None, description="YaRN's factor of q and k; null: Llama 3.1's scaling"
    )

    def model_post_init(self, _) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if high <= low:
            raise ValueError(f"high_freq_factor={high} must exceed low_freq_factor={low}")


class Lora(Section):
    """Low-rank adapters beside frozen matrices: y = x W + s x A B (Hu et al. 2021, "LoRA")."""

    rank: Width = Field(16, description="columns of A, and rows of B")
    alpha: Positive = Field(32.0, description="the scale of an adapter's output: s = alpha / rank")
    targets: str = Field("all", description="matrices to adapt, like q_proj,v_proj; all: every one")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="probability with which training drops an input of A"
    )
    rslora: bool = Field(
        False, description="s = alpha / sqrt(rank), which suits high ranks (Kalajdzievski 2023)"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _join(cls, value):
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    def model_post_init(self, _) -> None:
        if unknown := [name for name in self.names if name not in ("all", *TARGETS)]:
            raise ValueError(
                f"targets={self.targets!r} names {unknown[0]!r}, which does not exist;"
                f" there are {', '.join(TARGETS)}, or all"
            )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def names(self) -> list[str]:
        """The names in `targets`."""
        return [name.strip() for name in self.targets.split(",")]

    def adapts(self, name: str) -> bool:
        """Whether the matrix of this name gets an adapter."""
        return not {"all", name}.isdisjoint(self.names)


class _Model(Section):
    vocab_size: Vocabulary = Field(description="number of token ids")
    n_layers: Layers = Field(description="number of blocks")
    n_heads: Width = Field(description="number of (query) heads")
    d_model: Width = Field(description="width of the residual stream")
    max_seq_len: Count = Field(description="longest sequence, in tokens")
    compute_dtype: Dtype = Field("bfloat16", description="dtype of matmuls and activations")
    residual_dtype: Dtype = Field("bfloat16", description="dtype of the residual stream")
    kernels: Literal["auto", "mosaic", "xla"] = Field(
        "auto", description="use our GPU kernels: auto: where supported, mosaic: always, xla: never"
    )
    remat: Literal["none", "dots", "mlp", "attention", "block"] = Field(
        "none",
        description="how much of a block the backward pass recomputes to save memory; none:"
        " nothing; dots: all but matmuls and the mixing (attention or vLSTM); mlp: all but the"
        " mixing and the matmuls into the feed-forward layer; attention: all but the mixing;"
        " block: everything",
    )
    init_from: File | None = Field(
        None, description="initial weights: a Hugging Face folder or a run's directory"
    )

    @property
    def implementation(self) -> Literal["mosaic", "xla"] | None:
        """`kernels` as the ops' `implementation` argument."""
        return None if self.kernels == "auto" else self.kernels

    @property
    def adapters(self) -> Lora | None:
        """The section `lora`, which only some models have; None: all weights are trained."""
        return getattr(self, "lora", None)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: vocab_size rounded up to a multiple of 128."""
        return round_up(self.vocab_size, 128)


class AttentionConfig(_Model):
    """Settings that all models with attention share."""

    window: Count | None = Field(
        None,
        description="sliding window: the number of keys a query sees, its own included; null: no"
        " window",
    )
    softcap: Positive | None = Field(
        None, description="cap of the attention logits: cap tanh(x / cap); null: no cap"
    )
    d_ff: Width | None = Field(None, description="feed-forward width; null: 4 d_model")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff or 4 * self.d_model


class GPT2Config(AttentionConfig):
    """GPT-2 (Radford et al. 2019): learned positions, layer norm, GELU, tied head."""

    type: Literal["gpt2"] = Field("gpt2", description="the architecture")
    norm_eps: Positive = Field(1e-5, description="epsilon of the layer norms")

    def model_post_init(self, _) -> None:
        divides(self.n_heads, self.d_model, "n_heads", "d_model")


class Llama3Config(AttentionConfig):
    """Llama 3.1 (Dubey et al. 2024): RoPE, grouped-query attention, SwiGLU, RMS norm."""

    type: Literal["llama3"] = Field("llama3", description="the architecture")
    n_kv_heads: Width = Field(description="number of key and value heads; must divide n_heads")
    d_ff: Width = Field(description="feed-forward width")
    d_head: Width | None = Field(None, description="head dimension; null: d_model / n_heads")
    qkv_bias: bool = Field(False, description="biases of the q, k and v projections (Qwen2)")
    qk_norm: bool = Field(False, description="RMS norm of query and key heads before RoPE (Qwen3)")
    rope_theta: Annotated[float, Field(ge=1e-9, le=1e30)] = Field(  # the op's limit is 2^-30
        500000.0, description="base of the rotary frequencies"
    )
    rope_scaling: RopeScaling | None = Field(None, description="Llama 3.1's scaling; null: none")
    tie_embeddings: bool = Field(False, description="use the token embedding as the head")
    norm_eps: Positive = Field(1e-5, description="epsilon of the RMS norms")
    lora: Lora | None = Field(
        None, description="train low-rank adapters, and freeze all other weights; null: train all"
    )
    quantize: Quantized | None = Field(
        None,
        description="with lora: pack the frozen matrices of the blocks in this format as they are"
        " loaded; null: keep them in bfloat16, or as packed as they are",
    )

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.n_heads

    def model_post_init(self, _) -> None:
        if self.d_head is None:
            divides(self.n_heads, self.d_model, "n_heads", "d_model")
        divides(self.n_kv_heads, self.n_heads, "n_kv_heads", "n_heads")
        if self.head_dim % 2:
            raise ValueError(f"head dimension {self.head_dim} is odd; RoPE rotates pairs")
        if self.quantize is not None and self.lora is None:
            raise ValueError(f"quantize={self.quantize} needs model.lora to train packed weights")


class VLSTMConfig(_Model):
    """The mLSTM model of xLSTM 7B (Beck et al. 2025), here called vLSTM."""

    type: Literal["vlstm"] = Field("vlstm", description="the architecture")
    d_ff: Width | None = Field(
        None, description="feed-forward width; null: 2.667 d_model rounded up to 64"
    )
    gate_soft_cap: Positive = Field(15.0, description="cap of the gates: cap tanh(x / cap)")
    logit_soft_cap: Positive = Field(30.0, description="cap of the logits, in the same way")
    norm_eps: Positive = Field(1e-6, description="epsilon of the norms")
    chunk_size: Count = Field(64, description="tokens per chunk on XLA; our kernels choose")

    @property
    def qk_dim(self) -> int:
        """Query and key dimension of one head."""
        return self.d_model // 2 // self.n_heads

    @property
    def v_dim(self) -> int:
        """Value dimension of one head."""
        return self.d_model // self.n_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff or round_up(int(2.667 * self.d_model), 64)

    def model_post_init(self, _) -> None:
        divides(2 * self.n_heads, self.d_model, "2 n_heads", "d_model")


ModelConfig = Annotated[GPT2Config | Llama3Config | VLSTMConfig, Field(discriminator="type")]

MODEL_CONFIGS: dict[str, type[_Model]] = {
    section.model_fields["type"].default: section for section in get_args(get_args(ModelConfig)[0])
}


def evaluated(model: ModelConfig) -> ModelConfig:
    """The model without dropout, which only training has."""
    if (lora := model.adapters) is None:
        return model
    return model.model_copy(update={"lora": lora.model_copy(update={"dropout": 0.0})})


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    if part < 1 or whole % part:
        raise ValueError(f"{whole_name}={whole} is not a multiple of {part_name}={part}")
