"""Our models in idiomatic PyTorch, which tests/peers.py times."""

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def torch_model(model: Any):
    """GPT-2 or Llama in idiomatic PyTorch: (tokens, labels) -> mean loss."""
    gpt2, c, h, d = model.type == "gpt2", model.d_model, model.n_heads, model.head_dim
    kv = h if gpt2 else model.n_kv_heads
    linear = functools.partial(nn.Linear, bias=gpt2)
    norm = lambda: (nn.LayerNorm if gpt2 else nn.RMSNorm)(c, eps=model.norm_eps)

    def rotate(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = norm(), norm()
            self.qkv, self.out = linear(c, (h + 2 * kv) * d), linear(h * d, c)
            self.up, self.down = linear(c, model.ff_width), linear(model.ff_width, c)
            self.gate = None if gpt2 else linear(c, model.ff_width)

        def forward(self, x, cos, sin):
            parts = self.qkv(self.norm_1(x)).split((h * d, kv * d, kv * d), -1)
            q, k, v = (z.unflatten(-1, (-1, d)).transpose(1, 2) for z in parts)
            if not gpt2:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != kv)
            x = x + self.out(o.transpose(1, 2).flatten(2))
            y = self.norm_2(x)
            if self.gate is None:
                return x + self.down(F.gelu(self.up(y), approximate="tanh"))
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(model.padded_vocab_size, c)
            self.wpe = nn.Embedding(model.max_seq_len, c) if gpt2 else None
            self.blocks = nn.ModuleList(Block() for _ in range(model.n_layers))
            self.norm = norm()
            tied = gpt2 or model.tie_embeddings
            self.head = None if tied else nn.Linear(c, model.padded_vocab_size, bias=False)
            if not gpt2:
                frequency = model.rope_theta ** (-torch.arange(0, d, 2) / d)
                angle = torch.outer(torch.arange(model.max_seq_len), frequency)
                self.register_buffer("cos", angle.cos())
                self.register_buffer("sin", angle.sin())
            for p in self.parameters():
                if p.ndim == 2:
                    nn.init.normal_(p, std=0.02)

        def forward(self, tokens, labels):
            t, x, angles = tokens.shape[1], self.wte(tokens), (None, None)
            if self.wpe is None:
                angles = self.cos[:t], self.sin[:t]
            else:
                x = x + self.wpe.weight[:t]
            for block in self.blocks:
                x = block(x, *angles)
            head = self.wte if self.head is None else self.head
            logits = F.linear(self.norm(x), head.weight)
            return self.loss(logits.flatten(0, 1), labels.flatten())

        def loss(self, logits, labels):
            return F.cross_entropy(logits.float(), labels)

    return Model()


