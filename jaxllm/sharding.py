"""The device mesh, and the wrapper that runs a kernel on it.

The mesh has four axes: `data` (replicas of the model, which divide the batch), `fsdp` (devices
that divide the batch and shard the parameters), `context` (devices that divide each sequence and
shard the parameters) and `tensor` (devices that divide heads and widths).  Parameters carry their
axes as metadata (`axes=("fsdp", "tensor")`); JAX's own sharding moves the data.

Device i of N on the context axis has the i-th part of every sequence.  Attention and the vLSTM need
whole sequences, but only one head at a time: `split_heads` before them and `split_sequence` after
them switch between both (Jacobs et al. 2023, "DeepSpeed Ulysses"; alternatives: several-gpus.md).

Kernels cannot be partitioned by XLA: plain jit would gather a sharded input and run the whole
kernel on every device, without an error.  `per_device` therefore wraps ops in `jax.shard_map`.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import jax
import numpy as np
from flax import nnx
from jax.dtypes import float0
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import Config, MeshConfig
from jaxllm.config.model import divides
from jaxllm.errors import InputError
from pallas_kernels.options import with_gradient

P = PartitionSpec
AXES = ("data", "fsdp", "context", "tensor")
BATCH = ("data", "fsdp")  # the axes that divide the batch
PARTS = (*BATCH, "context")  # the axes that divide the tokens
SHARDS = ("fsdp", "context")  # the axes that shard a parameter where its metadata says "fsdp"


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh of the configured axes over all devices; raises InputError if its size differs."""
    devices = jax.devices() if devices is None else devices
    mesh = abstract_mesh(config, len(devices))
    return Mesh(np.reshape(devices, mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def abstract_mesh(config: MeshConfig, count: int) -> AbstractMesh:
    """The mesh of `make_mesh` over `count` devices that this machine need not have."""
    inner = config.fsdp * config.context * config.tensor
    data = count // inner if config.data == -1 else config.data
    if data * inner != count or data == 0:
        need = max(config.data, 1) * inner
        elsewhere = f"; --dry_run {need}xH100 predicts it for {need} GPUs" * (need > count)
        raise InputError(
            f"mesh data={config.data} x fsdp={config.fsdp} x context={config.context} x"
            f" tensor={config.tensor} is not {count}, the number of devices; set mesh.data=-1 and"
            f" the product of the other axes to a divisor of {count}{elsewhere}"
        )
    shape = (data, config.fsdp, config.context, config.tensor)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * 4)


def whole_sequences(mesh: Mesh) -> Mesh:
    """The mesh whose context devices divide the batch as fsdp devices do, for generation.

    Parameters stay on the same devices.
    """
    data, fsdp, context, tensor = mesh.devices.shape
    devices = mesh.devices.reshape(data, fsdp * context, 1, tensor)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def check(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises InputError unless the axes divide heads, widths, batch and sequence."""
    model, train = config.model, config.train
    heads = "n_kv_heads" if hasattr(model, "n_kv_heads") else "n_heads"
    head = getattr(model, "d_head", None) or model.d_model // model.n_heads
    for axes, name, width in (
        (("tensor", "context"), heads, getattr(model, heads)),
        (SHARDS, "d_model", model.d_model),
        (("tensor", *SHARDS), "n_heads x d_head", model.n_heads * head),
        (("tensor", *SHARDS), "d_ff", model.ff_width),
        (("tensor",), "vocab_size, padded to a multiple of 128,", model.padded_vocab_size),
    ):
        used = {axis: mesh.shape[axis] for axis in axes if mesh.shape[axis] > 1}
        if width % prod(used.values()):
            product = " x ".join(f"mesh.{axis}={size}" for axis, size in used.items())
            other = "data" if "fsdp" in used else "fsdp"
            raise InputError(
                f"{product} does not divide model.{name}={width}; lower it to a divisor and use"
                f" mesh.{other} for the other devices"
            )
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if train.batch_size % (parts * train.grad_accum):
        raise InputError(
            f"train.batch_size={train.batch_size} is not a multiple of {parts} devices"
            f" (mesh.data x mesh.fsdp) x train.grad_accum={train.grad_accum}"
        )
    if train.seq_len % mesh.shape["context"]:
        raise InputError(
            f"train.seq_len={train.seq_len} is not a multiple of"
            f" mesh.context={mesh.shape['context']}; round it up or down to one"
        )


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """(i, n): this process's devices hold the i-th of n equal parts of the batch's rows.

    Several processes hold the same part if the context and tensor axes span them.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    mine = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    (held,) = np.nonzero(np.reshape(mine, (parts, -1)).any(1))
    if held[0] % len(held) or parts % len(held):
        raise InputError(
            f"mesh.context={mesh.shape['context']} x mesh.tensor={mesh.shape['tensor']} does not"
            f" fit the {sum(mine)} devices of a process; set it to a divisor or a multiple of them"
        )
    return int(held[0]) // len(held), parts // len(held)


def one_device() -> bool:
    """Whether the layers see one device, as in the caller's own `shard_map` of whole models."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size < 2 or (mesh.are_all_axes_manual and axis_size(*AXES[1:]) == 1):
        return True
    if mesh.axis_names != AXES or {AxisType.Auto} != {*mesh.axis_types}:
        kinds = ", ".join({kind.name: None for kind in mesh.axis_types})
        raise ValueError(
            f"the mesh has the axes {', '.join(mesh.axis_names)} ({kinds}), and the layers need"
            f" {', '.join(AXES)} (Auto): make it with jaxllm.sharding.make_mesh"
        )
    return False


def per_device(op: Callable, in_specs, out_specs) -> Callable:
    """Wraps `op` to run on each device's shard under the mesh of `jax.set_mesh`.

    Returns `op` itself on one device.  Gradients of replicated inputs (P()) are summed over the
    mesh, but not over the tensor axis if no spec names it: all its devices have the same gradient.
    """
    if one_device():
        return op
    mesh = jax.sharding.get_abstract_mesh()
    # check_vma=False: the backward passes of the kernels carry no types of varying axes.
    wrap = partial(jax.shard_map, mesh=mesh, check_vma=False)
    wrapped = wrap(op, in_specs=in_specs, out_specs=out_specs)
    if mesh.shape["tensor"] > 1 and "tensor" not in _axes((in_specs, out_specs)):
        wrapped = _alike_on_tensor(op, wrap, in_specs, out_specs)

    def run(*inputs):
        jax.tree.map(_check_divided, in_specs, inputs)
        return wrapped(*inputs)

    return run


def _check_divided(spec: PartitionSpec, arrays) -> None:
    """Raises ValueError unless the mesh divides the arrays; shard_map's error has many lines."""
    for shape in map(np.shape, jax.tree.leaves(arrays)):
        for i, (size, axes) in enumerate(zip(shape, spec, strict=False)):
            axes = jax.tree.leaves(axes)
            divides(axis_size(*axes), size, " x ".join(axes), f"shape {shape} on a mesh: axis {i}")


def _alike_on_tensor(op: Callable, wrap: Callable, in_specs: tuple, out_specs) -> Callable:
    """The wrapped `op`, whose backward pass moves nothing over the tensor axis.

    shard_map's backward pass would divide the incoming gradient by the size of the axis, then sum
    the equal results of its devices.  The axes that divide the tokens must divide every output.
    """
    each = P(jax.sharding.get_abstract_mesh().axis_names)  # arrays local to a device

    @jax.custom_vjp
    def wrapped(*inputs):
        return wrap(op, in_specs=in_specs, out_specs=out_specs)(*inputs)

    def forward(*inputs):
        def run(*inputs):
            outputs, pull_back = jax.vjp(op, *inputs)
            return outputs, jax.tree.map(lambda saved: saved[None], pull_back)

        return wrap(run, in_specs=in_specs, out_specs=(out_specs, each))(*inputs)

    def backward(pull_back, gradients):
        def run(pull_back, gradients):
            pull_back = jax.tree.map(lambda saved: saved[0], pull_back)
            return tuple(map(total, in_specs, pull_back(gradients)))

        return wrap(run, in_specs=(each, out_specs), out_specs=in_specs)(pull_back, gradients)

    def total(spec, gradient):  # of an array, or of several in a packed weight
        axes = [axis for axis in PARTS if axis not in _axes(spec)]
        each = lambda g: None if g.dtype == float0 else jax.lax.psum(g, axes)
        return jax.tree.map(each, gradient)

    wrapped.defvjp(forward, backward)
    return wrapped


def _axes(specs) -> set:
    """The mesh axes that PartitionSpecs name."""
    return {axis for spec in jax.tree.leaves(specs) for axis in jax.tree.leaves(tuple(spec))}


def axis_size(*axes: str) -> int:
    """Number of devices along these axes of the mesh of `make_mesh`; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return prod(mesh.shape[axis] for axis in axes) if mesh.axis_names == AXES else 1


def split_heads(x: jax.Array) -> jax.Array:
    """Inside `per_device`: (B, T / N, H, ...), a part of each sequence, to (B, T, H / N, ...).

    Device i of the N context devices gets the i-th part of the heads.
    """
    return _exchange(x, "context", 2, 1)


def split_sequence(x: jax.Array) -> jax.Array:
    """The inverse of `split_heads`: (B, T, H / N, ...) to (B, T / N, H, ...)."""
    return _exchange(x, "context", 1, 2)


def _exchange(x: jax.Array, name: str, split: int, joined: int) -> jax.Array:
    if axis_size(name) == 1:
        return x
    return jax.lax.all_to_all(x, name, split_axis=split, concat_axis=joined, tiled=True)


def all_tokens(tokens: jax.Array) -> jax.Array:
    """Inside `per_device`: (B / F, T / N) to (B, T), the tokens of F fsdp and N context devices."""
    for axis, name in enumerate(SHARDS):
        if axis_size(name) > 1:
            tokens = jax.lax.all_gather(tokens, name, axis=axis, tiled=True)
    return tokens


def own_tokens(x: jax.Array) -> jax.Array:
    """Inside `per_device`: (B, T, C / F / N), some columns of all tokens, to (B / F, T / N, C).

    The columns are divided like a parameter's: over fsdp, then each part over context.
    """
    for axis, name in reversed(list(enumerate(SHARDS))):
        x = _exchange(x, name, axis, 2)
    return x


def put(x, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places an array that every process has."""
    if isinstance(x, jax.Array) and jax.process_count() == 1:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def constrain(x: jax.Array, *axes) -> jax.Array:
    """Constrains the sharding of an activation; does nothing on one device."""
    if one_device():
        return x
    # Inside jit, because outside JAX would refuse an array that is on one device.
    return jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)(x, P(*axes))


@partial(jax.jit, static_argnames=("shape", "axes"))
def normal(key: jax.Array, shape: tuple[int, ...], std: float, axes: tuple) -> jax.Array:
    """Draws an fp32 weight from N(0, std^2) on the devices that hold it.

    It is a separate program, compiled once per shape: XLA would fuse all draws of the same shape in
    one program, and take minutes to compile that kernel.
    """
    return constrain(std * jax.random.normal(key, shape, np.float32), *_sharded(axes))


def spec_of(variable: nnx.Variable) -> PartitionSpec:
    """The PartitionSpec of a parameter's `axes`; without axes it is replicated."""
    return P(*_sharded(variable.get_metadata().get("axes") or ()))


def _sharded(axes: tuple) -> tuple:
    names = jax.tree.map(lambda name: SHARDS if name == "fsdp" else name, axes)
    return tuple(tuple(jax.tree.leaves(each)) for each in names)


def shardings(state: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    """The NamedShardings of a state of parameters, in the same structure."""
    return nnx.map_state(lambda _, v: v.replace(NamedSharding(mesh, spec_of(v))), state)


def in_order(params: nnx.State, x) -> tuple:
    """(params, x), where x's gradient waits for the gradients of params, which are used later.

    Otherwise XLA postpones the matmuls of the params' gradients, to overlap them with their sums
    over the devices, and keeps the inputs: all activations, whatever `model.remat` says.
    """
    return (params, x) if one_device() else _in_order(params, x)


@partial(with_gradient, lambda *both: (both, None))
def _in_order(_, gradients):
    # Without the constraint, the sums before the barrier would be over whole parameters.
    at = shardings(gradients[0], jax.sharding.get_abstract_mesh())
    params = jax.lax.with_sharding_constraint(gradients[0], at)
    return jax.lax.optimization_barrier((params, gradients[1]))


def split_over_data(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Splits each device's part among the replicas, too, along the first axis that they divide.

    Returns `sharding` if there is no such axis or only one replica.
    """
    if (replicas := sharding.mesh.shape["data"]) == 1:
        return sharding
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    for i, size in enumerate(sharding.shard_shape(shape)):
        if size % replicas == 0:
            spec[i] = tuple(jax.tree.leaves((spec[i], "data")))
            return NamedSharding(sharding.mesh, P(*spec))
    return sharding
