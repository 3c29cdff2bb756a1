"""The mesh of devices, and the one way in which layers run a kernel on it.

Three axes: `data` (copies of the model that share the batch), `fsdp` (devices that share the batch
and split the parameters), `tensor` (devices that split heads and widths).  Parameters carry their
axes as metadata (`axes=("fsdp", "tensor")`); JAX's own sharding moves everything.

Kernels do not partition themselves: under plain jit a sharded input would be gathered and the
kernel run in full on every device, without an error.  `per_device` wraps an op in `jax.shard_map`.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import MeshConfig, ModelConfig, TrainConfig
from jaxllm.errors import InputError

P = PartitionSpec
BATCH = ("data", "fsdp")  # the axes that divide the batch


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """Mesh (data, fsdp, tensor) over all devices; raises InputError if they do not divide so."""
    devices = jax.devices() if devices is None else devices
    inner = config.fsdp * config.tensor
    data = len(devices) // inner if config.data == -1 else config.data
    if data * inner != len(devices) or data == 0:
        raise InputError(
            f"mesh data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not make"
            f" {len(devices)} devices; set mesh.data=-1 and divisors of {len(devices)}"
        )
    shape = (data, config.fsdp, config.tensor)
    return Mesh(
        np.array(devices).reshape(shape),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
    )


def check_model(model: ModelConfig, mesh: Mesh) -> None:
    """Raises InputError where the tensor axis cannot split the heads."""
    tensor = mesh.shape["tensor"]
    heads = getattr(model, "n_kv_heads", model.n_heads)
    name = "n_kv_heads" if hasattr(model, "n_kv_heads") else "n_heads"
    if heads % tensor:
        raise InputError(
            f"mesh.tensor={tensor} does not divide model.{name}={heads}; set mesh.tensor to a"
            f" divisor of {heads} and use mesh.fsdp for the other devices"
        )


def check_batch(train: TrainConfig, mesh: Mesh) -> None:
    """Raises InputError where the batch does not divide over devices and accumulation."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if train.batch_size % (parts * train.grad_accum):
        raise InputError(
            f"train.batch_size={train.batch_size} is not a multiple of {parts} devices"
            f" (mesh.data x mesh.fsdp) x train.grad_accum={train.grad_accum}"
        )


def one_device() -> bool:
    """Whether the mesh set by `jax.set_mesh` is of one device, or there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def per_device(op: Callable, in_specs, out_specs) -> Callable:
    """`op` on each device's own part under the mesh set by `jax.set_mesh`; `op` itself without one.

    Gradients of inputs that a device holds whole (P()) are summed over the mesh.
    """
    if one_device():
        return op
    mesh = jax.sharding.get_abstract_mesh()
    # check_vma=False: the backward passes of the kernels carry no types of varying axes.
    return jax.shard_map(op, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(x: jax.Array, *axes) -> jax.Array:
    """Says how an activation lies on the mesh; nothing without one."""
    if one_device():
        return x
    return jax.lax.with_sharding_constraint(x, P(*axes))


@partial(jax.jit, static_argnames=("shape", "axes"))
def normal(key: jax.Array, shape: tuple[int, ...], std: float, axes: tuple) -> jax.Array:
    """An fp32 weight drawn from N(0, std^2), made on the devices where it stays.

    A program of its own, compiled once for each shape: XLA fuses all draws of one program that
    have the same shape, and then takes minutes over the one kernel.
    """
    return constrain(std * jax.random.normal(key, shape), *axes)


def spec_of(variable: nnx.Variable) -> PartitionSpec:
    """The `axes` that a parameter was made with (none: whole on every device)."""
    return P(*(variable.get_metadata().get("axes") or ()))


def shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """NamedShardings in the structure of a state of parameters."""
    return jax.tree.map(
        lambda v: v.replace(NamedSharding(mesh, spec_of(v))),
        state,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )
