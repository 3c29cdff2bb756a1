"""Times the peers of docs/benchmarks.md and docs/vlstm.md on this GPU in one run with ours.

    python tests/peers.py attention             ours, JAX (cuDNN, XLA), FA3, tokamax, PyTorch
    python tests/peers.py attention 4,2048,32,32,80      one call: rows, tokens, heads, kv heads, D
    python tests/peers.py vlstm                 ours, mlstm_kernels
    python tests/peers.py quantized_linear      ours, gemlite, PyTorch in bfloat16, int8 and fp8
    python tests/peers.py train gpt2_124m 32    PyTorch with torch.compile; then run train.py
    python tests/peers.py train vlstm_124m 32   the same with each of mlstm_kernels' cells, and ours
    python tests/peers.py train llama3_1b 4 --fp8 tensorwise       the same with torchao's float8
    torchrun --nproc-per-node 2 tests/peers.py train llama3_1b 4   the same with FSDP2 on two GPUs

It needs an NVIDIA GPU, and torch, torchao, tokamax, dew-flash-attn-cu13 (FlashAttention-3 for JAX),
mlstm_kernels and gemlite for their rows; a missing peer's row says so.  JAX's calls take turns,
and CUPTI times their kernels, as in pallas_kernels.benchmark.  CUDA events time PyTorch's calls,
including launches and gaps.
"""

import dataclasses
import functools
import gc
import math
import os
import statistics
import time

from scripts import Parser, needs_gpu, needs_packages, run

from pallas_kernels.bench import cases, compiling, operands, timing
from pallas_kernels.bench.report import text

