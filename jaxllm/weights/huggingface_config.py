"""Reads and writes config.json, the model configuration of a Hugging Face folder.

A setting is applied or refused by name.  A key that nothing here reads is refused, too, unless its
value turns it off (null, false, 0, empty) or `_HARMLESS` says that it does not affect the result.
"""

import math
import re
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from jaxllm.config import ModelConfig, first_error, round_up
from jaxllm.errors import InputError
from jaxllm.text.files import APPLIED, OTHERS
from jaxllm.weights.places import tied

_REMOVE = "if it does not affect the model's result, remove it"
UNQUANTIZED = (
    "of quantized weights only our own packing is read: name the folder of the unquantized model,"
    " and pack it with jaxllm convert --quantize, or with model.quantize for LoRA"
)
_FACTS = r"(?:quant_method|\w*quant_(?:type|algo)|\w*bits|load_in_\dbit)': (?!False|None)['\w.-]+"
NEEDED = object()  # the "default" of a required key


class _Kind(NamedTuple):
    """How a type of Hugging Face model maps to ours.

    prefix: the prefix of its tensor names; a folder without the head may leave it out.
    fixed: {their key: values that our model supports}; the first is their default.
    keys: {our setting: (their key, their default)}.
    aliases: {another name of a key: the key}.
    implied: {our setting: its value in every model of this type}.
    """

    ours: str
    architecture: str
    prefix: str
    fixed: dict[str, tuple]
    keys: dict[str, tuple[str, Any]]
    aliases: dict[str, str] = {}
    implied: dict[str, Any] = {}


