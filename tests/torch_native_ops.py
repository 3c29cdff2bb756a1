"""Checks of pallas_kernels.torch on a GPU: every op's bits beside JAX's, its error, its operators.

torch_native.py runs them, each in its own process.
"""
# ruff: noqa: B023  (functions are called in the round of the loop that makes them)

import json
import os
import time
import traceback
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
        return found | {"jax": False}  # no result
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
    saved = [[*arrays, *full][i] for i in made.entry.saved]
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
