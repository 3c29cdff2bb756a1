"""The arrays of a case, and their shapes."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.case import A, Case


def array(spec: A, sizes: dict[str, int], seed: int) -> jax.Array:
    """The array that `spec` describes; normal values repeat after a million."""
    shape = tuple(sizes[axis] for axis in spec.axes.split())
    rng = np.random.default_rng(seed)
    kind, _, below = spec.fill.partition(" ")
    if kind == "normal":
        return jnp.asarray(np.resize(rng.standard_normal(2**20).astype(spec.dtype), shape))
    if kind == "arange":
        return jnp.asarray(np.resize(np.arange(shape[-1], dtype=spec.dtype), shape))
    if kind == "documents":
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=spec.dtype) // sizes[below], shape)
    # Zipf's law with exponent 1: the share of id r is about 1 / (r log V), as in real text.
    u = rng.random(shape)
    ids = sizes[below] * u if kind == "uniform" else sizes[below] ** u - 1
    return jnp.asarray(np.clip(ids.astype(spec.dtype), 0, sizes[below] - 1))


def arrays(case: Case, sizes: dict[str, int]) -> list[jax.Array]:
    axes = case.axes(sizes)
    return [array(spec, axes, i) for i, spec in enumerate(case.arrays.values())]


def structs(case: Case, sizes: dict[str, int]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the case's arrays."""
    axes = case.axes(sizes)
    return [
        jax.ShapeDtypeStruct([axes[axis] for axis in spec.axes.split()], spec.dtype)
        for spec in case.arrays.values()
    ]


def floating(case: Case) -> list[str]:
    """The names of the arrays that have a gradient."""
    return [n for n, a in case.arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)]


def writes(case: Case) -> Sequence[str]:
    """The names of the arrays whose gradients the backward pass must write."""
    return floating(case) if case.writes is None else case.writes


def small(case: Case, sizes: dict[str, int]) -> dict[str, int]:
    return sizes | {axis: min(n, sizes[axis]) for axis, n in case.small.items()}


def cotangents(op: Callable, inputs) -> list[jax.Array]:
    """Random arrays like the outputs of `op`."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(op, *inputs))
    sizes = [{str(i): n for i, n in enumerate(y.shape)} for y in leaves]
    specs = [A(" ".join(n), y.dtype.name) for n, y in zip(sizes, leaves, strict=True)]
    return tree.unflatten(map(array, specs, sizes, range(100, 100 + len(leaves))))
