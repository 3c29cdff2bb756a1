"""What the tests of pallas_kernels.torch need to make plans without a GPU."""

import os

import pytest
import torch

from pallas_kernels.torch import launch, ops, program, trace

equations = []  # of kernels, by their place


def not_lowered(eqn):
    equations.append(eqn)
    return program.Kernel(str(eqn.params["name"]), str(len(equations) - 1).encode())


def make_anew(monkeypatch) -> None:
    """CPU tensors are allowed, and plans not kept, but made for this machine."""
    monkeypatch.setattr(ops, "_check", lambda name, arrays: None)
    monkeypatch.setattr(ops, "_known", {})
    monkeypatch.setattr(trace, "kernel", not_lowered)
    monkeypatch.setattr(launch, "binary", str.encode)
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", os.devnull)


SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip


def tiny_llama(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=256,
        initializer_range=0.1, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)
