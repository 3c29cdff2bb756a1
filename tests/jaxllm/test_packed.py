"""Packs models by command, and compares generation and loss with the dequantized weights."""

import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from evaluation_run import TEXTS
from flax import nnx
from huggingface_folders import to_huggingface
from safetensors.numpy import load_file, save_file
from tiny_models import tiny

import train
from jaxllm import config as configs
from jaxllm.config import MeshConfig, SampleConfig
from jaxllm.data.cache import digest
from jaxllm.errors import InputError
from jaxllm.infer import decode, evaluate, generate
from jaxllm.layers import GatedMLP, Linear
from jaxllm.models import MODELS, create
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.vlstm import VLSTM
from jaxllm.sharding import make_mesh
from jaxllm.weights import convert
from jaxllm.weights.huggingface_config import config_json
from jaxllm.weights.packed import PackedWeights, Packing, base_packing, frozen, write_packed
from jaxllm.weights.places import named_params
from jaxllm.weights.pretrained import open_weights
from pallas_kernels import QuantizedWeight, quantize
from pallas_kernels.quantized.formats import dequantize

# One shape of matrices, so that little is compiled.
SQUARE = dict(d_model=64, d_ff=64)
FLOAT32 = {"compute_dtype": "float32", "residual_dtype": "float32", "kernels": "xla"}


def folder_of(folder, kind, **options):
    """(Hugging Face folder of a tiny model whose tokens depend on the whole text, parameters)."""
    config = tiny(kind, n_layers=1, **SQUARE, **options)
    shapes = named_params(nnx.eval_shape(lambda: create(config)))
    rng = np.random.default_rng(0)
    params = {
        name: (rng.normal(0, 0.2, p.shape) + (p.ndim == 1 and name.endswith(".weight"))).astype(
            np.float32
        )
        for name, p in shapes.items()
    }
    params["embedding.wte"] /= 10  # a tied head would repeat its token
    for name in ("embedding.wte", "head.weight"):  # zeros pad the vocabulary
        if name in params:
            padding = params[name] if name == "embedding.wte" else params[name].T
            padding[config.vocab_size :] = 0
    folder.mkdir()
    save_file(
        {k: np.ascontiguousarray(x) for k, x in to_huggingface(config, params).items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config_json(config, "float32")))
    shutil.copyfile(TEXTS / "tokenizer.json", folder / "tokenizer.json")
    return folder, params


def run(*words):
    return convert.main([str(word) for word in words])


def in_float32(folder):
    config = configs.load(str(folder / "config.yaml"))
    model = config.model.model_copy(update=FLOAT32)
    text = config.model_copy(update={"model": model}).to_yaml()
    (folder / "config.yaml").write_text(text)


def error_of(capsys, status, *named):
    """The only line of an error that names all of `named`."""
    captured = capsys.readouterr()
    assert status == 2, captured.out + captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for words in named:
        assert words in captured.err
    return captured.err


CASES = [  # format, group, symmetric, format of the head
    slow("int8", "32", True, None),
    ("int4", "32", False, "int8"),
    slow("int2", "32", True, None),
    slow("int1", "none", False, "fp8"),
    ("fp8", "none", True, "int4"),
    slow("2:4-int8", "64", True, None),
    ("2:4-int4", "none", True, None),
]


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("square") / "theirs", "gpt2")


