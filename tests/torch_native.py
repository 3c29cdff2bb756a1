"""Checks pallas_kernels.torch on a GPU and measures it: one call, every case in its own process.

    python tests/torch_native.py --out FOLDER

FOLDER/torch_native.jsonl gets a line for each case as it ends: what it found, or its traceback.
Needs an H100 or H200, PyTorch for CUDA 13 and JAX with its CUDA 13 plugin.  With two GPUs the timed
cases run on the first one and the checks on the second at the same time: about 8 minutes.
"""
# ruff: noqa: B023  (functions are called in the round of the loop that makes them)

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
B, F, I = "bfloat16", "float32", "int32"
VLSTMS = {  # B, T, NH, DQK, DV
    "124M": (8, 1024, 4, 96, 192),
    "7B": (1, 8192, 8, 256, 512),
    "4x2048": (4, 2048, 8, 64, 128),
}

# name: (op, arrays by position, arrays by name, options).  An array is (shape, dtype) with normal
# values, (shape, dtype, scale, offset), or (shape, int32, below).
OPS = {
    "attention_128": ("attention", [((2, 1024, 8, 128), B)] + [((2, 1024, 4, 128), B)] * 2, {}, {}),
    "attention_64": ("attention", [((2, 1000, 4, 64), B)] * 3, {}, {"window": 256}),
    "attention_full": ("attention", [((1, 512, 4, 128), B)] * 3, {}, {"causal": False}),
    "rms_norm": ("rms_norm", [((4, 300, 2048), B), ((2048,), F, 0.1, 1.0)], {}, {}),
    "rms_norm_residual": ("rms_norm", [((4, 300, 2048), B), ((2048,), F, 0.1, 1.0)],
                          {"residual": ((4, 300, 2048), B)}, {}),
    "layer_norm": ("layer_norm", [((4, 300, 768), B), ((768,), F, 0.1, 1.0), ((768,), F)], {}, {}),
    "layer_norm_residual": ("layer_norm", [((4, 300, 768), B), ((768,), F, 0.1, 1.0), ((768,), F)],
                            {"residual": ((4, 300, 768), B)}, {}),
    "rope": ("rope", [((2, 512, 8, 64), B), ((2, 512, 4, 64), B), ((512,), I, 512)], {},
             {"theta": 500000.0}),
    "swiglu": ("swiglu", [((512, 2048), B)] * 2, {}, {}),
    "mlp_gate": ("mlp", [((512, 1024), B), ((1024, 2816), B, 0.03, 0), ((2816, 1024), B, 0.03, 0)],
                 {"gate": ((1024, 2816), B, 0.03, 0)}, {}),
    "mlp_gelu": ("mlp", [((512, 768), B), ((768, 3072), B, 0.03, 0), ((3072, 768), B, 0.03, 0)],
                 {"bias": ((3072,), B)}, {}),
    "encoder": ("encoder", [((2, 512), I, 5000), ((5000, 768), F), ((512, 768), F)], {},
                {"dtype": B}),
    "cross_entropy": ("cross_entropy", [((512, 32000), B), ((512,), I, 32000)], {}, {}),
    "linear_cross_entropy": ("linear_cross_entropy", [
        ((2, 512, 768), B), ((32000, 768), B, 0.03, 0), ((2, 512), I, 32000)], {}, {}),
    "vlstm": ("vlstm", [((2, 1024, 4, 64), B)] * 2 + [((2, 1024, 4, 128), B)]
              + [((2, 1024, 4), F), ((2, 1024, 4), F, 1.0, 3.0)], {}, {}),
    "vlstm_256": ("vlstm", [((1, 1024, 4, 128), B)] * 2 + [((1, 1024, 4, 256), B)]
                  + [((1, 1024, 4), F), ((1, 1024, 4), F, 1.0, 3.0)], {}, {"gate": "sigmoid"}),
}  # fmt: skip


def inputs(name):
    """The arrays of a case as NumPy float32 or int32 with their dtypes, for both frameworks."""
    _, args, named, options = OPS[name]
    rng = np.random.default_rng(sum(map(ord, name)))

    def make(spec):
        shape, dtype, *rest = spec
        if dtype == I:
            return rng.integers(0, rest[0], shape, dtype=np.int32), I
        scale, offset = rest or (1.0, 0.0)
        return (rng.standard_normal(shape) * scale + offset).astype(np.float32), dtype

    return [make(x) for x in args], {k: make(x) for k, x in named.items()}, options


