"""patch(model): a Hugging Face Llama whose norms, rope, attention, SwiGLU and loss are our kernels.

The matmuls stay the model's own Linears, so adapters and hooks on them work.  The functions below
know only the module that they are called with, which may be a copy of the patched one, and call its
class's own forward for what our kernels lack.
"""

import functools
import types
from typing import Any

import torch

import pallas_kernels.torch as pk


def patch(model):
    """Makes a LlamaForCausalLM call our kernels, in place, and returns it.

    With labels it returns a loss, but no cache and no logits, which then never exist whole, unless
    lm_head is more than a Linear, or the loss is another one.  Calls with a mask (of padding), a
    filled cache or another attn_implementation than sdpa take the model's own attention.  The
    parameters must be bfloat16 or float16, or under autocast.
    Raises ValueError for another model, and for one with attention dropout, with scaled rope other
    than llama3's, or with another forward already, as from accelerate's hooks.
    """
    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"patch takes a LlamaForCausalLM, not {type(model).__name__}")
    config = model.config
    for name, need in (("attention_dropout", 0), ("hidden_act", "silu")):
        if getattr(config, name) != need:
            raise ValueError(f"{name}={getattr(config, name)!r}: our kernels have {need!r}")
    rope = _rope(config)
    ours = {
        "LlamaRMSNorm": lambda self, x: pk.rms_norm(x, self.weight, eps=self.variance_epsilon),
        "LlamaMLP": lambda self, x: self.down_proj(pk.swiglu(self.gate_proj(x), self.up_proj(x))),
        "LlamaAttention": lambda *given, **more: _attention(*given, rope=rope, **more),
        "LlamaForCausalLM": _model,
    }
    found = [(x, type(x)) for x in model.modules() if type(x).__name__ in ours]
    for module, kind in found:
        now = getattr(module.forward, "__func__", module.forward)
        if kind.forward not in (now, getattr(now, "__wrapped__", None)):
            raise ValueError(f"{kind.__name__}.forward was replaced: patch the model before")
    for module, kind in found:
        forward = functools.wraps(kind.forward)(ours[kind.__name__])
        module.forward = types.MethodType(forward, module)
    return model


def _rope(config) -> dict[str, Any]:
    """The options of our rope; transformers 5 has all in rope_parameters."""
    given = dict(getattr(config, "rope_parameters", None) or config.rope_scaling or {})
    options: dict[str, Any] = {"theta": float(given.get("rope_theta") or config.rope_theta)}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "llama3":
        options["scaling"] = pk.RopeScaling(**{x: given[x] for x in pk.RopeScaling._fields[:4]})
    elif kind != "default":
        raise ValueError(f"rope of type {kind!r}: our kernel has 'default' and 'llama3'")
    return options


def _attention(self, hidden_states, *args, rope, **kwargs):
    given = {name: x for name, x in kwargs.items() if x is not None}
    positions = given.get("position_ids")
    names = "cache", "past_key_values", "past_key_value"  # the last one before transformers 4.56
    cache = next((given[x] for x in names if x in given), None)
    other = args or any(x in given for x in ("attention_mask", "is_causal", "position_bias"))
    other = other or not self.is_causal or self.config._attn_implementation != "sdpa"
    if other or positions is None or cache is not None and cache.get_seq_length(self.layer_idx):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    linears = self.q_proj, self.k_proj, self.v_proj
    q, k, v = (x(hidden_states).unflatten(-1, (-1, self.head_dim)) for x in linears)
    q, k = pk.rope(q, k, positions.int().expand(q.shape[:2]).contiguous(), **rope)
    if cache is not None:
        cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
    return self.o_proj(pk.attention(q, k, v, scale=self.scaling).flatten(2)), None


def _model(self, *args, **kwargs):
    given = {name: x for name, x in kwargs.items() if x is not None}
    head = self.lm_head
    hooks = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks
    other = hooks or type(head) is not torch.nn.Linear or "forward" in vars(head)
    other = other or head.bias is not None or hasattr(self, "_loss_function")
    other = other or any(x in given for x in ("shift_labels", "ignore_index", "logits_to_keep"))
    if other or "labels" not in given or not given.get("return_dict", self.config.return_dict):
        return type(self).forward(self, *args, **kwargs)
    # Position t predicts token t + 1; the last one predicts nothing.
    labels = torch.nn.functional.pad(given.pop("labels")[:, 1:], (0, 1), value=-100)
    items = given.pop("num_items_in_batch", None)
    outputs = self.model(*args, **given | {"return_dict": True})
    hidden, labels = outputs.last_hidden_state, labels.to(outputs.last_hidden_state.device)
    reduction = "mean" if items is None else "sum"
    loss = pk.linear_cross_entropy(hidden, head.weight, labels, reduction=reduction)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    more = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
    return CausalLMOutputWithPast(loss=loss if items is None else loss / items, **more)
