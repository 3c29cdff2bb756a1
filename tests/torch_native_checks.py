"""Checks of pallas_kernels.torch on a GPU: how calls behave in PyTorch.

torch_native.py runs them, each in its own process.  Each case is a function that returns
what it found.
"""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions


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
    grads = [err(a, b) for a, b in zip(gc, ge, strict=True)]
    return {
        "compile_s": round(time.time() - start, 1),
        "out": err(out, eager),
        "grads": grads,
        "close": max(err(out, eager), *grads) <= 1e-2,
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
    """quantized_linear beside a matmul."""
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
    return found


def case_packed():
    """rope, attention and vlstm of a Packed beside the same calls on contiguous copies; twice."""
    import torch

    import pallas_kernels.torch as pk

    close = lambda a, b: float((a.float() - b.float()).abs().max() / b.float().abs().max())
    positions, found = torch.arange(512, dtype=torch.int32, device="cuda"), {}
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(2, 512, 1024, device="cuda").bfloat16().requires_grad_()
        turned = pk.rope(pk.Packed(x, ((4, 128), (2, 128), (2, 128))), None, positions)
        q, k, v = (y.unflatten(-1, (-1, 128)).contiguous() for y in x.split((512, 256, 256), -1))
        q, k = pk.rope(q, k, positions)
        alone = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
        out, again = pk.attention(turned), pk.attention(turned)
        of_copies = pk.attention(q, k, v)
        (g,), (e,) = (torch.autograd.grad(y.float().square().sum(), [x]) for y in (out, of_copies))
        found[f"draw {seed}"] = {
            "rope": torch.equal(turned.array, alone),
            "attention": torch.equal(out, of_copies),
            "repeatable": torch.equal(out, again),
            "gradient": close(g, e),
        }
    gates = torch.randn(2, 2, 512, 2, device="cuda")
    out = pk.vlstm(pk.Packed(x, ((2, 128), (2, 128), (2, 256))), None, None, gates[0], gates[1] + 3)
    q, k, v = (y.unflatten(-1, (2, -1)).contiguous() for y in x.split((256, 256, 512), -1))
    alone = pk.vlstm(q, k, v, gates[0], gates[1] + 3)
    (g,), (e,) = (torch.autograd.grad(y.float().square().sum(), [x]) for y in (out, alone))
    return found | {"vlstm": close(out, alone), "gradient of vlstm": close(g, e)}


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


def case_probe():
    """Versions, and one kernel compiled and launched."""
    import torch

    import pallas_kernels.torch as pk

    names = "torch", "triton", "transformers", "jax", "jaxlib", "jax-cuda13-plugin"
    found = {x: d.version for x in names for d in distributions(name=x)}
    found |= {"gpu": torch.cuda.get_device_name(), "ptxas": shutil.which("ptxas")}
    x, start = torch.randn(64, 1024, device="cuda").bfloat16(), time.time()
    y = pk.rms_norm(x, torch.ones(1024, device="cuda"))
    torch.cuda.synchronize()
    found["rms_norm_s"] = round(time.time() - start, 2)
    expected = torch.nn.functional.rms_norm(x.float(), (1024,))
    return found | {"rms_norm_error": float((y.float() - expected).abs().max())}