def cotangents(shapes):
    rng = np.random.default_rng(7)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def outputs(op, args, named, options):
    """Shapes and dtypes of the op's outputs."""
    import jax

    struct = lambda pair: jax.ShapeDtypeStruct(pair[0].shape, pair[1])
    call = lambda a, n: jax.tree.leaves(op(*a, **n, **options, implementation="mosaic"))
    return jax.eval_shape(call, [struct(x) for x in args], {k: struct(x) for k, x in named.items()})


# ---- JAX: bits, the reference and the truth, in one process for all ops --------------------------


def jax_reference(folder, names):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp

    import pallas_kernels as pk

    found = {"jax": jax.__version__, "device": str(jax.devices()[0])}
    for name in names:
        try:
            start = time.time()
            op = getattr(pk, OPS[name][0])
            args, named, options = inputs(name)

            def run(implementation, wide):
                def cast(pair):
                    x, dtype = pair
                    if dtype == I:
                        return jnp.asarray(x)
                    x = jnp.asarray(x, jnp.float32).astype(dtype)
                    return x.astype(jnp.float64) if wide else x

                arrays = [cast(x) for x in args] + [cast(x) for x in named.values()]
                chosen = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
                own = dict(options)
                if wide and "dtype" in own:
                    own["dtype"] = "float64"

                shapes = [o.shape for o in narrow]
                # Rounded here: inside the jit XLA may drop the rounding, and each form differently.
                cts = [jnp.asarray(c).astype(o.dtype) for c, o in
                       zip(cotangents(shapes), narrow, strict=True)]  # fmt: skip

                def f(arrays, cts):
                    def part(*d):
                        full = list(arrays)
                        for i, x in zip(chosen, d, strict=True):
                            full[i] = x
                        keywords = dict(zip(named, full[len(args) :], strict=True))
                        out = op(
                            *full[: len(args)], **keywords, **own, implementation=implementation
                        )
                        return jax.tree.leaves(out)

                    out, vjp = jax.vjp(part, *(arrays[i] for i in chosen))
                    return out, vjp([c.astype(o.dtype) for c, o in zip(cts, out, strict=True)])

                out, grads = jax.jit(f)(arrays, cts)
                return [*out, *grads]

            narrow = outputs(op, args, named, options)

            mosaic = run("mosaic", False)
            plain = run("xla", False)
            with jax.enable_x64(True):
                truth = run("xla", True)
            path = Path(folder) / f"{name}.npz"
            np.savez(
                path.with_suffix(".part.npz"),
                **{f"m{i}": np.asarray(x.astype(jnp.float32)) for i, x in enumerate(mosaic)},
                **{f"x{i}": np.asarray(x.astype(jnp.float32)) for i, x in enumerate(plain)},
                **{f"t{i}": np.asarray(x).astype(np.float64) for i, x in enumerate(truth)},
            )
            path.with_suffix(".part.npz").rename(path)
            found[name] = round(time.time() - start, 1)
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
        print(json.dumps(found), flush=True)
    return found


# ---- PyTorch -------------------------------------------------------------------------------------


def tensors(name, grad=True):
    import torch

    args, named, options = inputs(name)

    def cast(pair):
        x, dtype = pair
        x = torch.from_numpy(x).to("cuda", getattr(torch, dtype))
        return x.requires_grad_(grad and dtype != I)

    options = {k: getattr(torch, v) if k == "dtype" else v for k, v in options.items()}
    return [cast(x) for x in args], {k: cast(x) for k, x in named.items()}, options


def call(name, args, named, options):
    import torch

    import pallas_kernels.torch as pk

    out = getattr(pk, OPS[name][0])(*args, **named, **options)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def forward_backward(name):
    import torch

    args, named, options = tensors(name)
    outs = call(name, args, named, options)
    cts = [torch.from_numpy(c).to("cuda", o.dtype) for c, o in
           zip(cotangents([tuple(o.shape) for o in outs]), outs, strict=True)]  # fmt: skip
    wanted = [x for x in (*args, *named.values()) if x.requires_grad]
    grads = torch.autograd.grad(outs, wanted, cts)
    return [*outs, *grads]