@pytest.mark.parametrize(("name", "group", "symmetric", "head"), CASES)
def test_what_is_loaded_equals_what_was_quantized(square, name, group, symmetric, head, tmp_path):
    theirs, params = square
    options = ["--quantize", name, "--group", group, *([] if symmetric else ["--asymmetric"])]
    assert run(theirs, tmp_path / "out", *options, *(["--head", head] if head else [])) == 0
    blocks, head = convert.FORMATS[name], convert.FORMATS[head] if head else None
    group = None if group == "none" else int(group)
    weights = open_weights(tmp_path / "out")
    assert weights.packing == Packing(*blocks, group, symmetric, head)
    if head:
        params = params | {"head.weight": params["embedding.wte"].T}  # the tied one, in few bits
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    found = {path: weights.load(path, jax.NamedSharding(mesh, jax.P())) for path in params}
    size = 0
    for path, x in params.items():
        if not isinstance(found[path], QuantizedWeight):
            assert found[path].dtype == (jnp.float32 if x.ndim == 1 else jnp.bfloat16)
            assert np.array_equal(found[path], x.astype(found[path].dtype))
            size += found[path].nbytes
            continue
        format, bits = head if path == "head.weight" else blocks
        even = symmetric or format != "int"
        q = quantize(jnp.asarray(x), format=format, bits=bits, group=group, symmetric=even)
        assert np.array_equal(dequantize(found[path]), dequantize(q))
        # What docs/packed-weights.md promises: K in four whole steps, N in 16s, and 7 numbers.
        step = 1024 if format == "2:4" else 1024 // bits
        k, n = step * -(-x.shape[0] // step), 16 * -(-x.shape[1] // 16)
        scales = n * (k // group if group else 1) * 2 * (1 if even else 2)
        words = n * k * (bits / 2 + 1 if format == "2:4" else bits) / 8
        size += words + scales + 28
    matrices = [path for path in params if isinstance(found[path], QuantizedWeight)]
    assert len(matrices) == 6 + (head is not None)  # q, k, v, out, up, down
    content = (tmp_path / "out" / "packed.safetensors").read_bytes()
    assert len(content) == size + 8 + int.from_bytes(content[:8], "little")


def dequantized(params):
    """The parameters with float32 matrices for the packed ones."""
    packed = lambda x: isinstance(x, QuantizedWeight)
    dense = jax.tree.map(lambda x: dequantize(x) if packed(x) else x, params, is_leaf=packed)
    assert len(jax.tree.leaves(dense)) < len(jax.tree.leaves(params))
    return dense


@pytest.mark.parametrize(
    ("kind", "head", "rows"),
    [
        slow("gpt2", None, False),
        ("gpt2", "int4", False),
        ("llama3", None, True),
        slow("llama3", "int8", False),
        slow("vlstm", None, False),
    ],
)
def test_generation_and_loss_equal_those_of_the_dequantized_model(
    kind, head, rows, square, tmp_path, monkeypatch
):
    """rows: whether the head is transposed, as on a GPU."""
    monkeypatch.setattr(decode, "by_rows", lambda: rows)
    options = {"llama3": dict(n_kv_heads=2, qkv_bias=bool(head), qk_norm=not head)}.get(kind, {})
    theirs, _ = square if kind == "gpt2" else folder_of(tmp_path / "theirs", kind, **options)
    words = ["--quantize", "int4", "--group", "32", *(["--head", head] if head else [])]
    assert run(theirs, tmp_path / "out", *words) == 0
    in_float32(tmp_path / "out")
    prompts, count = [list(range(5, 20)), [60], [9, 3, 17]], 10
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    # A GPU would take TF32.
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        graph, params = decode.load_model(open_weights(tmp_path / "out"), mesh)
        greedy = SampleConfig(tokens=count, temperature=0.0)
        got = np.stack(list(decode.stream_tokens(graph, params, prompts, greedy)), axis=1)
        text = np.zeros((3, 32), np.int32)
        for row, prompt, answer in zip(text, prompts, got, strict=True):
            row[: len(prompt) + count] = [*prompt, *answer]
        labels = np.roll(text, -1, axis=1)
        loss = jax.jit(lambda params, *batch: nnx.merge(graph, params).loss(*batch))
        packed_loss = loss(params, text, labels)
        forward = jax.jit(lambda params, text: nnx.merge(graph, params)(text)[..., :100])
        z = np.asarray(forward(dequantized(params), text))
    likeliest = [row[len(p) - 1 :][:count] for row, p in zip(z.argmax(-1), prompts, strict=True)]
    assert np.array_equal(got, likeliest)
    assert len(set(got.ravel().tolist())) > 6
    of_label = np.take_along_axis(z, labels[..., None], axis=-1)[..., 0]
    dense_loss = (np.log(np.exp(z).sum(-1)) - of_label).sum()
    assert packed_loss == pytest.approx(dense_loss, rel=1e-5)


def test_evaluate_prints_the_loss_of_the_dequantized_model(packed, tmp_path, monkeypatch, capsys):
    words = f"""--checkpoint {packed} --data.source text --data.path {TEXTS / "text.txt"}
        --data.cache_dir {tmp_path}"""
    load_model, losses = decode.load_model, []

    def dense(weights, mesh):
        graph, params = load_model(weights, mesh)
        return graph, dequantized(params)

    for load in (load_model, dense):
        monkeypatch.setattr(decode, "load_model", load)
        capsys.readouterr()
        assert evaluate.main(words.split()) == 0
        found = re.fullmatch(r"step 0: loss ([\d.]+) nats .*\n", capsys.readouterr().out)
        losses.append(float(found[1]))
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)  # the activations are bfloat16


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_equals_the_dequantized_one_in_bfloat16(bias):
    layer = Linear(64, 48, std=1.0, bias=bias, rngs=nnx.Rngs(0))
    if bias:
        layer.bias[...] = jnp.linspace(-3, 3, 48)
    x = jax.random.normal(jax.random.key(1), (2, 3, 64), jnp.bfloat16)
    weight = quantize(layer.weight[...], bits=4, group=32)
    layer.weight[...] = dequantize(weight)
    for add_bias in (True, False):
        exact = x.astype(jnp.float32) @ dequantize(weight, jnp.bfloat16).astype(jnp.float32)
        exact = exact + layer.bias[...] if bias and add_bias else exact
        packed = nnx.clone(layer)
        packed.weight.set_value(weight)
        y = jax.jit(lambda m, x, add_bias=add_bias: m(x, add_bias=add_bias))(packed, x)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8, atol=1e-2)