def sharded(model: nn.Module, recompute: bool):
    """The model on all GPUs of a torchrun: FSDP2, with blocks and loss compiled as in torchtitan.

    recompute: the backward pass computes each block again.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    model.loss = torch.compile(model.loss)
    for n, block in enumerate(model.blocks):
        block = checkpoint_wrapper(block) if recompute else block
        block.compile()
        model.blocks[n] = fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def torch_vlstm(model: Any, cell: Any, every_op=False):
    """The vLSTM in idiomatic PyTorch: (tokens, labels) -> mean loss.

    cell: (q, k, v, i, f) -> h, with heads before time, such as `mlstm_cell`'s; None for
        pallas_kernels.torch's op, which reads q, k and v where the matmul leaves them, and has the
        output gate and the norm of the heads in it.
    every_op: norms with the residual, SwiGLU and the loss are pallas_kernels.torch's, too.
    """
    import pallas_kernels.torch as pk

    c, h = model.d_model, model.n_heads
    linear = functools.partial(nn.Linear, bias=False)
    soft_cap = lambda z, cap: cap * torch.tanh(z / cap)
    swiglu = pk.swiglu if every_op else lambda gate, up: F.silu(gate) * up

    class Norm(nn.RMSNorm):
        def forward(self, branch, x):
            """(norm of the stream, stream) after the branch is added to the stream x."""
            if every_op and x is not None:
                return pk.rms_norm(branch, self.weight, residual=x, eps=model.norm_eps)
            x = branch if x is None else x + branch
            return super().forward(x), x

    norm = lambda: Norm(c, eps=model.norm_eps)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2, self.head_norm = norm(), norm(), nn.Parameter(torch.ones(c))
            self.qkvo, self.gates, self.out = linear(c, 3 * c), nn.Linear(c, 2 * h), linear(c, c)
            self.up, self.gate = linear(c, model.ff_width), linear(c, model.ff_width)
            self.down = linear(model.ff_width, c)
            with torch.no_grad():  # almost closed, and open
                self.gates.bias.copy_(torch.cat((torch.full((h,), -10.0), torch.linspace(3, 6, h))))

        def mix(self, x):
            qkvo, widths = self.qkvo(x), (c // 2, c // 2, c, c)
            # The sum is in float32: near 6, bfloat16 has a resolution of 0.03.
            gates = F.linear(x, self.gates.weight).float() + self.gates.bias
            i, f = soft_cap(gates, model.gate_soft_cap).chunk(2, -1)
            if cell is None:
                packed = pk.Packed(qkvo, tuple((h, width // h) for width in widths))
                norm = {"norm_weight": self.head_norm.view(h, -1), "norm_eps": model.norm_eps}
                return self.out(pk.vlstm(packed, None, None, i, f, **norm).flatten(2))
            *qkv, o = qkvo.split(widths, -1)
            q, k, v = (z.unflatten(-1, (h, -1)).transpose(1, 2) for z in qkv)
            y = cell(q, k, v, i.transpose(1, 2), f.transpose(1, 2)).transpose(1, 2)
            y = F.layer_norm(y, (c // h,), eps=model.norm_eps).flatten(2) * self.head_norm
            return self.out(o.sigmoid() * y)

        def forward(self, branch, x):
            y, x = self.norm_1(branch, x)
            y, x = self.norm_2(self.mix(y), x)
            return self.down(swiglu(self.gate(y), self.up(y))), x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(model.padded_vocab_size, c)
            self.blocks = nn.ModuleList(Block() for _ in range(model.n_layers))
            self.norm, self.head = norm(), linear(c, model.padded_vocab_size)
            for p in self.parameters():
                if p.ndim == 2:
                    nn.init.normal_(p, std=0.02)

        def forward(self, tokens, labels):
            branch, x = self.wte(tokens), None
            for block in self.blocks:
                branch, x = block(branch, x)
            y = self.norm(branch, x)[0]
            if every_op:
                cap = {"softcap": model.logit_soft_cap}
                return pk.linear_cross_entropy(y, self.head.weight, labels, **cap)
            logits = soft_cap(self.head(y).float(), model.logit_soft_cap)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Model()


def mlstm_cell(kind: str, chunk: int):
    """mlstm_kernels' Triton cell `kind`, limit or xl: (q, k, v, i, f) -> h, heads before time.

    torch.compile (PyTorch 2.11) cannot trace their autograd function and would break the graph in
    each block.  So both passes are operators here, and the model is one graph.  As in ours, eps is
    0; as in theirs, the backward pass computes the states again.
    """
    folder = f"mlstm_kernels.torch.chunkwise.triton_{kind}_chunk"
    fw = importlib.import_module(f"{folder}.fw").mlstm_chunkwise_fw
    bw = importlib.import_module(f"{folder}.bw").mlstm_chunkwise_bw
    limit = kind == "limit"
    options = {"CHUNK_SIZE": chunk, "EPS": 0.0} if limit else {"chunk_size": chunk, "eps": 0.0}
    operator = functools.partial(torch.library.custom_op, mutates_args=())

    @operator(f"mlstm_{kind}_{chunk}::forward")
    def forward(
        q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return fw(q, k, v, i, f, **options)[:3]

    @operator(f"mlstm_{kind}_{chunk}::backward")
    def backward(
        dh: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, n: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        given = {"matDeltaH" if limit else "matDeltaH_out": dh, "vecN_out": n, "vecM_out": m}
        return bw(q, k, v, i, f, **given, **options)[:5]

    forward.register_fake(lambda q, k, v, i, f: tuple(map(torch.empty_like, (v, i, i))))
    backward.register_fake(lambda dh, *inputs: tuple(map(torch.empty_like, inputs[:5])))
    forward.register_autograd(
        lambda ctx, dh, dn, dm: backward(dh, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output[1:]),
    )
    return lambda *inputs: forward(*(x.contiguous() for x in inputs))[0]
