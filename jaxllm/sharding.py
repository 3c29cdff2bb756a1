"""The device mesh, and the wrapper that runs a kernel on it.

The mesh has three axes: `data` (replicas of the model, which divide the batch), `fsdp` (devices
that divide the batch and shard the parameters) and `tensor` (devices that divide heads and widths).
Parameters carry their axes as metadata (`axes=("fsdp", "tensor")`); JAX's own sharding moves the
data.

Kernels cannot be partitioned by XLA: plain jit would gather a sharded input and run the whole
kernel on every device, without an error.  `per_device` therefore wraps ops in `jax.shard_map`.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import MeshConfig, ModelConfig, TrainConfig
from jaxllm.errors import InputError

P = PartitionSpec
BATCH = ("data", "fsdp")  # the axes that divide the batch


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh (data, fsdp, tensor) over all devices; raises InputError if its size differs."""
    devices = jax.devices() if devices is None else devices
    mesh = abstract_mesh(config, len(devices))
    return Mesh(
        np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types
    )


def abstract_mesh(config: MeshConfig, count: int) -> AbstractMesh:
    """The mesh of `make_mesh` over `count` devices that this machine need not have."""
    inner = config.fsdp * config.tensor
    data = count // inner if config.data == -1 else config.data
    if data * inner != count or data == 0:
        raise InputError(
            f"mesh data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not equal"
            f" {count} devices; set mesh.data=-1 and the other axes to divisors of {count}"
        )
    shape = (data, config.fsdp, config.tensor)
    return AbstractMesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def check_model(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises InputError if the tensor axis does not divide the heads."""
    tensor = mesh.shape["tensor"]
    heads = getattr(model, "n_kv_heads", model.n_heads)
    name = "n_kv_heads" if hasattr(model, "n_kv_heads") else "n_heads"
    if heads % tensor:
        raise InputError(
            f"mesh.tensor={tensor} does not divide model.{name}={heads}; set mesh.tensor to a"
            f" divisor of {heads} and use mesh.fsdp for the other devices"
        )


def check_batch(train: TrainConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises InputError unless the batch divides evenly over devices and accumulation."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if train.batch_size % (parts * train.grad_accum):
        raise InputError(
            f"train.batch_size={train.batch_size} is not a multiple of {parts} devices"
            f" (mesh.data x mesh.fsdp) x train.grad_accum={train.grad_accum}"
        )


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """(i, n): this process's devices hold the i-th of n equal parts of the batch's rows.

    Several processes hold the same part if the tensor axis spans them.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    mine = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    (held,) = np.nonzero(np.reshape(mine, (parts, -1)).any(1))
    if held[0] % len(held) or parts % len(held):
        raise InputError(
            f"mesh.tensor={mesh.shape['tensor']} does not fit the {sum(mine)} devices of a process;"
            " set it to a divisor or a multiple of them"
        )
    return int(held[0]) // len(held), parts // len(held)


def one_device() -> bool:
    """Whether `jax.set_mesh` has set no mesh, or a mesh of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def per_device(op: Callable, in_specs, out_specs) -> Callable:
    """Wraps `op` to run on each device's shard under the mesh of `jax.set_mesh`.

    Returns `op` itself on one device.  Gradients of replicated inputs (P()) are summed over the
    mesh.
    """
    if one_device():
        return op
    mesh = jax.sharding.get_abstract_mesh()
    # check_vma=False: the backward passes of the kernels carry no types of varying axes.
    return jax.shard_map(op, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(x: jax.Array, *axes) -> jax.Array:
    """Constrains the sharding of an activation; does nothing on one device."""
    if one_device():
        return x
    return jax.lax.with_sharding_constraint(x, P(*axes))


@partial(jax.jit, static_argnames=("shape", "axes"))
def normal(key: jax.Array, shape: tuple[int, ...], std: float, axes: tuple) -> jax.Array:
    """Draws an fp32 weight from N(0, std^2) on the devices that hold it.

    It is a separate program, compiled once per shape: XLA would fuse all draws of the same shape in
    one program, and take minutes to compile that kernel.
    """
    return constrain(std * jax.random.normal(key, shape), *axes)


def spec_of(variable: nnx.Variable) -> PartitionSpec:
    """The PartitionSpec of a parameter's `axes`; without axes it is replicated."""
    return P(*(variable.get_metadata().get("axes") or ()))


def shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """The NamedShardings of a state of parameters, in the same structure."""
    return jax.tree.map(
        lambda v: v.replace(NamedSharding(mesh, spec_of(v))),
        state,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )


def split_over_data(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Splits each device's part among the replicas too, along the first axis that they divide.

    Returns `sharding` if there is no such axis or only one replica.
    """
    replicas = sharding.mesh.shape["data"]
    if replicas == 1:
        return sharding
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    for i, size in enumerate(sharding.shard_shape(shape)):
        if size % replicas == 0:
            others = spec[i] or ()
            spec[i] = (*((others,) if isinstance(others, str) else others), "data")
            return NamedSharding(sharding.mesh, P(*spec))
    return sharding