def case_op(name, folder):
    """Bits against JAX's, twice, and the error against float64 relative to the jnp reference's."""
    import torch

    times = [time.time()]
    got = forward_backward(name)
    torch.cuda.synchronize()
    times.append(time.time())
    again = forward_backward(name)
    torch.cuda.synchronize()
    times.append(time.time())
    found = {
        "first_s": round(times[1] - times[0], 2),
        "second_s": round(times[2] - times[1], 4),
        "repeatable": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
    }
    path = Path(folder) / f"{name}.npz"
    end = times[0] + 130
    while not path.exists() and time.time() < end:
        time.sleep(1)
    if not path.exists():
        return found | {"jax": "no result"}
    data = np.load(path)
    rows = []
    for i, x in enumerate(got):
        mine = x.detach().float().cpu().numpy()
        m, e, t = data[f"m{i}"], data[f"x{i}"], data[f"t{i}"]
        floor = 2 * np.finfo(np.float32).eps * max(np.abs(t).max(), 1e-30)
        ratios, own = [], []
        for norm in (lambda d: np.abs(d).max(), lambda d: float(np.sqrt(np.mean(d * d)))):
            ratio = lambda d: round(float(max(norm(d) - floor, 0) / max(norm(e - t), 1e-30)), 3)
            ratios.append(ratio(mine - t))
            own.append(ratio(m - t))
        rows.append({
            "bits": bool((mine == m).all()), "differ": float((mine != m).mean()),
            "ratio_max": ratios[0], "ratio_rms": ratios[1], "jax_ratios": own,
            "ok": all(a <= max(2, 1.01 * b) for a, b in zip(ratios, own, strict=True)),
            "shape": list(mine.shape),
        })  # fmt: skip
    return found | {
        "bits_equal": all(r["bits"] for r in rows),
        "ratios_ok": all(r["ok"] for r in rows),  # within 2, or not above our op's in JAX
        "arrays": rows,
    }


def case_opcheck(name):
    """Both passes as operators; their gradients are case_compile's."""
    import torch

    from pallas_kernels.torch import ops

    args, named, options = tensors(name)
    outs = call(name, args, named, options)
    made = next(c for c in ops._calls.values() if c.wrt)
    operator = getattr(torch.ops.pallas_kernels, OPS[name][0]).default
    arrays = [x.detach() for x in (*args, *named.values())]
    full = operator(arrays, made.key, False)
    saved = [(arrays if where == "in" else full)[i] for where, i in made.entry.saved]
    given = [torch.randn_like(o) for o, yes in zip(outs, made.entry.floats, strict=True) if yes]
    found = {}
    for test in (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
    ):
        for which, values in (("forward", arrays), ("backward", [*saved, *given])):
            try:
                values = [x.clone() for x in values]
                if test == "test_autograd_registration":
                    values = [x.requires_grad_(x.is_floating_point()) for x in values]
                arguments = values, made.key, which == "backward"
                torch.library.opcheck(operator, arguments, test_utils=(test,))
                found[f"{test} {which}"] = True
            except Exception as error:
                found[f"{test} {which}"] = f"{type(error).__name__}: {str(error)[-600:]}"
    return found


