"""pallas_kernels.torch without a GPU: programs with interpreted kernels against JAX, fakes, errors."""

import kernel_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

torch = pytest.importorskip("torch")
import pallas_kernels as jk  # noqa: E402
import pallas_kernels.torch as pk  # noqa: E402
from pallas_kernels.torch import ops, program, run  # noqa: E402

B, F, I = "bfloat16", "float32", "int32"
CASES = {
    "attention": ([((1, 128, 2, 64), B)] * 3, {}),
    "rms_norm": ([((2, 65, 256), B), ((256,), F)], {}),
    "rms_norm+": ([((2, 65, 256), B), ((256,), F), ("residual", (2, 65, 256), B)], {}),
    "layer_norm": ([((2, 65, 256), B), ((256,), F), ((256,), F)], {}),
    "rope": ([((1, 64, 2, 64), B), ((1, 64, 1, 64), B), ((64,), I, 64)], {}),
    "swiglu": ([((64, 128), B)] * 2, {}),
    "mlp": ([((64, 64), B), ((64, 128), B), ((128, 64), B), ("gate", (64, 128), B)], {}),
    "mlp+": ([((64, 64), B), ((64, 128), B), ((128, 64), B), ("bias", (128,), B)], {}),
    "encoder": ([((2, 16), I, 50), ((50, 128), F), ((16, 128), F)], {}),
    "cross_entropy": ([((16, 512), B), ((16,), I, 512)], {}),
    "linear_cross_entropy": ([((2, 16, 64), B), ((512, 64), B), ((2, 16), I, 512)], {}),
    "vlstm": ([((1, 128, 2, 64), B)] * 2 + [((1, 128, 2, 64), B)] + [((1, 128, 2), F)] * 2, {}),
}  # fmt: skip


def arrays_of(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    made, names = [], []
    for spec in CASES[name][0]:
        key, spec = (spec[0], spec[1:]) if isinstance(spec[0], str) else (None, spec)
        x = (
            rng.integers(0, spec[2], spec[0], dtype=np.int32)
            if spec[1] == I
            else rng.standard_normal(spec[0]).astype(np.float32)
        )
        made.append(jnp.asarray(x).astype(spec[1]))
        names.append(key)
    return made, names


def to_torch(x):
    x = np.asarray(x)
    kind = getattr(torch, x.dtype.name)
    return torch.from_numpy(np.array(x.astype(np.float32) if kind == torch.bfloat16 else x)).to(
        kind
    )


def to_jax(x):
    name = str(x.dtype).removeprefix("torch.")
    return jnp.asarray((x.float() if name == B else x).detach().numpy()).astype(name)


def interpreted(step):
    """The kernel of a step, interpreted by JAX."""
    gpu = plgpu.InterpretGPUParams(detect_races=True)
    call = program.call_of(step.params, interpret=gpu)

    def go(*tensors):
        with kernel_checks.kernels_run_here():
            return [to_torch(x) for x in jax.jit(call)(*map(to_jax, tensors))]

    return go


@pytest.fixture
def interprets(monkeypatch):
    """CPU tensors are allowed, and kernels interpreted."""

    def runner(key, signature):
        spec = ops._specs[key]
        if spec.mode != "backward":
            return run.Runner(ops.entry(key, signature).program, interpreted)
        of = ops._key(spec._replace(mode="forward", signature=()))
        return run.Runner(ops.entry(of, spec.signature).backward, interpreted)

    monkeypatch.setattr(ops, "_check", lambda key, arrays: None)
    monkeypatch.setattr(ops, "_runner", runner)
    monkeypatch.setattr(ops, "_runners", {})


@pytest.mark.parametrize("name", CASES)
def test_equals_jax(name, interprets):
    arrays, names = arrays_of(name)
    op = name.rstrip("+")
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def split(values):
        args = [x for x, n in zip(values, names, strict=True) if n is None]
        return args, {n: x for x, n in zip(values, names, strict=True) if n}

    def plain(*chosen):
        full = list(arrays)
        for i, x in zip(floats, chosen, strict=True):
            full[i] = x
        args, named = split(full)
        return jax.tree.leaves(getattr(jk, op)(*args, **named, implementation="mosaic"))

    with kernel_checks.kernels_run_here():
        out, vjp = jax.vjp(plain, *(arrays[i] for i in floats))
        cts = [jnp.asarray(np.random.default_rng(i).standard_normal(o.shape)).astype(o.dtype)
               for i, o in enumerate(out)]  # fmt: skip
        expected = [*out, *vjp(cts)]
    tensors = [to_torch(x).requires_grad_(i in floats) for i, x in enumerate(arrays)]
    args, named = split(tensors)
    result = getattr(pk, op)(*args, **named)
    result = [result] if isinstance(result, torch.Tensor) else list(result)
    grads = torch.autograd.grad(result, [tensors[i] for i in floats], list(map(to_torch, cts)))
    for i, (a, e) in enumerate(zip([*result, *grads], expected, strict=True)):
        a, e = np.asarray(to_jax(a), np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, i
        scale = np.abs(e).max()
        assert np.abs(a - e).max() <= 1e-2 * scale, (i, np.abs(a - e).max(), scale)
