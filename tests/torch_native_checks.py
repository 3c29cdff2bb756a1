"""Checks of pallas_kernels.torch on a GPU: each case is a function that returns what it found.

torch_native.py runs them, each in its own process.
"""
# ruff: noqa: B023  (functions are called in the round of the loop that makes them)

import json
import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

B, F, I = "bfloat16", "float32", "int32"

# name: (op, arrays by position, arrays by name, options).  An array is (shape, dtype) with normal
# values, (shape, dtype, scale, offset), or (shape, int32, below).
OPS = {
    "attention_128": ("attention", [((2, 1024, 8, 128), B)] + [((2, 1024, 4, 128), B)] * 2, {}, {}),
    "attention_64": ("attention", [((2, 1000, 4, 64), B)] * 3, {}, {"window": 256}),
    "attention_full": ("attention", [((1, 512, 4, 128), B)] * 3, {}, {"causal": False}),
    "attention_segments": ("attention", [((2, 512, 4, 64), B)] * 3,
                           {"segment_ids": ((2, 512), I, 3)}, {}),
    "rms_norm": ("rms_norm", [((4, 300, 2048), B), ((2048,), F, 0.1, 1.0)], {}, {}),
    "rms_norm_residual": ("rms_norm", [((4, 300, 2048), B), ((2048,), F, 0.1, 1.0)],
                          {"residual": ((4, 300, 2048), B)}, {}),
    "layer_norm": ("layer_norm", [((4, 300, 768), B), ((768,), F, 0.1, 1.0), ((768,), F)], {}, {}),
    "layer_norm_residual": ("layer_norm", [((4, 300, 768), B), ((768,), F, 0.1, 1.0), ((768,), F)],
                            {"residual": ((4, 300, 768), B)}, {}),
    "rope": ("rope", [((2, 512, 8, 64), B), ((2, 512, 4, 64), B), ((512,), I, 512)], {},
             {"theta": 500000.0}),
    "swiglu": ("swiglu", [((512, 2048), B)] * 2, {}, {}),
    "swiglu_odd": ("swiglu", [((64, 100), B)] * 2, {}, {}),
    "mlp_plain": ("mlp", [((2, 256, 768), B), ((768, 3072), B, 0.03, 0), ((3072, 768), B, 0.03, 0)],
                  {}, {}),
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
    given = [torch.randn_like(o) for o in outs]
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
