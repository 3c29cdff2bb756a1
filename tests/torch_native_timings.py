"""Timings of pallas_kernels.torch on a GPU, beside PyTorch, mlstm_kernels and JAX.

Each case is a function that returns what it measured; torch_native.py runs them, each in its own
process, and torch_native_tables.py prints them side by side.
"""
# ruff: noqa: B023  (functions are called in the round of the loop that makes them)

import json
import sys
import time

import numpy as np
from torch_native_ops import B, F, I, forward_backward

VLSTMS = {  # B, T, NH, DQK, DV
    "124M": (8, 1024, 6, 64, 128),
    "7B": (1, 8192, 8, 256, 512),
    "4x2048": (4, 2048, 8, 64, 128),
    "tests": (2, 256, 4, 256, 512),  # one of mlstm_kernels' tests
}


def _cell(Bz, T, H, DQ, DV):
    gates = ((Bz, T, H), F), ((Bz, T, H), F, 1.0, 3.0)
    return "vlstm", [((Bz, T, H, DQ), B)] * 2 + [((Bz, T, H, DV), B), *gates], {}, {}


# As torch_native_ops.OPS, at the sizes of models.
TIMES = {
    "attention 64": ("attention", [((4, 4096, 16, 64), B)] * 3, {}, {}),
    "attention 128": ("attention", [((4, 4096, 16, 128), B)] * 3, {}, {}),
    "rms_norm": ("rms_norm", [((16384, 4096), B), ((4096,), F)], {}, {}),
    "rms_norm residual": ("rms_norm", [((16384, 4096), B), ((4096,), F)],
                          {"residual": ((16384, 4096), B)}, {}),
    "layer_norm": ("layer_norm", [((32768, 768), B), ((768,), F), ((768,), F)], {}, {}),
    "rope": ("rope", [((2, 4096, 32, 128), B), ((2, 4096, 8, 128), B), ((4096,), I, 4096)], {},
             {"theta": 500000.0}),
    "swiglu": ("swiglu", [((8192, 14336), B)] * 2, {}, {}),
    "mlp gate": ("mlp", [((8192, 2048), B), ((2048, 8192), B, 0.02, 0), ((8192, 2048), B, 0.02, 0)],
                 {"gate": ((2048, 8192), B, 0.02, 0)}, {}),
    "mlp gelu": ("mlp", [((8192, 768), B), ((768, 3072), B, 0.02, 0), ((3072, 768), B, 0.02, 0)],
                 {"bias": ((3072,), B)}, {}),
    "encoder": ("encoder", [((16, 1024), I, 50257), ((50304, 768), F), ((1024, 768), F)], {},
                {"dtype": B}),
    "cross_entropy": ("cross_entropy", [((8192, 50304), B), ((8192,), I, 50257)], {}, {}),
    "linear_cross_entropy": ("linear_cross_entropy", [
        ((8, 1024, 768), B), ((50304, 768), B, 0.02, 0), ((8, 1024), I, 50257)], {}, {}),
    "vlstm 124M": _cell(*VLSTMS["124M"]),
    "vlstm 7B": _cell(*VLSTMS["7B"]),
    "quantized_linear": ("quantized_linear", [((256, 4096), B), ((4096, 1024), "int4")], {}, {}),
}  # fmt: skip


def _host_us(f, blocks=60, calls=10):
    """Microseconds of the host a call: the best block, as other processes disturb the rest."""
    import gc

    import torch

    for _ in range(30):
        f()
    gc.collect()
    gc.disable()
    best = 1e9
    for _ in range(blocks):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        best = min(best, (time.perf_counter() - start) / calls)
    gc.enable()
    return round(best * 1e6, 1)


def case_overhead():
    """Time of calls on the host beside PyTorch's own; shapes are small, so the GPU never waits."""
    import cProfile
    import io
    import pstats

    import torch
    import torch.nn.functional as nn

    import pallas_kernels.torch as pk

    found = {}
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    w = torch.ones(1024, device="cuda")
    wb = w.bfloat16()
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda").bfloat16() for _ in range(3))
    qt, kt, vt = (y.transpose(1, 2) for y in (q, k, v))
    u = torch.randn(1, 256, 4, 64, device="cuda").bfloat16()
    g = torch.randn(1, 256, 4, device="cuda")
    sdpa = lambda: nn.scaled_dot_product_attention(qt, kt, vt, is_causal=True)
    ours = {
        "rms_norm": lambda: pk.rms_norm(x, w),
        "attention": lambda: pk.attention(q, k, v),
        "vlstm": lambda: pk.vlstm(u, u, u, g, g),
    }
    theirs = {"torch rms_norm": lambda: nn.rms_norm(x, (1024,), wb, 1e-5), "torch sdpa": sdpa}
    with torch.no_grad():
        for name, f in (ours | theirs).items():
            found[name] = _host_us(f)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(200):
            pk.vlstm(u, u, u, g, g)
        profile.disable()
    for y in (x, w, wb, q, k, v, qt, kt, vt, u, g):
        y.requires_grad_(True)
    leaves = {
        "rms_norm": ([x, w], x), "attention": ([q, k, v], q), "vlstm": ([u, g], u),
        "torch rms_norm": ([x, wb], x), "torch sdpa": ([qt, kt, vt], qt),
    }  # fmt: skip
    for name, f in (ours | theirs).items():
        of, like = leaves[name]
        go = torch.randn_like(like)
        found[f"{name} f"] = _host_us(f)
        found[f"{name} f+b"] = _host_us(lambda: torch.autograd.grad(f(), of, go))
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(15)
    return found | {"profile": text.getvalue()[-2500:]}


