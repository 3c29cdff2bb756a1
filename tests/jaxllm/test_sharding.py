"""Losses and gradients on every mesh equal those of one device, and no activation is gathered."""

import re
from math import prod

import jax
import numpy as np
import pytest
from eight_devices import BATCH, MESHES, SEQ, SHAPE, STEP_ROWS, WANTED, WIDTH
from jax.sharding import AbstractMesh, AxisType
from tiny_models import tiny
from training_runs import devices_run

from jaxllm.config import Config, InputError, MeshConfig
from jaxllm.models import create
from jaxllm.sharding import AXES, abstract_mesh, check, make_mesh, per_device

# Sums over the tensor axis of a whole (B, T, C) with one block: two in its forward pass, one of the
# loss, and one for each input of its matmuls (llama3: q, k and v; gate; up).  On GPUs XLA adds the
# inputs of the same norm first, so that two are left of the last.
STREAMS = {"gpt2": 2 + 1 + 2, "llama3": 2 + 1 + 3, "vlstm": 2 + 1 + 4}
# Exchanges of embedded tokens: in the forward pass, also of their positions if each row has its
# own, and in the backward pass, where both have the same gradient.
EMBEDDED = {(model, pack): 2 for model, pack in WANTED} | {("gpt2", "documents"): 3}
CASES = [(*case, mesh) for case, meshes in WANTED.items() for mesh in meshes]
cases_where = lambda wanted: pytest.mark.parametrize(
    ("model", "pack", "mesh"), [case for case in CASES if wanted(MESHES[case[2]]["context"])]
)


@pytest.fixture(scope="module")
def result():
    return devices_run("eight_devices.py", 8)


@cases_where(lambda context: True)
def test_losses_and_all_gradients_are_those_of_one_device(result, model, pack, mesh):
    found = result[f"{model}, {pack}"]
    errors, one = found[mesh]["errors"], found["one"]
    assert errors.keys() == one.keys()
    assert len(errors) > 10
    assert min(one.values()) > 1e-3  # no gradient is trivially equal
    assert max(errors.values()) < 2e-5, max(errors, key=errors.__getitem__)


@cases_where(lambda context: context == 1)
def test_a_mesh_moves_no_more_than_it_needs(result, model, pack, mesh):
    """A device's part of an activation is never gathered, and each weight is gathered once."""
    found = result[f"{model}, {pack}"]
    sizes, parameters = MESHES[mesh], sum(map(prod, found["shapes"]))
    gathered = tables = gradients = activations = exchanged = 0
    for kind, axes, shapes in found[mesh]["collectives"]:
        for shape in shapes:
            if kind == "all-to-all":  # the columns of embedded tokens
                assert axes == ["fsdp"], shape
                exchanged += prod(shape)
            elif any(n % SEQ == 0 for n in shape) and kind == "all-gather":
                # Tokens and positions, to look them up in a part of the columns.
                assert (axes, len(shape)) == (["fsdp"], 2), shape
            elif any(n % SEQ == 0 for n in shape):
                # After a matmul whose rows, or in the loss whose vocabulary, the axis divides.
                assert (kind, axes) == ("all-reduce", ["tensor"]), (kind, axes, shape)
                activations += prod(shape) if len(shape) == 3 else 0
            elif kind == "all-gather":
                assert axes in (["fsdp"], ["tensor"]), (kind, axes, shape)
                gathered += prod(shape) if axes == ["fsdp"] else 0
                tables += prod(shape) if axes == ["tensor"] else 0
            else:
                assert kind in ("all-reduce", "reduce-scatter"), (kind, axes, shape)
                gradients += prod(shape)
    table = 256 * WIDTH
    embedded = 64 * WIDTH if model == "gpt2" else table  # GPT-2's table is also the head
    once = (parameters - embedded) / sizes["tensor"]
    if sizes["fsdp"] > 1:
        assert 0.97 * once < gathered < once  # but for the norms and biases, which are whole
    else:
        assert gathered == 0
    # Every device looks up tokens of the whole vocabulary.
    assert tables == (table / sizes["fsdp"] if sizes["tensor"] > 1 else 0)
    if sizes["data"] * sizes["fsdp"] > 1:
        assert table <= gradients < 1.05 * (once + 2 * table)
    else:  # every device has all tokens
        assert gradients == 0
    stream = BATCH // (sizes["data"] * sizes["fsdp"]) * SEQ * WIDTH
    assert activations == (STREAMS[model] * stream if sizes["tensor"] > 1 else 0)
    assert exchanged == (EMBEDDED[model, pack] * stream if sizes["fsdp"] > 1 else 0)


