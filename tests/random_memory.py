"""Runs a random call twice; on a GPU over memory full of NaN, then of 1e30."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from kernel_checks import ON_GPU, kernels_run_here
from random_calls import Call
from random_forms import Arguments, form_of, leaves_of


def fill_memory(value: int) -> None:
    """Fills free memory of the GPU with this 32-bit pattern, in blocks of many sizes."""
    sizes = [1 << 28, *(1 << bits for bits in range(26, 7, -1) for _ in range(6))]
    kept = [jnp.full(size // 4, value, jnp.uint32) for size in sizes]
    jax.block_until_ready(kept)


# With an allocation for each array, as under compute-sanitizer, nothing would stay poisoned.
POISONED = ON_GPU and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "platform"
POISONS = (0xFFFFFFFF, 0x7149F2CA)  # NaN in all formats; 1e30, in halves 1e30 and -8e30 (bfloat16)


@contextlib.contextmanager
def settings_of(call: Call) -> Iterator[None]:
    """JAX's and our settings, as the call was drawn."""
    with contextlib.ExitStack() as settings:
        settings.enter_context(jax.enable_x64(call.x64))
        if call.strict:
            settings.enter_context(jax.numpy_dtype_promotion("strict"))
            settings.enter_context(jax.numpy_rank_promotion("raise"))
        if call.general:
            settings.enter_context(mock.patch.dict(os.environ, JAXLLM_KERNELS="general"))
        yield


def results(call: Call, implementation, given: Arguments, cotangents, poison: bool):
    """The leaves of two runs of one program."""
    f = given.with_gradients(form_of(call, implementation))
    runs = []
    with settings_of(call):
        program = jax.jit(f).lower(given.leaves, cotangents).compile()
        for value in POISONS:
            if poison:
                fill_memory(value)
            arguments = jax.device_put((given.leaves, cotangents))
            runs.append(leaves_of(program(*arguments)))
            del arguments
    return runs


def actual(call: Call, given: Arguments, cotangents) -> tuple[str, Any]:
    """(form, runs) of the call; under "mosaic" what the kernel refuses runs by default."""
    if call.implementation == "mosaic":
        with contextlib.suppress(NotImplementedError):
            with kernels_run_here():
                return "mosaic", results(call, "mosaic", given, cotangents, POISONED)
    return "default", results(call, None, given, cotangents, POISONED)