def test_a_run_is_loaded_in_the_compute_dtype(square, tmp_path, monkeypatch):
    """Its float32 matrices are never all on the device: they would be twice what is needed."""
    theirs, params = square
    assert run(theirs, tmp_path / "run") == 0
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        graph, loaded = decode.load_model(open_weights(tmp_path / "run"), mesh)
        found = named_params(nnx.merge(graph, loaded))
        assert found.keys() == params.keys()
        for name, x in params.items():
            matrix = x.ndim == 2 and name.startswith("blocks.")
            assert found[name].dtype == (jnp.bfloat16 if matrix else jnp.float32)
            assert np.array_equal(found[name], x.astype(found[name].dtype))
        monkeypatch.setattr(decode, "by_rows", lambda: True)
        kept = decode.in_compute_dtype(loaded, jnp.bfloat16)
        assert not any(x.is_deleted() for x in jax.tree.leaves(loaded))
        decode.in_compute_dtype(loaded, jnp.bfloat16, consume=True)
    freed = [x.is_deleted() for x in jax.tree.leaves(loaded)]
    # Transposed: q, k, v, out, up and down; cast: the table of the tied head.
    assert sum(freed) == 7
    assert not any(x.is_deleted() for x in jax.tree.leaves(kept))


def test_a_packed_gated_mlp_writes_no_matrix(monkeypatch):
    """Of 128 rows, for which training has a kernel that takes a dense matrix."""
    layer = GatedMLP(64, 128, rngs=nnx.Rngs(0))
    for linear in (layer.gate, layer.up, layer.down):
        linear.weight.set_value(quantize(linear.weight[...], bits=4, group=32))
    monkeypatch.setattr("jaxllm.layers.linear.dequantize", None)
    y = jax.eval_shape(layer, jax.ShapeDtypeStruct((1, 128, 64), jnp.bfloat16))
    assert y.shape == (1, 128, 64)