def case_start(which):
    """Seconds from the start of a process to the first result; the second process is warm."""
    start = time.time()
    import torch

    torch.empty(1, device="cuda")
    found = {"torch_s": time.time() - start}
    free = torch.cuda.mem_get_info()[0]
    import pallas_kernels.torch as pk

    x, w = torch.randn(64, 1024, device="cuda").bfloat16(), torch.ones(1024, device="cuda")
    pk.rms_norm(x, w)
    torch.cuda.synchronize()
    found["rms_norm_s"] = time.time() - start  # all until its result
    forward_backward("attention_128")
    torch.cuda.synchronize()
    found["and_attention_s"] = time.time() - start
    return {k: round(v, 2) for k, v in found.items()} | {
        "gpu_MiB": round((free - torch.cuda.mem_get_info()[0]) / 2**20),
        "torch_MiB": round(torch.cuda.memory_reserved() / 2**20),
        "no_jax": which == "first" or "jax" not in sys.modules,
        "no_dynamo": "torch._dynamo" not in sys.modules,
    }


def _gpu_ms(f, n=20):
    import torch

    for _ in range(5):
        f()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the host runs ahead
        a.record()
        for _ in range(n):
            f()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / n)
    return round(sorted(times)[2], 4)


def case_time_attention():
    import torch
    import torch.nn.functional as nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import pallas_kernels.torch as pk

    found = {"device": torch.cuda.get_device_name()}
    for D in (64, 128):
        shape = (4, 4096, 16, D)
        q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3))
        go = torch.randn(shape, device="cuda").bfloat16()
        f = lambda: pk.attention(q, k, v)
        fb = lambda: torch.autograd.grad(pk.attention(q, k, v), [q, k, v], go)
        row = {"ours_f": _gpu_ms(f), "ours_fb": _gpu_ms(fb)}
        t = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        gt = go.transpose(1, 2).contiguous()
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            try:
                with sdpa_kernel([getattr(SDPBackend, name)]):
                    s = lambda: nn.scaled_dot_product_attention(*t, is_causal=True)
                    row[f"{name}_f"] = _gpu_ms(s)
                    row[f"{name}_fb"] = _gpu_ms(lambda: torch.autograd.grad(s(), t, gt))
                    if name.startswith("CUDNN"):
                        torch.use_deterministic_algorithms(True, warn_only=True)
                        row[f"{name}_deterministic_fb"] = _gpu_ms(
                            lambda: torch.autograd.grad(s(), t, gt)
                        )
                        torch.use_deterministic_algorithms(False)
            except Exception as error:
                row[name] = str(error)[:200]
        found[f"D{D}"] = row
    return found


def case_vlstm(name):
    """Milliseconds by CUDA events: forward, forward and backward, the latter in a CUDA graph."""
    import torch

    import pallas_kernels.torch as pk

    torch.manual_seed(0)
    Bz, T, H, DQ, DV = VLSTMS[name]
    make = lambda *width: torch.randn(Bz, T, H, *width, device="cuda")
    q, k, v, go = (make(width).bfloat16() for width in (DQ, DQ, DV, DV))
    i, f = make(), make() + 3
    ours = [x.requires_grad_() for x in (q, k, v, i, f)]
    both = lambda: torch.autograd.grad(pk.vlstm(*ours), ours, go)
    found = {"device": torch.cuda.get_device_name()}
    found |= {"f": _gpu_ms(lambda: pk.vlstm(*ours), 5), "fb": _gpu_ms(both, 5)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    found["fb_graph"] = _gpu_ms(graph.replay, 5)
    print("RESULT", json.dumps(found), flush=True)
    try:
        from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk
    except ImportError as error:
        return found | {"mlstm_kernels": f"skipped: {error}"}
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in ours]
    given = go.transpose(1, 2).contiguous()
    for chunk in (128, 256):
        options = {"chunk_size": chunk, "autocast_kernel_dtype": torch.bfloat16}
        run = lambda: mlstm_chunkwise__xl_chunk(*theirs, **options)
        try:
            out, e = run().transpose(1, 2).float(), pk.vlstm(*ours).float()
            found[f"xl{chunk}_difference"] = round(float((out - e).norm() / e.norm()), 4)
            found[f"xl{chunk}_f"] = _gpu_ms(run, 5)
            found[f"xl{chunk}_fb"] = _gpu_ms(lambda: torch.autograd.grad(run(), theirs, given), 5)
        except Exception as error:
            found[f"xl{chunk}"] = f"{type(error).__name__}: {str(error)[-200:]}"
    return found