# Of torchrun, which starts a process for each GPU.
RANK, RANKS = (int(os.environ.get(name, n)) for name, n in (("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
CELLS = (("limit", 64), ("xl", 128))  # of mlstm_kernels, with their chunks
OURS = ("pallas_kernels.torch", 0)
EVERY = ("pallas_kernels.torch, every op", 0)
ROWS = (*CELLS, OURS, EVERY)


def events_ms(f) -> float:
    from triton.testing import do_bench

    return float(do_bench(f, warmup=20, rep=100, return_mode="median"))


def kernels_ms(f, calls=10) -> float:
    """GPU time of one call, without launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    f()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            f()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in trace.key_averages()) / calls / 1e3


def show(name: str, **columns: float | str) -> None:
    cells = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in columns.items()]
    print(f"  {name:<28}", "  ".join(cells), flush=True)


def rows(results: dict[str, dict], failed: dict[str, str]) -> None:
    """Prints a row for each peer, or the reason why it has none, such as a missing package."""
    for name, columns in (results | {n: {"failed": why} for n, why in failed.items()}).items():
        show(name, **columns)


def attention(call: str | None = None, full: bool = False, window: int | None = None) -> None:
    """call: B,T,H,K,D of one call, not causal if `full`; None: those of the benchmark."""

    def tokamax(q, k, v, *, causal, implementation):
        import tokamax

        return tokamax.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )

    def fa3(q, k, v, *, causal):
        from dew_flash_attn import flash_mha

        size = (-1, -1) if window is None else (window - 1, 0)
        return flash_mha(q, k, v, is_causal=causal, window_size=size)

    chosen = [c for c in cases.CASES if c.op == "attention" and c.variant in ("", "full")]
    if call is not None:
        sizes = (dict(zip("BTHKD", map(int, call.split(",")), strict=True)),)
        options = {"causal": not full} | ({} if window is None else {"window": window})
        chosen = [cases.attention("full" if full else "", sizes, **options)]
    for case, sizes in ((c, sizes) for c in chosen for sizes in c.sizes):
        print(f"attention {case.variant} {text(sizes)}, ms")
        causal = case.options["causal"]
        inputs = operands.arrays(case, sizes)
        dy = operands.cotangents(compiling.on_xla(case), inputs)
        ops = {"jaxllm": compiling.public(case, implementation="mosaic")}
        ops["JAX cuDNN"] = functools.partial(case.cudnn, **case.options)
        ops["FlashAttention-3"] = functools.partial(fa3, causal=causal)
        for kind in ("mosaic", "triton"):
            ops[f"tokamax {kind}"] = functools.partial(tokamax, causal=causal, implementation=kind)
        if case.xla:
            ops["JAX XLA"] = compiling.on_xla(case)
        compiled = functools.partial(compiling.compile_op, case, inputs=inputs, keep=False)
        programs, failed = timing.attempt(compiled, ops)
        ms, not_timed = timing.time_ops(programs, dy, inputs)
        rows(ms, failed | not_timed)
        timed = functools.partial(torch_attention, sizes=sizes, causal=causal)
        rows(*timing.attempt(timed, {f"PyTorch {kind}": kind for kind in ("CUDNN", "FLASH")}))


def torch_attention(kind: str, sizes: dict[str, int], causal: bool) -> dict[str, float]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b, t, h, k, d = (sizes[axis] for axis in "BTHKD")
    make = lambda heads: torch.randn(
        b, heads, t, d, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    q, key, v, do = make(h), make(k), make(k), torch.randn_like(make(h))
    forward = lambda: torch.nn.functional.scaled_dot_product_attention(
        q, key, v, is_causal=causal, enable_gqa=h != k
    )

    def both():
        forward().backward(do, inputs=[q, key, v])
        q.grad = key.grad = v.grad = None

    with sdpa_kernel(getattr(SDPBackend, f"{kind}_ATTENTION")):
        return {"forward": events_ms(forward), "forward+backward": events_ms(both)}


def vlstm() -> None:
    import jax
    import jax.numpy as jnp

    theirs = []
    for case in (c for c in cases.CASES if c.op == "vlstm" and not c.variant):
        case = dataclasses.replace(case, flops=lambda n: 0.0)  # forward + backward in one program
        for sizes in case.sizes:
            print(f"vlstm {text(sizes)}, ms")
            q, k, v, i, f = operands.arrays(case, sizes)
            inputs = [q, k, v, i - 2, f + 4]  # gates like those at the start of training
            op = compiling.public(case, implementation="mosaic")
            dy = jax.random.normal(jax.random.key(0), v.shape, jnp.bfloat16)
            programs = compiling.compile_op(case, op, inputs, keep=False)
            for name, args in (("forward", inputs), ("forward+backward", (dy, *inputs))):
                kernels = statistics.median(timing.gpu_ms(programs[name], *args))
                clock = timing.wall_ms(programs[name], *args, calls=10)
                show(f"jaxllm {name}", clock=clock, kernels=kernels)
            timed = functools.partial(mlstm, sizes=sizes)
            theirs.append((f"vlstm {text(sizes)}, ms", timed))
    # PyTorch's profiler keeps CUPTI, so JAX's rows come first.
    for title, timed in theirs:
        print(title)
        rows(*timing.attempt(timed, {f"mlstm_kernels {k}_chunk {n}": (k, n) for k, n in CELLS}))


def mlstm(variant: tuple[str, int], sizes: dict[str, int]) -> dict[str, float]:
    import importlib

    import torch

    kind, chunk = variant
    module = importlib.import_module(f"mlstm_kernels.torch.chunkwise.triton_{kind}_chunk")
    op = getattr(module, f"mlstm_chunkwise__{kind}_chunk")
    b, t, h, dqk, dv = (sizes[axis] for axis in "B T NH DQK DV".split())
    make = lambda *last, mean=0.0, dtype=torch.bfloat16: (
        torch.randn(b, h, t, *last, device="cuda", dtype=dtype) + mean
    ).requires_grad_()
    q, k, v, dh = make(dqk), make(dqk), make(dv), make(dv).detach()
    i, f = make(mean=-2.0, dtype=torch.float32), make(mean=4.0, dtype=torch.float32)

    def forward():
        return op(q=q, k=k, v=v, i=i, f=f, return_last_states=False, chunk_size=chunk)

    def both():
        forward().backward(dh, inputs=[q, k, v, i, f])
        for x in (q, k, v, i, f):
            x.grad = None

    with torch.no_grad():
        times = {"forward": events_ms(forward), "kernels": kernels_ms(forward)}
    return times | {"forward+backward": events_ms(both), "kernels of both": kernels_ms(both)}


def quantized_linear() -> None:
    """Weights come from memory: each call has weights of its own, 250 MB of them in all."""
    theirs, seen = [], set()
    for case in (c for c in cases.CASES if c.op == "quantized_linear" and "int" in c.variant[:3]):
        bits, group = (int(word.removeprefix("int")) for word in case.variant.split(" group "))
        for k, n in sorted({(sizes["K"], sizes["N"]) for sizes in case.sizes}):
            several = (bits, group) == (4, 128) and n > k
            for m in (1, 8, 16, 64, 128, 256, 512, 1024) if several else (1, 256):
                title = f"quantized_linear {case.variant} {m} x {k} x {n}, us"
                if title in seen:
                    continue
                seen.add(title)
                print(title)
                timed = functools.partial(packed_linear, case, {"M": m, "K": k, "N": n})
                forms = {"jaxllm": None} | ({"jaxllm XLA": "xla"} if m > 64 else {})
                rows(*timing.attempt(timed, forms))
                timed = functools.partial(gemlite, m=m, k=k, n=n, bits=bits, group=group)
                theirs.append((title, timed, {"gemlite": True, "PyTorch bfloat16": False}))
    for k, n in ((4096, 14336), (14336, 4096)):
        for m in (1024, 4096):
            title = f"x and weight in 8 bits {m} x {k} x {n}, us"
            print(title)
            timed = functools.partial(plain_linear, m=m, k=k, n=n)
            rows(
                *timing.attempt(timed, {f"jaxllm {kind}": kind for kind in ("int", "fp8", "bf16")})
            )
            timed = functools.partial(torch_8_bits, m=m, k=k, n=n)
            kinds = {f"PyTorch {kind}": kind for kind in ("int", "fp8", "bf16")}
            theirs.append((title, timed, kinds))
    for title, timed, kinds in theirs:  # after JAX's, as in `vlstm`
        print(title)
        rows(*timing.attempt(timed, kinds))


def packed_linear(case, sizes: dict[str, int], implementation: str | None) -> dict[str, float]:
    """quantized_linear of packed weights, 250 MB of them in turn."""
    import jax

    x, words, scales = operands.arrays(case, sizes)
    count = math.ceil(250e6 / words.nbytes)
    weights = [(words + i, scales + 0) for i in range(count)]
    op = compiling.public(case, implementation=implementation)
    program = jax.jit(lambda x, weights: [op(x, *some) for some in weights])
    return {"kernels": statistics.median(timing.gpu_ms(program, x, weights)) / count * 1e3}


def plain_linear(kind: str, *, m: int, k: int, n: int) -> dict[str, float | str]:
    """quantized_linear of x in bfloat16 and a plain weight, or the matmul in bfloat16."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import quantize, quantized_linear

    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((m, k), (k, n))))
    x = x.astype(jnp.bfloat16)
    if kind == "bf16":
        return {"kernels": statistics.median(timing.gpu_ms(jnp.matmul, x, w.astype(x.dtype))) * 1e3}
    weight = quantize(w, bits=8, group=None, format=kind).plain()
    program = jax.jit(quantized_linear).lower(x, weight).compile()
    hlo = program.as_text()
    by = "cuBLASLt" if "__cublas$lt" in hlo else "Triton" if "__triton" in hlo else "loops"
    return {"kernels": statistics.median(timing.gpu_ms(program, x, weight)) * 1e3, "by": by}


def torch_8_bits(kind: str, *, m: int, k: int, n: int) -> dict[str, float | str]:
    """PyTorch's matmul of 8 bits alone, and with the rounding of x and the scales (compiled)."""
    import torch

    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    if kind == "bf16":
        return {"kernels": kernels_ms(lambda: x @ w.t()) * 1e3}
    dtype, top = (torch.int8, 127) if kind == "int" else (torch.float8_e4m3fn, 448)

    def by_row(a):
        scales = a.abs().amax(1, keepdim=True).float() / top
        codes = a.float() / scales
        return (codes.round() if kind == "int" else codes).to(dtype), scales

    codes, scales = by_row(w)

    def multiply(x_codes, x_scales):
        if kind == "int":
            return torch._int_mm(x_codes, codes.t())
        return torch._scaled_mm(
            x_codes, codes.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=torch.bfloat16
        )

    @torch.compile
    def layer(x):
        x_codes, x_scales = by_row(x)
        y = multiply(x_codes, x_scales)
        return (y.float() * x_scales * scales.t()).bfloat16() if kind == "int" else y

    given = by_row(x)
    times = {"matmul alone": kernels_ms(lambda: multiply(*given)) * 1e3}
    try:
        return times | {"kernels": kernels_ms(lambda: layer(x)) * 1e3}
    except Exception as e:  # such as a compiler that is missing
        return times | {"kernels": f"{type(e).__name__}: {str(e)[:100]}"}


def gemlite(packed: bool, *, m: int, k: int, n: int, bits: int, group: int) -> dict[str, float]:
    """gemlite's linear layer, or PyTorch's in bfloat16, with 250 MB of weights in turn."""
    import torch

    count = math.ceil(250e6 * 8 / (k * n * (bits if packed else 16)))
    if packed:
        import gemlite
        from gemlite import DType

        def layer():
            made = gemlite.GemLiteLinear(
                bits, group, k, n, input_dtype=DType.BF16, output_dtype=DType.BF16
            )
            words = torch.randint(0, 2**bits, (n, k), device="cuda", dtype=torch.uint8)
            scales = torch.full((n, k // group), 0.01, device="cuda", dtype=torch.bfloat16)
            made.pack(words, scales, 2 ** (bits - 1))
            return made
    else:
        layer = functools.partial(
            torch.nn.Linear, k, n, bias=False, device="cuda", dtype=torch.bfloat16
        )
    layers = [layer() for _ in range(count)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

    def every():
        for one in layers:
            one(x)

    with torch.no_grad():
        return {"kernels": kernels_ms(every) / count * 1e3}


def train(
    cell: tuple[str, int] | None,
    name: str,
    batch: int,
    seq_len: int | None,
    fp8: str | None = None,
    recompute: bool = False,
    device="cuda",
    steps=40,
) -> dict[str, float]:
    """tokens/s of PyTorch a GPU: autocast to bfloat16, fused AdamW, clip 1.0; the median step.

    Each loss is read a step late, as in train.py.

    `cell` is a vLSTM's, one of ROWS.  `fp8` is a recipe of torchao for the linear layers of the
    blocks, such as "tensorwise".  `recompute`: see torch_models.sharded.
    """
    import torch
    from torch_models import mlstm_cell, sharded, torch_model, torch_vlstm

    from jaxllm.config import load

    config = load(name)
    torch.compiler.reset()
    gc.collect()  # the model of the row before
    if device == "cuda":
        torch.cuda.set_device(RANK)
        torch.cuda.reset_peak_memory_stats()
    if cell:
        theirs = mlstm_cell(*cell) if cell in CELLS else None
        model = torch_vlstm(config.model, theirs, every_op=cell == EVERY).to(device)
    else:
        with torch.device(device):
            model = torch_model(config.model)
    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            module_filter_fn=lambda x, name: "blocks" in name and x.out_features % 16 == 0,
            config=Float8LinearConfig.from_recipe_name(fp8),
        )
    if RANKS > 1:
        torch.distributed.init_process_group()
        torch.manual_seed(RANK)
        model = sharded(model, recompute)
    else:
        model = torch.compile(model)
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), o.learning_rate, (o.b1, o.b2), o.eps, o.weight_decay, fused=True
    )
    t = seq_len or config.train.seq_len
    draw = lambda: torch.randint(0, config.model.vocab_size, (batch, t), device=device)
    tokens, labels, times, running = draw(), draw(), [], None
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        (loss if running is None else running).item()  # waits for the device
        running = loss.detach()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[4:])
    result = {"ms": seconds * 1e3, "tokens/s": batch * t / seconds, "first step s": times[0]}
    if device == "cuda":
        result["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def main() -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("attention", "vlstm", "quantized_linear", "train"))
    parser.add_argument("config", nargs="?", help="of train, or B,T,H,K,D of attention")
    parser.add_argument("batch", nargs="?", type=int, default=32, help="for train (default: 32)")
    parser.add_argument("--seq_len", type=int, help="for train (default: the configuration's)")
    parser.add_argument("--full", action="store_true", help="for attention: not causal")
    parser.add_argument("--window", type=int, help="for attention")
    parser.add_argument("--fp8", help="for train: torchao's recipe, tensorwise or rowwise")
    parser.add_argument("--recompute", action="store_true", help="for train with torchrun")
    a = parser.parse_args()
    if a.what == "train":
        if a.config is None:
            parser.error("train needs a configuration, such as gpt2_124m")
        if a.recompute and RANKS == 1:
            parser.error("--recompute needs several GPUs: start this script with torchrun")
        from jaxllm.config import load

        needs_packages("torch", *["torchao"] * bool(a.fp8))
        needs_gpu(RANKS)
        row, cells = " ".join(filter(None, ("PyTorch", a.config, a.fp8))), {}
        if load(a.config).model.type == "vlstm":
            cells = {f"{row} {kind} {chunk or ''}": (kind, chunk) for kind, chunk in ROWS}
        options = {"seq_len": a.seq_len, "fp8": a.fp8, "recompute": a.recompute}
        timed = functools.partial(train, name=a.config, batch=a.batch, **options)
        results = timing.attempt(timed, cells or {row: None})
        if RANK == 0:
            rows(*results)
        return 0
    needs_gpu()
    if a.what == "attention":
        attention(a.config, a.full, a.window)
    else:
        {"vlstm": vlstm, "quantized_linear": quantized_linear}[a.what]()
    return 0


if __name__ == "__main__":
    run(main)