@pytest.mark.parametrize("rows", [True, False])
def test_generation_keeps_no_second_copy_of_packed_weights(packed, rows, monkeypatch):
    monkeypatch.setattr(decode, "by_rows", lambda: rows)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        graph, params = decode.load_model(open_weights(packed), mesh)
        dtype = nnx.merge(graph, params).config.compute_dtype
        params = decode.in_compute_dtype(params, dtype, table=False)  # as generate has them
        matrices = decode.in_compute_dtype(params, dtype)  # as for each text
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (matrices, params)), strict=True))


def test_a_run_and_its_hugging_face_folder_give_the_same_file(square, tmp_path, capsys):
    theirs, _ = square
    assert run(theirs, tmp_path / "run") == 0
    capsys.readouterr()
    for source in (theirs, tmp_path / "run"):
        out = tmp_path / f"{source.name}-packed"
        status = run(source, out, "--quantize", "int8")
        error_of(capsys, status, "blocks.0.attention.k.weight: K=64", "the group, 128")
        assert run(source, out, "--quantize", "int8", "--group", 64) == 0
        assert "int8, groups of 64" in capsys.readouterr().out
    a, b = (tmp_path / f"{name}-packed" / "packed.safetensors" for name in ("theirs", "run"))
    assert a.read_bytes() == b.read_bytes()
    assert {p.name for p in a.parent.iterdir()} == {
        *("config.yaml", "tokenizer.json", "token_ids.json", "packed.json", "packed.safetensors")
    }


