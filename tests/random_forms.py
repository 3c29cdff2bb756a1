"""A random call as programs: in its own dtypes, on XLA in float64, and the truth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import random_truth
from random_calls import Call

import pallas_kernels
from pallas_kernels import Packed

NO_GRADIENT = ("decode_attention", "vlstm_step", "row_linear")
CONSTANTS = ("row_norm", "weight of quantized_linear", "scale of linear_cross_entropy")


def form_of(call: Call, implementation: str | None, wide: bool = False):
    """The op as a function of the call's arrays, with comparable results."""
    options = dict(call.options)
    if wide and "dtype" in options:
        options["dtype"] = jnp.float64
    op = functools.partial(getattr(pallas_kernels, call.op), implementation=implementation)

    def run(**arrays):
        # Without a default.
        needed = {"encoder": ("wpe",), "rope": ("k",), "vlstm": ("k", "v")}.get(call.op, ())
        given = {k: a for k, a in arrays.items() if a is not None or k in needed}
        y = op(**given, **options)
        if call.op == "vlstm_step" or options.get("return_state"):
            return y[0], random_truth.true_state(y[1])
        y = y.array if isinstance(y, Packed) else y
        return jax.tree.map(lambda x: x.astype(jnp.float32) if "float8" in str(x.dtype) else x, y)

    return _inside(call.inside, run)


def _inside(what: str | None, run):
    """run inside a vmap, a loop or a checkpoint of JAX, with the results of run by itself.

    The loop and the vmap have two members.  In the other one floats are half as large; its results
    are dropped, so that its cotangents are zeros.
    """
    if what is None:
        return run
    if what == "checkpoint":
        return jax.checkpoint(run)

    def both(**arrays):
        leaves, tree = jax.tree.flatten(arrays)
        of_one = lambda *leaves: run(**jax.tree.unflatten(tree, leaves))
        axes = [(0, -1, None)[i % 3] if what == "vmap" else 0 for i in range(len(leaves))]
        two = [
            x if axis is None else jnp.stack([_half(x), x], axis)
            for x, axis in zip(leaves, axes, strict=True)
        ]
        if what == "vmap":
            y = jax.vmap(of_one, in_axes=tuple(axes))(*two)
        else:
            y = jax.lax.map(lambda leaves: of_one(*leaves), tuple(two))
        return jax.tree.map(lambda y: y[1], y)

    return both


def _half(x):
    return x / 2 if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1 else x


def truth_of(call: Call):
    def run(**arrays):
        given = {k: a for k, a in arrays.items() if a is not None}
        if call.op == "vlstm_step":
            given["state"] = random_truth.true_state(given["state"])
        return getattr(random_truth, call.op)(**given, **call.options)

    return run


class Arguments:
    """A call's arrays as a flat list, and which of them are floats, and have gradients."""

    def __init__(self, call: Call):
        self.call, arrays = call, call.make()
        paths, self.tree = jax.tree_util.tree_flatten_with_path(arrays)
        self.leaves = [np.asarray(leaf) for _, leaf in paths]
        self.names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
        floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in self.leaves]
        self.floats = [i for i, is_float in enumerate(floats) if is_float]
        constant = lambda name: name in CONSTANTS or f"{name} of {call.op}" in CONSTANTS
        self.differentiable = [
            i for i in self.floats
            if call.op not in NO_GRADIENT and not constant(paths[i][0][0].key)
        ]  # fmt: skip
        self.finite = all(np.isfinite(self.leaves[i].astype(np.float64)).all() for i in self.floats)

    def with_gradients(self, f):
        """run(leaves, cotangents) -> (results, {name: gradient})."""

        def run(leaves, cotangents):
            def of(d):
                full = list(leaves)
                for i, a in zip(self.differentiable, d, strict=True):
                    full[i] = a
                return f(**jax.tree.unflatten(self.tree, full))

            if not self.differentiable:
                return of([]), {}
            y, pull = jax.vjp(of, [leaves[i] for i in self.differentiable])
            names = [f"d{self.names[i]}" for i in self.differentiable]
            return y, dict(zip(names, pull(cotangents)[0], strict=True))

        return run

    def cotangents(self, f):
        """A random cotangent for each result of f."""
        with jax.enable_x64(self.call.x64):
            shapes = jax.eval_shape(lambda x: f(**jax.tree.unflatten(self.tree, x)), self.leaves)
        rng = np.random.default_rng((*self.call.seed, 1))
        return jax.tree.map(lambda o: rng.standard_normal(o.shape).astype(o.dtype), shapes)


def wide(x):
    return np.asarray(x).astype(np.float64)


def true_program(call: Call, given: Arguments):
    """The truth of the floating arguments and the cotangents, for float64."""
    f = given.with_gradients(truth_of(call))

    def run(floats, cotangents):
        leaves = list(given.leaves)  # integers stay NumPy arrays
        for i, a in zip(given.floats, floats, strict=True):
            leaves[i] = a
        return f(leaves, cotangents)

    return jax.jit(run)


def truths(call: Call, given: Arguments, cotangents, spacings):
    """The truth, and for each of these relative spacings the errors of arguments so rounded."""
    floats = [wide(given.leaves[i]) for i in given.floats]
    rng = np.random.default_rng((*call.seed, 2))
    rounded = lambda eps: lambda x: x * (1 + eps * rng.uniform(-0.5, 0.5, x.shape))
    with jax.enable_x64(True), on_cpu(), np.errstate(all="ignore"):
        program = true_program(call, given)
        arguments = floats, jax.tree.map(wide, cotangents)
        truth = leaves_of(program(*arguments))
        errors = {eps: [np.zeros(t.shape) for t in truth] for eps in spacings}
        for eps in [*spacings] * 2:
            other = leaves_of(program(*jax.tree.map(rounded(eps), arguments)))
            errors[eps] = [
                np.maximum(e, np.abs(o - t))
                for e, o, t in zip(errors[eps], other, truth, strict=True)
            ]
    return truth, errors


def on_cpu():
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def leaves_of(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(jax.block_until_ready(tree))]


def in_float64(call: Call, given: Arguments, cotangents):
    """The XLA form with floats of float64, None if it rounds to 8 bits all the same."""
    if random_truth.is_rounded(call.make()):
        return None
    leaves = [wide(a) if i in given.floats else a for i, a in enumerate(given.leaves)]
    with jax.enable_x64(True), on_cpu():
        f = given.with_gradients(form_of(call, "xla", wide=True))
        return leaves_of(jax.jit(f)(leaves, jax.tree.map(wide, cotangents)))
