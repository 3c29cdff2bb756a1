"""Timings of pallas_kernels.torch on a GPU, beside PyTorch, mlstm_kernels and JAX.

Each case is a function that returns what it measured; torch_native.py runs them, one after the
other, each in its own process.
"""
# ruff: noqa: B023  (functions are called in the round of the loop that makes them)

import json
import os
import sys
import time

import numpy as np
from torch_native_ops import forward_backward

VLSTMS = {  # B, T, NH, DQK, DV
    "124M": (8, 1024, 4, 96, 192),
    "7B": (1, 8192, 8, 256, 512),
    "4x2048": (4, 2048, 8, 64, 128),
}


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

    torch.cuda.init()
    torch.empty(1, device="cuda")
    torch_s = time.time() - start
    free = torch.cuda.mem_get_info()[0]
    import pallas_kernels.torch  # noqa: F401

    import_s = time.time() - start - torch_s
    before = time.time()
    forward_backward("attention_128")
    torch.cuda.synchronize()
    op_s = time.time() - before
    import jax

    return {
        "torch_s": round(torch_s, 2), "import_s": round(import_s, 2), "op_s": round(op_s, 2),
        "gpu_MiB": round((free - torch.cuda.mem_get_info()[0]) / 2**20),
        "torch_MiB": round(torch.cuda.memory_reserved() / 2**20),
        "jax_backend": jax.default_backend(),
    }  # fmt: skip


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


def case_time_vlstm():
    import torch

    import pallas_kernels.torch as pk

    found = {"device": torch.cuda.get_device_name()}
    for name, (Bz, T, H, DQ, DV) in VLSTMS.items():
        try:
            q, k = (
                torch.randn(Bz, T, H, DQ, device="cuda").bfloat16().requires_grad_() for _ in "ab"
            )
            v = torch.randn(Bz, T, H, DV, device="cuda").bfloat16().requires_grad_()
            i = torch.randn(Bz, T, H, device="cuda").requires_grad_()
            f = (torch.randn(Bz, T, H, device="cuda") + 3).requires_grad_()
            go = torch.randn_like(v)
            forward = lambda: pk.vlstm(q, k, v, i, f)
            both = lambda: torch.autograd.grad(pk.vlstm(q, k, v, i, f), [q, k, v, i, f], go)
            row = {"f": _gpu_ms(forward, 5), "fb": _gpu_ms(both, 5)}
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                both()
            row["fb_graph"] = _gpu_ms(graph.replay, 5)
            found[name] = row | _mlstm_kernels(Bz, T, H, DQ, DV)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[-500:]}"
        print(json.dumps(found), flush=True)
    return found


def _mlstm_kernels(Bz, T, H, DQ, DV):
    """The same call by mlstm_kernels, if it is installed."""
    import importlib

    import torch

    row = {}
    for kind, chunk in (("limit", 64), ("xl", 128)):
        try:
            module = importlib.import_module(f"mlstm_kernels.torch.chunkwise.triton_{kind}_chunk")
            op = getattr(module, f"mlstm_chunkwise__{kind}_chunk")
            make = lambda *last, dtype=torch.bfloat16: torch.randn(
                Bz, H, T, *last, device="cuda", dtype=dtype
            ).requires_grad_()
            q, k, v, i, f = (
                make(DQ), make(DQ), make(DV), make(dtype=torch.float32), make(dtype=torch.float32)
            )  # fmt: skip
            go = torch.randn_like(v)
            run = lambda: op(q=q, k=k, v=v, i=i, f=f, return_last_states=False, chunk_size=chunk)
            row[f"{kind}_f"] = _gpu_ms(run, 5)
            row[f"{kind}_fb"] = _gpu_ms(lambda: torch.autograd.grad(run(), [q, k, v, i, f], go), 5)
        except Exception as error:
            row[kind] = f"{type(error).__name__}: {str(error)[-200:]}"
    return row


def _llama(layers=16):
    """Llama 3.2 1B, random bf16 weights."""
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


def case_llama(how):
    """Steps of AdamW: how = eager, compile, patch, patch_compile; losses, ms a step, memory."""
    import torch

    import pallas_kernels.torch as pk

    model = _llama()
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
        losses.append(round(loss.item(), 4))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    ms = sorted(times[4:])[len(times[4:]) // 2] * 1e3
    return {
        "device": torch.cuda.get_device_name(), "ms": round(ms, 2), "losses": losses[::7],
        "tokens_s": round(4 * 2048 / ms * 1e3),
        "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_s": round(times[0], 1),
    }  # fmt: skip


def case_jax_times():
    """The same calls in JAX, by the profiler that DESIGN's figures use."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    import pallas_kernels as pk

    found = {"device": str(jax.devices()[0])}

    def both(op):
        def f(go, *a):
            out, vjp = jax.vjp(op, *a)
            return out, vjp(go)

        return jax.jit(f)

    def measure(f, *a):
        _, ms = profiler.measure(f, iterations=20)(*a)
        ms = ms if isinstance(ms, list) else [ms]
        return round(float(np.median(ms)), 4)

    key = jax.random.key(0)
    for D in (64, 128):
        q = jax.random.normal(key, (4, 4096, 16, D), jnp.bfloat16)
        op = lambda q, k, v: pk.attention(q, k, v, implementation="mosaic")
        found[f"attention D{D}"] = {
            "f": measure(jax.jit(op), q, q, q),
            "fb": measure(both(op), q, q, q, q),
        }
    for name, (Bz, T, H, DQ, DV) in VLSTMS.items():
        try:
            q = jax.random.normal(key, (Bz, T, H, DQ), jnp.bfloat16)
            v = jax.random.normal(key, (Bz, T, H, DV), jnp.bfloat16)
            i = jax.random.normal(key, (Bz, T, H), jnp.float32)
            op = lambda *a: pk.vlstm(*a, implementation="mosaic")
            found[f"vlstm {name}"] = {
                "f": measure(jax.jit(op), q, q, v, i, i + 3),
                "fb": measure(both(op), v, q, q, v, i, i + 3),
            }  # fmt: skip
        except Exception as error:
            found[f"vlstm {name}"] = f"{type(error).__name__}: {str(error)[-300:]}"
    return found


def case_probe():
    """The riskiest steps alone: the plugin, its C functions, one kernel compiled and launched."""
    import importlib.util
    import shutil

    import torch

    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    found["gpu"] = torch.cuda.get_device_name()
    import jax
    import jaxlib

    found |= {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "ptxas": shutil.which("ptxas")}
    from jax._src import lib

    found["cuda_path"] = str(lib.cuda_path)
    for name in ("jax_plugins", "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12", "transformers"):
        try:
            spec = importlib.util.find_spec(name)
            found[name] = spec and str(spec.origin or list(spec.submodule_search_locations))
        except Exception as error:
            found[name] = repr(error)
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except Exception as error:
        found["transformers"] = repr(error)[:200]
    import pallas_kernels.torch as pk

    x = torch.randn(64, 1024, device="cuda").bfloat16()
    w = torch.ones(1024, device="cuda")
    start = time.time()
    y = pk.rms_norm(x, w)
    torch.cuda.synchronize()
    found["rms_norm_s"] = round(time.time() - start, 2)
    found["rms_norm_error"] = float(
        (y.float() - torch.nn.functional.rms_norm(x.float(), (1024,))).abs().max()
    )
    found["env"] = {
        k: v for k, v in os.environ.items() if "MOSAIC" in k or "XLA" in k or "JAX" in k
    }
    return found