def _llama(layers):
    """Llama 3.2 1B, or fewer of its 16 layers, random bf16 weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192,
        tie_word_embeddings=True, use_cache=False,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    )  # fmt: skip
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).bfloat16().train()


def case_llama(how, layers="4"):
    """Steps of AdamW: how = eager, compile, patch, patch_compile; losses, ms a step, memory."""
    import torch

    import pallas_kernels.torch as pk

    model = _llama(int(layers))
    if "patch" in how:
        pk.patch(model)
    run = torch.compile(model) if "compile" in how else model
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    g = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(0, 128256, (4, 2048), device="cuda", generator=g)
    losses, times = [], []
    for _ in range(50):
        start = time.perf_counter()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(round(loss.item(), 5))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    ms = sorted(times[4:])[len(times[4:]) // 2] * 1e3
    return {
        "device": torch.cuda.get_device_name(), "ms": round(ms, 2), "losses": losses,
        "tokens_s": round(4 * 2048 / ms * 1e3),
        "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_s": round(times[0], 1),
    }  # fmt: skip


def case_gpu_times(how, names):
    """Milliseconds of the GPU's kernels, by CUPTI, in JAX or PyTorch: forward; with backward."""
    of = _jax_times if how == "jax" else _torch_times
    found = {}
    for name in names.split(","):
        try:
            found[name] = of(*TIMES[name])
        except Exception as error:
            found[name] = {"FAILED": f"{type(error).__name__}: {str(error)[:150]}"}
        print("RESULT", json.dumps({"times": found}), flush=True)
    return {"times": found}


def _jax_times(op, args, named, options):
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    import pallas_kernels as pk

    def make(spec):
        shape, dtype, *rest = spec
        if dtype == "int4":
            return pk.quantize(0.02 * jax.random.normal(jax.random.key(0), shape), bits=4)
        if dtype == I:
            return jax.random.randint(jax.random.key(0), shape, 0, rest[0], jnp.int32)
        scale, offset = rest or (1.0, 0.0)
        return (jax.random.normal(jax.random.key(0), shape) * scale + offset).astype(dtype)

    arrays = [make(x) for x in (*args, *named.values())]
    wrt = [i for i, x in enumerate(arrays) if isinstance(x, jax.Array) and x.dtype != jnp.int32]

    def call(*arrays):
        keywords = dict(zip(named, arrays[len(args) :], strict=True)) | options
        return getattr(pk, op)(*arrays[: len(args)], **keywords, implementation="mosaic")

    def both(given, *arrays):
        def part(*chosen):
            full = dict(enumerate(arrays)) | dict(zip(wrt, chosen, strict=True))
            return call(*full.values())

        out, vjp = jax.vjp(part, *(arrays[i] for i in wrt))
        return out, vjp(given)

    def measure(f, *given):
        return round(float(np.median(profiler.measure(jax.jit(f), iterations=10)(*given)[1])), 4)

    given = jax.tree.map(jnp.ones_like, jax.eval_shape(call, *arrays))
    return {"f": measure(call, *arrays), "fb": measure(both, given, *arrays)}


def _torch_times(op, args, named, options):
    import torch

    import pallas_kernels.torch as pk

    def make(spec):
        shape, dtype, *rest = spec
        if dtype == "int4":
            return pk.quantize(0.02 * torch.randn(shape, device="cuda"), bits=4)
        if dtype == I:
            return torch.randint(0, rest[0], shape, dtype=torch.int32, device="cuda")
        scale, offset = rest or (1.0, 0.0)
        x = torch.randn(shape, device="cuda") * scale + offset
        return x.to(getattr(torch, dtype)).requires_grad_()

    arrays = [make(x) for x in args]
    keywords = {k: make(x) for k, x in named.items()} | options
    wrt = [x for x in (*arrays, *keywords.values()) if isinstance(x, torch.Tensor)]
    wrt = [x for x in wrt if x.requires_grad]
    call = lambda: getattr(pk, op)(*arrays, **keywords)
    outs = lambda: [y] if isinstance(y := call(), torch.Tensor) else list(y)
    given = [torch.ones_like(y) for y in outs()]

    def forward():
        with torch.no_grad():
            call()

    return {
        "f": _kernels_ms(forward),
        "fb": _kernels_ms(lambda: torch.autograd.grad(outs(), wrt, given)),
    }


def _kernels_ms(f, n=10):
    """What the GPU's kernels of f take, the median of n calls' time in three runs."""
    import torch

    found = []
    for _ in range(3):
        f()
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
            for _ in range(n):
                f()
            torch.cuda.synchronize()
        found.append(sum(x.self_device_time_total for x in profile.key_averages()) / n / 1e3)
    return round(sorted(found)[1], 4)