@pytest.fixture(scope="module")
def packed(square, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "out"
    assert run(square[0], out, "--quantize", "int4", "--group", "64") == 0
    return out


def test_bad_options_are_refused(square, packed, tmp_path, capsys):
    theirs, out = square[0], tmp_path / "out"
    for options, named in (
        ("--quantize int3", "int3"),
        ("--quantize int4 --group 48", "48"),
        ("--quantize int4 --group 128", "K=64, N=64: K is not a multiple of the group, 128"),
        ("--quantize int4", "the group, 128; choose --group 64, 32 or none"),
        ("--quantize 2:4-int4 --group 32", "for format 2:4; choose --group 64 or none"),
        ("--quantize 2:4-int4 --group 32", "group=32"),
        ("--quantize fp8 --asymmetric --group 64", "fp8 has no offsets: leave out --asymmetric"),
        ("--group 32", "--group needs --quantize"),
        ("--asymmetric", "--asymmetric needs --quantize"),
        ("--head int8", "--head needs --quantize"),
        ("--quantize int4 --group 32 --head 2:4-int8", "head.weight: group=32"),
        ("--quantize int4 --dtype bfloat16", "--dtype bfloat16"),
        ("--quantize int4 --step 3", "weights of step 0, not of step 3"),
    ):
        error_of(capsys, run(theirs, out, *options.split()), named)
        assert [p.name for p in tmp_path.iterdir()] == []
    error_of(capsys, run(packed, out), "holds packed weights (int4, groups of 64)")
    status = run(theirs, packed, "--quantize", "int4", "--group", "64")
    error_of(capsys, status, "exists: choose another folder")
    status = generate.main(f"--checkpoint {packed} --prompt the --step 7".split())
    error_of(capsys, status, "weights of step 0, not of step 7: leave out the step")


def test_a_run_whose_shapes_cannot_be_packed_is_not_told_an_option_of_convert():
    odd = tiny("llama3", d_ff=33, init_from="base", lora={}, quantize="2:4-int4")
    with pytest.raises(InputError, match="four weights of 2:4, 4; choose another format$"):
        base_packing(odd)


def test_packed_weights_are_not_trained(packed, tmp_path, capsys):
    config = ["--config", str(packed / "config.yaml")]
    status = train.main([*config, "--out_dir", str(packed)])
    error_of(capsys, status, "already holds packed weights; name another")
    status = train.main(["--resume", "--out_dir", str(packed)])
    error_of(capsys, status, "holds packed weights, not a run to resume; start a run with")
    text = ["--data.source", "text", "--data.path", str(TEXTS / "text.txt")]
    words = [*config, *text, "--model.init_from", str(packed), "--out_dir", str(tmp_path / "run")]
    assert train.main([*words, "--data.cache_dir", str(tmp_path / "cache")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"model.init_from={packed} holds packed weights (int4, groups of 64)" in error
    assert not (tmp_path / "run").exists()


def test_damaged_and_foreign_folders_are_refused(packed, tmp_path, capsys):
    folder = shutil.copytree(packed, tmp_path / "copy")
    words = f"--checkpoint {folder} --prompt the --tokens 2".split()

    def refused(name, content, *named):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        error = error_of(capsys, generate.main(words), *named)
        (folder / name).write_bytes(whole)
        return error

    whole = (folder / "packed.safetensors").read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    for cut in (0, 7, 100, data, len(whole) - 1):
        refused("packed.safetensors", whole[:cut], "damaged", "packed.safetensors")
    places = [9, *np.linspace(data, len(whole) - 1, 12).astype(int)]
    errors = [
        refused("packed.safetensors", whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        for at in places
    ]
    assert all("damaged" in error and "convert their source again" in error for error in errors)
    page = json.loads((folder / "packed.json").read_text())
    for change in ({"bits": 8}, {"packing": 3}, {"digest": None}):
        refused("packed.json", json.dumps(page | change).encode(), "packed.json was changed")
    for content in (b"{}", b"[" * 100_000, b"\xff"):
        refused("packed.json", content, "packed.json")
    newer = page | {"packing": 3}
    del newer["digest"]
    newer["digest"] = digest(newer)
    refused("packed.json", json.dumps(newer).encode(), "packing 3", "reads 2")
    config = (folder / "config.yaml").read_text()
    deeper = config.replace("n_layers: 1", "n_layers: 2")
    assert deeper != config
    refused("config.yaml", deeper.encode(), "blocks.1.", "is not in it; config.yaml requires")
    wider = config.replace("vocab_size: 100", "vocab_size: 200")
    refused("config.yaml", wider.encode(), "embedding.wte is BF16 (128, 64)")
    edited = config.replace("norm_eps: 1.0e-05", "norm_eps: 1.0e-04")
    refused("config.yaml", edited.encode(), "norm_eps=0.0001 in", "differs from 1e-05 of packed")
    (folder / "packed.safetensors").unlink()
    error_of(capsys, generate.main(words), "packed.safetensors cannot be read")
    with pytest.raises(InputError, match=r"packed\.safetensors"):
        PackedWeights(folder)


def test_a_single_number_is_frozen_in_float32():
    """A user's scale was rounded to bfloat16, unlike vectors."""
    scale = nnx.State({"scale": nnx.Param(jnp.ones(()))})
    config = tiny("llama3", compute_dtype="bfloat16")
    for packing in (None, Packing("int", 8, None, True)):
        assert frozen(scale, config, packing)["scale"].dtype == jnp.float32


class Untied(GPT2):
    tied = False


class Tied(VLSTM):
    tied = True


@pytest.mark.parametrize(("kind", "of"), [("gpt2", Untied), ("vlstm", Tied)])
def test_the_head_of_a_users_model_is_its_own(kind, of, tmp_path, monkeypatch):
    """That of a GPT-2 was always the embedding, that of a vLSTM never."""
    monkeypatch.setitem(MODELS, kind, of)
    params = named_params(create(config := tiny(kind)))
    weights = SimpleNamespace(param=lambda name: np.asarray(params[name][...]))
    write_packed(tmp_path, config, Packing("int", 8, 32, True, ("int", 8)), weights, {"step": 0})
    held = load_file(tmp_path / "packed.safetensors")
    arrays = {name.removeprefix("head.weight."): x for name, x in held.items() if "head." in name}
    found = dequantize(QuantizedWeight.from_arrays(arrays))
    right = params["head.weight"] if of is Untied else params["embedding.wte"][...].T
    np.testing.assert_allclose(found, right, atol=2e-3)