@cases_where(lambda context: context > 1)
def test_activations_move_only_between_heads_and_sequence(result, model, pack, mesh):
    found = result[f"{model}, {pack}"]
    sizes, exchanged, gathered = MESHES[mesh], 0, 0
    activations = {SEQ, SEQ // sizes["context"]}  # an axis of every activation
    split = [axis for axis in ("fsdp", "context") if sizes[axis] > 1]
    for operation, axes, shapes in found[mesh]["collectives"]:
        moved = [s for s in shapes if activations & set(s)]
        if operation == "all-to-all":
            assert axes in (["context"], ["fsdp"])
            assert moved == shapes
            exchanged += sum(map(prod, shapes))
        elif operation == "all-reduce":  # after a matmul whose rows the tensor axis divides
            assert not moved or axes == ["tensor"], (operation, axes, shapes)
        elif operation == "all-gather" and axes in (["context"], ["fsdp"]):
            assert all(len(s) == 2 for s in moved), (operation, axes, shapes)  # token ids
        else:
            assert not moved, (operation, axes, shapes)
        if operation == "all-gather" and axes == split:
            gathered += sum(prod(s) for s in shapes if s not in moved)
    embedded = (64 if model == "gpt2" else 256) * WIDTH  # GPT-2's table is also the head
    once = (sum(map(prod, found["shapes"])) - embedded) / sizes["tensor"]
    assert 0.97 * once < gathered < once  # but for the norms and biases, which are whole
    q, k, v, y, gates = {
        "gpt2": (WIDTH, WIDTH, WIDTH, WIDTH, 0),
        "llama3": (WIDTH, WIDTH // 2, WIDTH // 2, WIDTH, 0),
        "vlstm": (WIDTH // 2, WIDTH // 2, WIDTH, WIDTH, 2 * SHAPE["n_heads"]),
    }[model]
    # A device exchanges its part of these once forward and once backward, and embedded tokens.
    heads = 2 * BATCH * SEQ * (q + k + v + y + gates) / prod(sizes.values())
    stream = BATCH * SEQ * WIDTH / (prod(sizes.values()) / sizes["tensor"])
    along = (sizes["fsdp"] > 1) + (sizes["context"] > 1)
    assert exchanged == heads + along * EMBEDDED[model, pack] * stream


def test_two_steps_on_eight_devices_with_accumulation_are_those_of_one(result):
    one, eight = result["steps"]["one"], result["steps"]["data, fsdp, tensor"]
    assert np.isfinite(one["losses"]).all()  # assert_allclose accepts equal NaNs
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=2e-5)
    np.testing.assert_allclose(eight["norms"], one["norms"], rtol=2e-4)


def test_a_step_sums_the_activations_of_half_of_the_rows_at_a_time(result):
    """So that the devices of the tensor axis can compute with the other half meanwhile."""
    summed = [shape for shape in result["steps"]["data, fsdp, tensor"]["summed"] if len(shape) == 3]
    rows = STEP_ROWS // 4 // 2  # of a device in each part of the accumulation
    assert {shape[0] for shape in summed} == {rows // 2}
    assert sum(map(prod, summed)) == STREAMS["llama3"] * rows * SEQ * WIDTH


@pytest.mark.parametrize("mesh", ["one", "data, fsdp, tensor"])
def test_moments_are_sharded_like_their_parameters_and_buffers_are_donated(result, mesh):
    assert result["steps"][mesh]["moments_like_params"]
    assert result["steps"][mesh]["donated"]


def test_drawn_weights_lie_where_the_state_has_them(result):
    assert result["warnings"] == {"gpt2": [], "llama3": [], "vlstm": []}


def test_devices_divide_the_rows_of_a_packed_layer(result):
    one, four = result["packed"]["1"], result["packed"]["4"]
    np.testing.assert_allclose(four["y"], one["y"], rtol=1e-5, atol=1e-6)
    assert four["collectives"] == []


def test_greedy_text_is_the_same_on_four_devices(result):
    one, four = result["greedy"]["one"], result["greedy"]["data, tensor"]
    assert one == four
    assert len({token for tokens in one for token in tokens}) > 8


def test_a_model_made_without_a_mesh_runs_on_one_without_jit(result):
    """JAX refuses to constrain an array that lies on one device outside jit."""
    one, *others = result["outside"]
    np.testing.assert_allclose(others, one, rtol=1e-5)


@cases_where(lambda context: True)
def test_fsdp_context_and_tensor_split_the_parameters(result, model, pack, mesh):
    parts = prod(MESHES[mesh][axis] for axis in ("fsdp", "context", "tensor"))
    assert 1 / parts <= result[f"{model}, {pack}"][mesh]["part_held"] < 1.2 / parts


def test_kernels_run_on_each_device_s_own_part(result):
    # Under plain jit every device's kernel would get the whole, gathered batch.
    shapes = set(result["kernels"])  # (batch, time, heads, head dimension)
    # A fourth of the batch in two halves, half of the heads: 2 of q and 1 each of k and v.
    assert {f"1x{SEQ}x2x64", f"1x{SEQ}x4x64"} <= shapes
    for whole in (f"8x{SEQ}x", f"4x{SEQ}x", f"2x{SEQ}x", f"1x{SEQ}x8x"):
        assert not any(shape.startswith(whole) for shape in shapes)


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(
        InputError, match=r"data=3 x fsdp=1 x context=1 x tensor=1 is not 1, the number of devices"
    ):
        make_mesh(MeshConfig(data=3), jax.devices()[:1])


class FourTensorDevices:
    shape = {"data": 1, "fsdp": 2, "context": 1, "tensor": 4}


def llama(heads, d_model, d_ff, **train):
    model = dict(type="llama3", vocab_size=200, n_layers=1, n_heads=heads[0], n_kv_heads=heads[1])
    return Config(
        model=model | dict(d_model=d_model, d_ff=d_ff, max_seq_len=8),
        train=dict(steps=1, batch_size=8, seq_len=8) | train,
        optimizer=dict(learning_rate=1e-3),
    )


def test_more_tensor_devices_than_kv_heads_are_refused_with_the_fix():
    with pytest.raises(InputError) as error:
        check(llama((8, 2), 64, 64), FourTensorDevices)
    assert "mesh.tensor=4 does not divide model.n_kv_heads=2" in str(error.value)
    assert "use mesh.fsdp for the other devices" in str(error.value)


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        (dict(tensor=4), "mesh.tensor=4 does not divide model.d_ff=66"),
        (dict(tensor=3), "mesh.tensor=3 does not divide model.vocab_size, padded to a multiple"),
        (dict(fsdp=4), "mesh.fsdp=4 does not divide model.d_ff=66; .* use mesh.data for"),
        (
            dict(fsdp=16, tensor=2),
            "mesh.tensor=2 x mesh.fsdp=16 does not divide model.n_heads x d_head=48",
        ),
    ],
)
def test_widths_that_the_axes_do_not_divide_are_refused(axes, named):
    class Mesh:
        shape = dict(data=1, fsdp=1, context=1, tensor=1) | axes

    with pytest.raises(InputError, match=named):
        check(llama((12, 12), 48, 66), Mesh)


def test_a_batch_that_does_not_divide_is_refused():
    config = llama((8, 8), 64, 64, batch_size=12, grad_accum=4)
    with pytest.raises(InputError, match=r"batch_size=12 is not a multiple of 2 devices"):
        check(config, FourTensorDevices)


def test_models_run_in_the_callers_own_shard_map(result):
    """They refused its mesh, or took its axis "tensor" for theirs; each device has all weights."""
    assert max(result["own"]) < 2e-5
    ours = AbstractMesh((1, 1, 1, 2), AXES, axis_types=(AxisType.Manual,) * 4)
    with jax.sharding.use_abstract_mesh(ours), pytest.raises(ValueError, match=r"tensor \(Manual"):
        per_device(jax.numpy.sin, None, None)


@pytest.mark.parametrize(("axes", "kind"), [(AXES, "Explicit"), (("data",), "Auto")])
def test_a_mesh_that_jax_makes_is_refused_with_the_fix(axes, kind):
    """JAX's own has explicit axes by default, on which `shard_map` reshards nothing."""
    sizes = (2, *[1] * (len(axes) - 1))
    mesh = AbstractMesh(sizes, axes, axis_types=(AxisType[kind],) * len(axes))
    line = rf"^the mesh has the axes {', '.join(axes)} \({kind}\), .* jaxllm.sharding.make_mesh$"
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=line):
        per_device(lambda x: x, (), ())