def _block():
    """A small transformer block: rms_norm, rope, attention, mlp, and its inputs."""
    import torch

    import pallas_kernels.torch as pk

    g = torch.Generator("cuda").manual_seed(0)
    rand = lambda *s, k=1.0: (torch.randn(*s, device="cuda", generator=g) * k).bfloat16()
    C, H, T = 1024, 8, 512
    w = {
        "n1": torch.ones(C, device="cuda"), "n2": torch.ones(C, device="cuda"),
        "qkv": rand(C, 3 * C, k=0.03), "o": rand(C, C, k=0.03), "up": rand(C, 2816, k=0.03),
        "gate": rand(C, 2816, k=0.03), "down": rand(2816, C, k=0.03),
    }  # fmt: skip
    for x in w.values():
        x.requires_grad_(True)
    positions = torch.arange(T, dtype=torch.int32, device="cuda")

    def block(x, w):
        y = pk.rms_norm(x, w["n1"])
        q, k, v = (y @ w["qkv"]).view(*x.shape[:2], 3, H, C // H).unbind(2)
        q, k = pk.rope(q.contiguous(), k.contiguous(), positions)
        y = pk.attention(q, k, v).reshape(x.shape) @ w["o"]
        y, x = pk.rms_norm(y, w["n2"], residual=x)
        return x + pk.mlp(y, w["up"], w["down"], gate=w["gate"])

    return block, rand(2, T, C).requires_grad_(True), w


def case_compile():
    import torch

    block, x, w = _block()
    eager = block(x, w)
    ge = torch.autograd.grad(eager.float().square().mean(), [x, *w.values()])
    start = time.time()
    compiled = torch.compile(block, fullgraph=True)
    out = compiled(x, w)
    gc = torch.autograd.grad(out.float().square().mean(), [x, *w.values()])
    torch.cuda.synchronize()
    err = lambda a, b: float((a.float() - b.float()).abs().max() / b.float().abs().max())
    return {
        "compile_s": round(time.time() - start, 1),
        "out": err(out, eager),
        "grads": [err(a, b) for a, b in zip(gc, ge, strict=True)],
    }


def case_cuda_graph():
    import torch

    block, x, w = _block()
    leaves = [x, *w.values()]

    def step():
        out = block(x, w)
        return out, torch.autograd.grad(out.float().square().mean(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    eager, ge = step()
    return {
        "out_equal": torch.equal(out, eager),
        "grads_equal": [torch.equal(a, b) for a, b in zip(grads, ge, strict=True)],
    }


def case_reduce_overhead():
    import torch

    block, x, w = _block()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    outs = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(x, w)
        (g,) = torch.autograd.grad(out.float().square().mean(), [x])
        outs.append((out.detach().clone(), g.clone()))
    torch.cuda.synchronize()
    return {"equal": all(torch.equal(outs[-1][i], outs[0][i]) for i in (0, 1))}


def case_streams():
    import torch

    import pallas_kernels.torch as pk

    q, k, v = (torch.randn(2, 2048, 8, 128, device="cuda").bfloat16() for _ in range(3))
    expected = pk.attention(q, k, v)
    torch.cuda.synchronize()
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for _ in range(10):
        for s in (a, b):
            with torch.cuda.stream(s):
                torch.cuda._sleep(1_000_000)
                y = q * 1  # produced on this stream: a launch on another would read garbage
                results.append(pk.attention(y, k, v))
    torch.cuda.synchronize()
    return {"equal": all(torch.equal(r, expected) for r in results)}


def case_strides():
    import torch

    import pallas_kernels.torch as pk

    found = {}
    wide = torch.randn(2, 8, 512, 3 * 128, device="cuda").bfloat16()
    q, k, v = (x.transpose(1, 2) for x in wide.split(128, -1))
    c = [x.contiguous() for x in (q, k, v)]
    found["transposed"] = torch.equal(pk.attention(q, k, v), pk.attention(*c))
    x = torch.randn(64 * 1024 + 1, device="cuda").bfloat16()[1:].view(64, 1024)
    w = torch.ones(1024, device="cuda")
    found["misaligned"] = torch.equal(pk.rms_norm(x, w), pk.rms_norm(x.clone(), w))
    a, b, d = (y.clone().requires_grad_(True) for y in (q, k, v))
    a2, b2, d2 = (y.clone().requires_grad_(True) for y in c)
    g = torch.randn(2, 8, 512, 128, device="cuda").bfloat16().transpose(1, 2)
    one = torch.autograd.grad(pk.attention(a, b, d), [a, b, d], g)
    two = torch.autograd.grad(pk.attention(a2, b2, d2), [a2, b2, d2], g.contiguous())
    found["gradients"] = all(torch.equal(y, z) for y, z in zip(one, two, strict=True))
    e = torch.randn(2, 512, 8, 128, device="cuda").bfloat16().requires_grad_(True)
    out = pk.attention(e, e[:, :, :1].expand(-1, -1, 8, -1), e)
    (ge,) = torch.autograd.grad(out.sum(), [e])
    found["expanded"] = bool(torch.isfinite(ge).all())
    return found


def case_autograd():
    import torch
    from torch.utils.checkpoint import checkpoint

    import pallas_kernels.torch as pk

    found = {}
    block, x, w = _block()
    one = torch.autograd.grad(block(x, w).float().square().mean(), [x])[0]
    two = torch.autograd.grad(
        checkpoint(block, x, w, use_reentrant=False).float().square().mean(), [x]
    )[0]
    found["checkpoint"] = torch.equal(one, two)
    q, k, v = (torch.randn(1, 512, 4, 64, device="cuda").bfloat16() for _ in range(3))
    with torch.no_grad():
        found["no_grad"] = not pk.attention(q.requires_grad_(), k, v).requires_grad
    q.requires_grad_(False)
    all_three = [x.clone().requires_grad_(True) for x in (q, k, v)]
    full = torch.autograd.grad(pk.attention(*all_three).sum(), all_three)
    only = v.clone().requires_grad_(True)
    found["one_input"] = torch.equal(
        torch.autograd.grad(pk.attention(q, k, only).sum(), [only])[0], full[2]
    )
    with torch.autocast("cuda", torch.bfloat16):
        out = pk.attention(q.float(), k.float(), v.float())
        found["autocast"] = out.dtype == torch.bfloat16 and torch.equal(out, pk.attention(q, k, v))
    with torch.inference_mode():
        found["inference"] = torch.equal(pk.attention(q, k, v), out)
    try:
        pk.attention(q.cpu(), k.cpu(), v.cpu())
    except Exception as error:
        found["cpu"] = f"{type(error).__name__}: {error}"
    try:
        pk.attention(q[..., :40], k[..., :40], v[..., :40])
        found["D40"] = "ran"
    except Exception as error:
        found["D40"] = f"{type(error).__name__}: {error}"
    return found


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


def case_quantized():
    """quantized_linear and Packed beside the same calls without."""
    import torch

    import pallas_kernels.torch as pk

    found = {}
    w = torch.randn(1024, 512, device="cuda") * 0.03
    weight = pk.quantize(w, bits=4)
    for rows in (1, 4, 256):
        x = torch.randn(rows, 1024, device="cuda").bfloat16().requires_grad_()
        y = pk.quantized_linear(x, weight)
        error = float((y.float() - x.float() @ w).norm() / (x.float() @ w).norm())
        (g,) = torch.autograd.grad(y.sum(), [x])
        of = w.sum(1).expand(rows, -1)
        found[f"rows {rows}"] = [round(error, 4), round(float((g - of).norm() / of.norm()), 4)]
    x = torch.randn(2, 512, 1024, device="cuda").bfloat16().requires_grad_()
    positions = torch.arange(512, dtype=torch.int32, device="cuda")
    out = pk.attention(pk.rope(pk.Packed(x, ((4, 128), (2, 128), (2, 128))), None, positions))
    q, k, v = (y.unflatten(-1, (-1, 128)).contiguous() for y in x.split((512, 256, 256), -1))
    alone = pk.attention(*pk.rope(q, k, positions), v)
    (g,), (e,) = (torch.autograd.grad(y.float().square().sum(), [x]) for y in (out, alone))
    close = lambda a, b: float((a.float() - b.float()).abs().max() / b.float().abs().max())
    return found | {"packed": torch.equal(out, alone), "packed gradient": close(g, e)}


def case_two_gpus():
    """The same bits on both GPUs, whichever is current, and in threads at once."""
    import torch

    import pallas_kernels.torch as pk

    if torch.cuda.device_count() < 2:
        return {"one GPU": True}
    g = torch.Generator().manual_seed(0)
    q, i = torch.randn(2, 512, 4, 64, generator=g), torch.randn(2, 512, 4, generator=g)

    def run(device):
        x, y = q.to(device, torch.bfloat16).requires_grad_(), i.to(device).requires_grad_()
        outs = [pk.attention(x, x, x), pk.vlstm(x, x, x, y, y), pk.rms_norm(x, x[0, 0, 0].float())]
        grads = torch.autograd.grad(sum(o.float().square().sum() for o in outs), [x, y])
        return [z.detach().cpu() for z in (*outs, *grads)]

    expected = run("cuda:0")
    equal = lambda got: all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with ThreadPoolExecutor(4) as pool:
        threads = all(map(equal, pool.map(run, ["cuda:0", "cuda:1"] * 4)))
    return {"cuda:1": equal(run("cuda:1")), "threads": threads}


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
    import ctypes
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
    from pallas_kernels.torch import launch

    try:
        found["library"] = str(launch._library())
    except Exception:
        found["library"] = traceback.format_exc()[-800:]
        found["global"] = hasattr(ctypes.CDLL(None), "MosaicGpuCompile")
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


def run_case(spec, folder):
    name, *rest = spec.split(":")
    if name == "jax":
        return jax_reference(folder, rest[0].split(","))
    if name == "op":
        return case_op(rest[0], folder)
    return globals()[f"case_{name}"](*rest)


def gpus() -> int:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    return found.count("GPU ")


TIMED = [  # one after the other, with seconds that each may take
    ("probe", 60), ("overhead", 60), ("time_attention", 90), ("time_vlstm", 120),
    ("start:first", 60), ("start:second", 60), ("llama:patch", 120), ("llama:eager", 120),
    ("llama:compile", 200), ("llama:patch_compile", 200), ("jax_times", 120),
]  # fmt: skip
CHECKS = [
    "quantized", *[f"op:{n}" for n in OPS], "strides", "autograd", "streams", "cuda_graph",
    "compile", "reduce_overhead",
    *[f"opcheck:{n}" for n in ("attention_128", "rms_norm", "encoder", "vlstm")],
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--case")
    parser.add_argument("--folder")
    parser.add_argument("--only", nargs="*", help="names of cases, whole or up to the colon")
    parser.add_argument("--seconds", type=float, default=540)
    arguments = parser.parse_args()
    if arguments.case:
        try:
            found = run_case(arguments.case, arguments.folder)
        except BaseException:
            found = {"FAILED": traceback.format_exc()[-2500:]}
        print("\nRESULT " + json.dumps(found), flush=True)
        return 0
    folder = tempfile.mkdtemp()
    results, begin = {}, time.time()
    os.environ["PALLAS_KERNELS_CACHE"] = str(Path(folder) / "cache")
    path = Path(arguments.out) / "torch_native.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.open("w", buffering=1)

    def one(spec, limit, gpu, cores):
        limit = min(limit, begin + arguments.seconds - time.time())
        if limit < 5:
            found = {"SKIPPED": "no time left"}
        else:
            found = measured(spec, limit, gpu, cores)
        results[spec] = found
        lines.write(json.dumps({spec: found}) + "\n")
        print(f"{time.time() - begin:.0f} s", spec, json.dumps(found)[:300], flush=True)

    def measured(spec, limit, gpu, cores):
        command = [sys.executable, __file__, "--case", spec, "--folder", folder]
        if cores and shutil.which("taskset"):
            command = ["taskset", "-c", cores, *command]
        environment = dict(os.environ) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        environment["OMP_NUM_THREADS"] = "4"
        if not spec.startswith("jax"):
            environment.pop("JAX_PLATFORMS", None)
        start = time.time()
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environment
            )
            said = [x for x in ran.stdout.splitlines() if x.startswith("RESULT ")]
            found = json.loads(said[-1][7:]) if said else {"DIED": ran.returncode}
            if not said or "FAILED" in found:
                found["stderr"] = ran.stderr[-1500:]
        except subprocess.TimeoutExpired as error:
            found = {k: (getattr(error, k) or b"").decode(errors="replace")[-800:]
                     for k in ("stdout", "stderr")} | {"TIMEOUT": limit}  # fmt: skip
        return found | {"wall_s": round(time.time() - start, 1)}

    def chosen(specs):
        only = arguments.only
        return [s for s in specs if not only or s in only or s.split(":")[0] in only]

    count, cores = gpus(), os.cpu_count() or 1
    # Timed cases on the first GPU, checks on the second at the same time, unless one is chosen.
    aside = count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    mine = f"0-{max(cores // 3, 1) - 1}" if aside else ""
    rest = f"{cores // 3}-{cores - 1}" if aside else ""
    names = [s[3:] for s in chosen(CHECKS) if s.startswith("op:")]
    references = [f"jax:{','.join(names[i::5])}" for i in range(min(5, len(names)))]

    def timed():
        for spec, limit in TIMED:
            if chosen([spec]):
                one(spec, limit, "0" if aside else None, mine)

    def checks():
        with ThreadPoolExecutor(12) as pool:
            for spec in (*references, *chosen(CHECKS)):
                pool.submit(one, spec, 240, "1" if aside else None, rest)

    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(timed)]
        if not aside:
            runs[0].result()
        runs.append(both.submit(checks))
        for run in runs:
            run.result()
    if chosen(["two_gpus"]):
        one("two_gpus", 60, None, "")
    bad = [k for k, v in results.items() if {"FAILED", "DIED", "TIMEOUT", "SKIPPED"} & set(v)]
    print(f"{len(results)} cases, {len(bad)} failed: {bad}; {time.time() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
