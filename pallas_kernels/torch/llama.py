"""patch(model): a Hugging Face Llama whose norms, rope, attention, SwiGLU and loss are our kernels.

The matmuls stay the model's own Linears, so adapters and hooks on them work.
"""

import types
from typing import Any

import torch

import pallas_kernels.torch as pk


def patch(model):
    """Makes a LlamaForCausalLM call our kernels, in place, and returns it.

    With labels it returns a loss and no logits, which then never exist whole.  A call with a
    padding mask or a cache that is not empty takes the model's own attention.  The parameters must
    be bfloat16 or float16, or under autocast.
    Raises ValueError for another model, or one with attention dropout or scaled rope other than
    llama3's.
    """
    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"patch takes a LlamaForCausalLM, not {type(model).__name__}")
    config = model.config
    if config.attention_dropout:
        raise ValueError(f"attention_dropout={config.attention_dropout}: our attention has none")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r}: our kernel has 'silu'")
    rope = _rope(config)
    ours = {
        "LlamaRMSNorm": lambda self, x: pk.rms_norm(x, self.weight, eps=self.variance_epsilon),
        "LlamaMLP": lambda self, x: self.down_proj(pk.swiglu(self.gate_proj(x), self.up_proj(x))),
        "LlamaForCausalLM": _model(model.forward),
    }
    for module in model.modules():
        kind = type(module).__name__
        if kind == "LlamaAttention":
            module.forward = types.MethodType(_attention(module.forward, rope), module)
        elif kind in ours:
            module.forward = types.MethodType(ours[kind], module)
    return model


def _rope(config) -> dict[str, Any]:
    """The options of our rope; transformers 5 has all in rope_parameters."""
    given = dict(getattr(config, "rope_parameters", None) or config.rope_scaling or {})
    theta = given.get("rope_theta") or config.rope_theta
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {"theta": float(theta)}
    if kind != "llama3":
        raise ValueError(f"rope of type {kind!r}: our kernel has 'default' and 'llama3'")
    scaling = pk.RopeScaling(**{name: given[name] for name in pk.RopeScaling._fields})
    return {"theta": float(theta), "scaling": scaling}


def _attention(own, rope):
    def forward(self, hidden_states, *args, attention_mask=None, position_ids=None, **kwargs):
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        filled = cache is not None and cache.get_seq_length(self.layer_idx)
        if args or attention_mask is not None or position_ids is None or filled:
            known = {"attention_mask": attention_mask, "position_ids": position_ids}
            return own(hidden_states, *args, **known, **kwargs)
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        linears = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (linear(hidden_states).view(heads) for linear in linears)
        positions = position_ids.int().expand(q.shape[:2]).contiguous()
        q, k = pk.rope(q, k, positions, **rope)
        if cache is not None:
            cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
        out = pk.attention(q, k, v, scale=self.scaling)
        return self.o_proj(out.flatten(2)), None

    return forward


def _model(own):
    def forward(self, *args, labels=None, num_items_in_batch=None, **kwargs):
        if labels is None:
            return own(*args, **kwargs)
        hidden = self.model(*args, **kwargs)[0]
        # Position t predicts token t + 1; the last one predicts nothing.
        labels = torch.nn.functional.pad(labels.int()[:, 1:], (0, 1), value=-100)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = pk.linear_cross_entropy(hidden, self.lm_head.weight, labels, reduction=reduction)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(loss=loss)

    return forward