@pytest.mark.parametrize(
    ("kind", "axis", "shape", "line"),
    [
        ("gpt2", "data", (3, 8), "shape (3, 8) on a mesh: axis 0=3 is not a multiple of data x"),
        ("gpt2", "context", (2, 7), "shape (2, 7) on a mesh: axis 1=7 is not a multiple of cont"),
        ("llama3", "tensor", (2, 8), "n_kv_heads=1 is not a multiple of tensor x context=2"),
        ("llama3", "context", (2, 8), "n_kv_heads=1 is not a multiple of tensor x context=2"),
        ("vlstm", "tensor", (2, 8), "n_heads=1 is not a multiple of tensor x context=2"),
    ],
)
def test_what_a_mesh_does_not_divide_is_one_line(kind, axis, shape, line):
    """JAX's own had seven lines, or spoke of a reshape or of no heads."""
    model = create(tiny(kind, **{"vlstm": dict(n_heads=1)}.get(kind, {})))
    line = f"^{re.escape(line)}"
    mesh = abstract_mesh(MeshConfig(**{axis: 2}), 2)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=line):
        jax.eval_shape(model, jax.ShapeDtypeStruct(shape, "int32"))


def test_without_a_mesh_an_op_is_not_wrapped():
    op = lambda x: x
    assert per_device(op, None, None) is op