_LLAMA = _Kind(
    "llama3",
    "LlamaForCausalLM",
    "model.",
    {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    {
        "vocab_size": ("vocab_size", NEEDED),
        "n_layers": ("num_hidden_layers", NEEDED),
        "n_heads": ("num_attention_heads", NEEDED),
        "n_kv_heads": ("num_key_value_heads", None),
        "d_model": ("hidden_size", NEEDED),
        "d_head": ("head_dim", None),
        "d_ff": ("intermediate_size", NEEDED),
        "max_seq_len": ("max_position_embeddings", 2048),
        "rope_theta": ("rope_theta", 10000.0),
        "tie_embeddings": ("tie_word_embeddings", False),
        "norm_eps": ("rms_norm_eps", 1e-6),
    },
    implied={"qkv_bias": False, "qk_norm": False},
)
_windowed = lambda heads, length: {  # heads, length: the type's defaults
    **_LLAMA.keys,
    "window": ("sliding_window", 4096),
    "n_kv_heads": ("num_key_value_heads", heads),
    "max_seq_len": ("max_position_embeddings", length),
}
_QWEN2 = _LLAMA._replace(
    architecture="Qwen2ForCausalLM",
    fixed={"hidden_act": ("silu", "swish")},
    keys=_windowed(32, 32768),
    implied={"qkv_bias": True, "qk_norm": False},
)
_GELUS = "gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"
KINDS = {
    "gpt2": _Kind(
        "gpt2",
        "GPT2LMHeadModel",
        "transformer.",
        {
            "activation_function": _GELUS,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        {
            "vocab_size": ("vocab_size", NEEDED),
            "n_layers": ("n_layer", NEEDED),
            "n_heads": ("n_head", NEEDED),
            "d_model": ("n_embd", NEEDED),
            "d_ff": ("n_inner", None),
            "max_seq_len": ("n_positions", NEEDED),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
        },
        {
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
        },
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA._replace(architecture="MistralForCausalLM", keys=_windowed(8, 131072)),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2._replace(
        architecture="Qwen3ForCausalLM",
        fixed=_QWEN2.fixed | {"attention_bias": (False,)},
        keys=_QWEN2.keys | {"d_head": ("head_dim", 128)},
        implied={"qkv_bias": False, "qk_norm": True},
    ),
    "xlstm": _Kind(
        "vlstm",
        "xLSTMForCausalLM",
        "backbone.",
        {
            "use_bias": (False,),
            "tie_word_embeddings": (False,),
            "add_out_norm": (True,),
            "weight_mode": ("single",),
            "qk_dim_factor": (0.5,),
            "v_dim_factor": (1.0,),
        },
        {
            "vocab_size": ("vocab_size", NEEDED),
            "n_layers": ("num_hidden_layers", NEEDED),
            "n_heads": ("num_heads", NEEDED),
            "d_model": ("hidden_size", NEEDED),
            "max_seq_len": ("max_seq_len", 8192),  # any length works; xLSTM 7B was trained on 8192
            "gate_soft_cap": ("gate_soft_cap", 15.0),
            "logit_soft_cap": ("output_logit_soft_cap", 30.0),
            "norm_eps": ("norm_eps", 1e-6),
            "chunk_size": ("chunk_size", 64),
        },
        {"num_blocks": "num_hidden_layers", "embedding_dim": "hidden_size"},
    ),
}
# Keys that do not affect the result: where the file comes from, dtypes, dropout, special tokens,
# settings of generation, other heads, kernels.
_HARMLESS = re.compile(
    r"_?name_or_path|_commit_hash|transformers_version|transformers\.js_config|unsloth_\w+|model_type"
    r"|architectures|auto_map|torch_dtype|dtype|use_bfloat16|torchscript|is_llama_config|is_decoder"
    r"|use_cache|gradient_checkpointing|pretraining_tp|chunk_size_feed_forward|tf_legacy_loss"
    r"|(\w+_)?initializer_range|\w*dropout\w*|\w+_pdrop|n_ctx|max_sequence_length|model_max_length"
    r"|_?attn_implementation\w*|_flash_attn_2_enabled|reorder_and_upcast_attn|tokenizer_class|prefix|\w+_token_ids?"
    r"|output_(attentions|hidden_states|scores|past)|return_dict(_in_generate)?|early_stopping"
    r"|num_beam_groups|(diversity|length)_penalty|num_return_sequences|remove_invalid_values"
    rf"|{'|'.join((*APPLIED, *OTHERS))}"
    r"|predict_special_tokens|id2label|label2id|_?num_labels|problem_type|finetuning_task|task_specific_params|summary_\w+"
    r"|norm_reduction_force_float32|(chunkwise|sequence|step)_kernel|mode|return_last_states"
    r"|autocast_kernel_dtype|inference_state_dtype|max_inference_chunksize|\w+_backend_name"
    r"|finetuned|add_post_blocks_norm|cell_norm_eps|igate_bias_init_range|force_bos_token_insert|mlstm_round\w+"
)


def model_config(page: dict[str, Any], path: Path) -> ModelConfig:
    """Our configuration of the model in a config.json; path: for errors."""
    name = page.get("model_type")
    if not isinstance(name, str) or name not in KINDS:
        raise InputError(f"{path}: model_type={name!r} is not one of {', '.join(KINDS)}")
    kind = KINDS[name]
    keys = Page(page, path, kind.aliases)
    keys.only("is_causal", True)
    for key, allowed in kind.fixed.items():
        keys.only(key, *allowed)
    fields = {
        ours: keys.need(key) if default is NEEDED else keys.get(key, default)
        for ours, (key, default) in kind.keys.items()
    }
    if kind.ours == "llama3":
        fields |= kind.implied | _llama(keys, fields)
    if "window" in fields:
        fields |= {"window": _window(keys, fields, name.startswith("qwen"))}
    if name == "xlstm":
        fields |= _xlstm(keys, fields)
    keys.refuse_rest()
    theirs = {ours: key for ours, (key, _) in kind.keys.items()}
    return validated({"type": kind.ours} | fields, path, theirs)


def validated(fields: dict[str, Any], path: Path, theirs: dict[str, str]) -> ModelConfig:
    """Our configuration of `fields`; theirs: {our setting, dotted: their key}, for errors."""
    try:
        return TypeAdapter(ModelConfig).validate_python(fields)
    except ValidationError as e:  # of pydantic or of our checks, by our names
        said = re.sub(r"[\w.]+", lambda word: theirs.get(word[0], word[0]), first_error(e, path))
        raise InputError(f"{path}: {said}"[:500]) from e


class Page:
    """The keys of a file, with errors that name them; aliases: {another name: the key}."""

    def __init__(self, page: dict, path: Path | str, aliases: dict[str, str] | None = None):
        self.page, self.path, self._known = dict(page), path, set(aliases or ())
        for alias, key in (aliases or {}).items():
            if (value := page.get(alias)) is None:
                continue
            if page.get(key) not in (None, value):
                raise InputError(f"{path}: {alias}={value!r} differs from {key}={page[key]!r}")
            self.page[key] = value

    def need(self, key: str):
        if self.get(key, None) is None:
            raise InputError(f"{self.path} lacks {key}")
        return self.page[key]

    def get(self, key: str, default):
        self._known.add(key)
        value = self.page.get(key)
        return default if value is None else value

    def number(self, key: str, default=None) -> float:
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise InputError(f"{self.path}: {key}={value!r} is not a positive number")
        return value

    def only(self, key: str, *allowed) -> None:
        """Raises InputError unless the value is one of `allowed`; the first is the default."""
        off = allowed[0] is True and key in self.page  # null turns a switch off
        if self.get(key, not off and allowed[0]) not in allowed:
            said = " or ".join(map(repr, allowed))
            raise InputError(f"{self.path}: {key}={self.page[key]!r} is not supported; only {said}")

    def refuse_rest(self, free: Container[str] = (), fix: str = _REMOVE) -> None:
        """Raises InputError for a key that was not read, is not free, and may affect the result."""
        if self.page.get("use_sliding_window") is False:
            self._known.add("sliding_window")
        for key, value in self.page.items():
            if key in self._known or key in free or _HARMLESS.fullmatch(key):
                continue
            whole = isinstance(value, list) and value == ["full_attention"] * len(value)
            if not whole and value not in (None, False, "", {}):
                said = f"{value!r:.100}"
                if key.startswith(("quantization", "compression_config")):
                    facts = ", ".join(dict.fromkeys(re.findall(_FACTS, repr(value)))) or said
                    said, fix = facts.replace("'", ""), UNQUANTIZED
                raise InputError(f"{self.path}: {key}={said} is not supported; {fix}")


# Llama 3.1's scaling where no wavelength is short: position interpolation (Chen et al. 2023).
_LINEAR = {"low_freq_factor": 1e29, "high_freq_factor": 1e30}
_YARN = {"factor": ("factor", 0), "attention_factor": ("attention_factor", 0)}
_YARN |= {"low_freq_factor": ("beta_slow", 1), "high_freq_factor": ("beta_fast", 32)}


def _llama(page: Page, fields: dict[str, Any]) -> dict[str, Any]:
    # The names of transformers 4 and 5, which prefers the older one.
    old, new = page.get("rope_scaling", {}), page.get("rope_parameters", {})
    if not isinstance(rope := old or new, dict):
        raise InputError(f"{page.path}: rope_scaling={rope!r} is not an object with keys")
    rope = Page(rope, f"{page.path}: rope_scaling")
    for where in (page, rope):
        where.only("partial_rotary_factor", 1.0)
    keys = ("low_freq_factor", "high_freq_factor", "factor")
    length = "original_max_position_embeddings"
    given = {key: rope.get(key, None) for key in (*keys, length)}
    rope.page["rope_type"] = rope.get("rope_type", rope.get("type", None))
    if rope.page["rope_type"] is None and given["factor"] not in (None, 1):
        raise InputError(f"{rope.path} has factor={given['factor']!r}, but no rope_type")
    rope.only("rope_type", "default", "llama3", "linear", "dynamic", "yarn")
    kind, scaling = rope.page["rope_type"], {}
    if kind == "linear":
        scaling = _LINEAR | {"factor": rope.need("factor")}
    elif kind == "dynamic":
        most = f"max_position_embeddings={fields['max_seq_len']}, our limit"
        print(f"note: {rope.path}: dynamic has no effect up to {most}", file=sys.stderr)
    elif kind == "yarn":
        rope.only("truncate", True)
        usual = 0.1 * math.log(max(1, rope.number("factor"))) + 1
        scaling = {ours: rope.get(key, 0) or x or usual for ours, (key, x) in _YARN.items()}
    elif kind == "llama3":
        scaling = {key: rope.need(key) for key in keys}
    if kind in ("llama3", "yarn"):
        scaling[length] = page.get(length, given[length] or fields["max_seq_len"])
    theta = rope.get("rope_theta", fields["rope_theta"])
    rope.refuse_rest()
    found = dict(rope_theta=theta, rope_scaling=scaling or None)
    if page.page.get("num_key_value_heads", fields["n_kv_heads"]) is None:  # or Llama's default
        found["n_kv_heads"] = fields["n_heads"]
    return found


def _window(page: Page, fields: dict[str, Any], qwen: bool) -> int | None:
    """The window of all layers; raises InputError if only some have one."""
    n_layers, window, first = fields["n_layers"], fields["window"], 0
    if page.page.get("sliding_window", 0) is None:  # the default is a window
        window = None
    if qwen:
        window = window if page.get("use_sliding_window", False) else None
        first = page.get("max_window_layers", 28)  # the layers before it see everything
    given = page.get("layer_types", None)
    if not isinstance(n_layers, int) or not isinstance(first, int):
        raise InputError(f"{page.path}: max_window_layers={first!r} is not a whole number")
    slide = 0 if window is None else max(0, n_layers - max(0, first))  # the last layers
    kinds = {*["sliding_attention"] * (slide > 0), *["full_attention"] * (slide < n_layers)}
    kinds = set(map(str, given[:n_layers])) if isinstance(given, list) else kinds
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or window is None:
        raise InputError(
            f"{page.path}: a window in some layers only is not supported"
            f" (sliding_window={window}, max_window_layers={first}, layer_types={given!r:.80})"
        )
    return window


def _xlstm(page: Page, fields: dict[str, Any]) -> dict[str, Any]:
    if page.get("eps", None) and page.number("eps") > 1e-5:  # ours is exact, as for eps = 0
        raise InputError(f"{page.path}: eps={page.page['eps']} is not supported; at most 1e-05")
    page.get("head_dim", None)  # transformers does not read it
    d_model = fields["d_model"]
    if not isinstance(d_model, int):
        raise InputError(f"{page.path}: hidden_size={d_model!r} is not a whole number")
    multiple = page.number("ffn_round_up_to_multiple_of", 64)
    wanted = d_model * page.number("ffn_proj_factor", 2.667)
    d_ff = int((wanted + multiple - 1) // multiple * multiple)
    return dict(d_ff=None if d_ff == round_up(int(2.667 * d_model), 64) else d_ff)


def config_json(config: ModelConfig, dtype: str, source: str = "") -> dict[str, Any]:
    """A config.json (source: model_type beside the tokenizer); raises InputError if none fits."""
    kinds = [
        (name, kind)
        for name, kind in KINDS.items()
        if kind.ours == config.type
        and all(getattr(config, key) == value for key, value in kind.implied.items())
    ]
    if not kinds:
        options = "".join(f", {key}=true" for key in _LLAMA.implied if getattr(config, key, False))
        raise InputError(
            f"model.type={config.type}{options} cannot be converted: transformers has no such model"
        )
    # A window as long as the longest text has no effect.
    window = getattr(config, "window", None)
    window = None if (window or 0) >= config.max_seq_len else window
    # transformers' Llama has no window, needs heads that divide the width, and rebuilds the
    # tokenizer; its Mistral has none of these limits.
    mistral = window or config.d_model % config.n_heads or source == "mistral"
    name, kind = kinds[-1] if mistral else kinds[0]
    for key, value in (("window", window), ("softcap", getattr(config, "softcap", None))):
        if value is not None and key not in kind.keys:
            raise InputError(
                f"model.{key}={value} cannot be converted: transformers' {config.type} has no {key}"
            )
    page = {"model_type": name, "architectures": [kind.architecture], "torch_dtype": dtype}
    # The defaults of transformers may be outside this vocabulary.
    page |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    page |= {key: allowed[0] for key, allowed in kind.fixed.items()}
    page |= {key: getattr(config, ours) for ours, (key, _) in kind.keys.items()}
    page["tie_word_embeddings"] = tied(config)
    if config.type == "llama3":
        page |= {"head_dim": config.head_dim, "rope_scaling": None}
        if config.rope_scaling is not None:
            scaling, rope = config.rope_scaling.model_dump(exclude_none=True), "llama3"
            if "attention_factor" in scaling:
                rope, scaling = "yarn", {_YARN.get(x, (x,))[0]: scaling[x] for x in scaling}
            elif _LINEAR.items() <= scaling.items():
                rope, scaling = "linear", {"factor": scaling["factor"]}
            page["rope_scaling"] = dict(rope_type=rope, **scaling)
        if name.startswith("qwen"):
            page |= {"sliding_window": window, "use_sliding_window": window is not None}
            page |= {"max_window_layers": 0 if window else config.n_layers}
    if config.type == "vlstm":
        # transformers rounds factor x d_model up to a multiple of 64.  Other widths are rounded to
        # integers instead, and the 0.25 keeps floating-point error from changing the result.
        given = config.d_ff is not None
        odd = given and config.ff_width % 64 != 0
        factor = (config.ff_width + (0.25 if odd else 0)) / config.d_model if given else 2.667
        page |= {"ffn_proj_factor": factor, "ffn_round_up_to_multiple_of": 1 if odd else 64}
        page |= {"num_blocks": config.n_layers, "embedding_dim": config.d_model, "eps": 0.0}
    return page
