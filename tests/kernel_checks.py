"""Checks a kernel against float64, relative to its jnp reference in the same dtype.

On a CPU the kernel is interpreted with race detection, and in the first case of each test also
lowered for CUDA, which takes longer than all the rest.  On a GPU it runs natively, twice, and both
results must be equal bit for bit.  The traced program must contain the kernels' names.

The error of the kernel may be at most `RATIO` times the error of the reference, in the maximum and
in the root mean square, for the outputs and for every gradient.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

ON_GPU = jax.default_backend() == "gpu"
# Public names of pallas_kernels that are not ops, or have no kernel of their own.
NO_KERNEL = {"Packed", "RopeScaling", "QuantizedWeight", "quantize"}
ON_XLA = {"vlstm_step"}  # ops without a kernel
RATIO = 2.0
LOWERS = True  # tests/conftest.py: whether this is the first case of its test
FLOOR = 2 * np.finfo(np.float32).eps  # two float32 roundings, relative to the largest true value


# Copies take turns in so many places of the clocks.  With JAX's 5 a wait for a copy soon counts as
# one for an older copy, too, whose buffer may then be overwritten too early.
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=1000)


@contextlib.contextmanager
def kernels_run_here():
    """Interprets Mosaic kernels with race detection on a CPU; on a GPU they run natively."""
    if ON_GPU:
        yield
        return
    import interpreter_extension
    import numpy_jaxpr
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    interpreter_extension.install()
    # JAX chooses the interpreter while tracing, so nothing traced outside may be reused inside.
    jax.clear_caches()
    try:
        with plgpu.force_gpu_interpret_mode(INTERPRETER):
            yield
        races = interpreter.get_races()  # 0.12 raises at once; 0.11.2 only sets this flag
        assert races is None or not races.races_found, "the kernel has a race"
    finally:
        interpreter.reset_gpu_interpret_mode_state()
        numpy_jaxpr.clear()
        jax.clear_caches()


def check_op(op, reference, *arrays, kernels, differentiable=None, seed=0, ratio=RATIO, **options):
    """Asserts that op(*arrays, implementation="mosaic", **options) is right, forward and backward.

    reference: the jnp form, with the same arrays and options.
    kernels: names of all kernels that forward and backward must contain.
    differentiable: positions of the arrays that get gradients (default: all floating arrays).
    The outputs may be any pytree; each gets a random cotangent of its own dtype.
    """
    if differentiable is None:
        differentiable = [
            i
            for i, a in enumerate(arrays)
            if a is not None and jnp.issubdtype(a.dtype, jnp.floating)
        ]
    outputs = jax.eval_shape(lambda *a: reference(*a, **options), *arrays)
    rng = np.random.default_rng((seed, 1))  # differs from the generator of `normal`
    cotangents = jax.tree.map(
        lambda o: jnp.asarray(rng.standard_normal(o.shape), dtype=o.dtype), outputs
    )

    def with_gradients(f):
        def run(arrays, cotangents):
            def of(*d):
                full = list(arrays)
                for i, a in zip(differentiable, d, strict=True):
                    full[i] = a
                return f(*full, **options)

            y, pull = jax.vjp(of, *(arrays[i] for i in differentiable))
            return y, pull(cotangents)

        return run

    kernel = with_gradients(lambda *a, **o: op(*a, implementation="mosaic", **o))
    if LOWERS or ON_GPU:
        assert_lowers(kernel, (arrays, cotangents), kernels)
    with jax.enable_x64(True):
        wide = jax.tree.map(_widen, (arrays, cotangents))
        truth = jax.tree.map(np.asarray, jax.jit(with_gradients(reference))(*wide))
    expected = jax.jit(with_gradients(reference))(arrays, cotangents)
    with kernels_run_here():
        traced = jax.jit(kernel).trace(arrays, cotangents)
        _assert_names("traced", str(traced.jaxpr), kernels)
        actual = jax.block_until_ready(traced.lower().compile()(arrays, cotangents))
        if ON_GPU:
            again = jax.jit(kernel)(arrays, cotangents)
            for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(again), strict=True):
                assert bool((a == b).all()), "two runs of the kernel differ"
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(actual)]
    for path, a, e, t in zip(
        paths, *(jax.tree.leaves(x) for x in (actual, expected, truth)), strict=True
    ):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), path
        assert_error_ratio(a, e, t, path, ratio)


def assert_error_ratio(actual, expected, truth, what="", ratio=RATIO):
    """Asserts that the error of `actual` is at most `ratio` x that of `expected`, max and RMS."""
    actual, expected, truth = (np.asarray(x).astype(np.float64) for x in (actual, expected, truth))
    assert np.isfinite(actual).all(), f"{what}: the kernel's result is not finite"
    floor = FLOOR * max(np.abs(truth).max(initial=0), np.finfo(np.float32).tiny)
    for name, norm in (("max", lambda d: np.abs(d).max(initial=0)), ("rms", _rms)):
        mine, theirs = norm(actual - truth), norm(expected - truth)
        assert mine <= ratio * theirs + floor, (
            f"{what}: {name} error {mine:.3e} is {mine / max(theirs, 1e-300):.3g} x the reference's"
            f" {theirs:.3e} (largest value {np.abs(truth).max():.3e})"
        )


def assert_lowers(f, args, kernels):
    """Asserts that `jit(f)(*args)` lowers for CUDA without a GPU and has every named kernel."""
    traced = jax.jit(f).trace(*args)
    _assert_names("traced", str(traced.jaxpr), kernels)
    if LOWERS or ON_GPU:
        _assert_names("lowered", traced.lower(lowering_platforms=("cuda",)).as_text(), kernels)


def _assert_names(program, text, kernels):
    missing = set(kernels) - names_in(text)
    assert not missing, f"the {program} program lacks the kernels {missing}"


def names_in(text):
    """Whole names in a lowered program: `add_rms_norm_forward` is not `rms_norm_forward`.

    The text contains Mosaic's modules as bytes, where a name is enclosed in zeros, written \\00.
    """
    return set(re.findall(r"\w+", re.sub(r"\\[0-9A-Fa-f]{2}", " ", text)))


def normal(seed, shape, dtype=jnp.float32, scale=1.0, offset=0.0):
    """Normal data of any dtype, the same for the same seed."""
    x = np.random.default_rng(seed).standard_normal(shape) * scale + offset
    return jnp.asarray(x, dtype=dtype)


def _widen(x):
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _rms(d):
    return np.sqrt(np.mean(d * d)) if d.size else 0.0
