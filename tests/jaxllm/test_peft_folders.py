"""Adapters in peft's folders: read, trained beside peft, written, merged, refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import loaded_models
import ml_dtypes
import numpy as np
import pytest
from cases import slow
from flax import nnx
from huggingface_folders import ADAPTED, FIXTURES, adapters_for, fixture, folder_of, weights_of
from lora_models import TARGETS
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxllm.config import Config, MeshConfig, OptimizerConfig, TrainConfig
from jaxllm.errors import InputError
from jaxllm.infer.decode import load_model, open_tokenizer
from jaxllm.models import create
from jaxllm.sharding import make_mesh
from jaxllm.train.step import Trainer
from jaxllm.weights import convert
from jaxllm.weights.adapters import AdapterWeights, load_base, write_peft
from jaxllm.weights.places import named_params
from jaxllm.weights.pretrained import open_weights

pytestmark = pytest.mark.usefixtures("no_tf32")


MODULES = [f"self_attn.{x}_proj" for x in "qkvo"] + [
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
]
FLOAT32 = dict(compute_dtype="float32", residual_dtype="float32", kernels="xla")


def peft_folder(folder, which="init", **page):
    """The adapters of lora.safetensors as peft writes them, beside their base."""
    base = folder / "base"
    if not base.exists():
        folder_of(base, "llama3")
    target = folder / which
    target.mkdir()
    stored = fixture("lora")
    adapters = {
        name.removeprefix(f"{which}."): x for name, x in stored.items() if name.startswith(which)
    }
    save_file(adapters, target / "adapter_model.safetensors")
    with safe_open(FIXTURES / "lora.safetensors", "numpy") as file:
        known = json.loads(file.metadata()["page"])
    known |= dict(base_model_name_or_path=str(base)) | page
    (target / "adapter_config.json").write_text(json.dumps(known))
    return target


def logits(graph, params, tokens):
    z = jax.jit(lambda params: nnx.merge(graph, params)(jnp.asarray(tokens)))(params)
    return np.asarray(z, np.float32)[..., :67]


def test_ten_steps_are_those_of_peft(tmp_path):
    weights = open_weights(peft_folder(tmp_path))
    assert (weights.config.lora.rank, weights.config.lora.scale) == (4, 2)
    model = weights.config.model_copy(update=FLOAT32 | {"init_from": str(tmp_path / "init")})
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule="constant")
    config = Config(
        model=model, train=TrainConfig(steps=10, batch_size=2, seq_len=37), optimizer=optimizer
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    trainer = Trainer(config, mesh)
    base, checksum = load_base(weights.base, model, trainer.abstract_base_params, mesh)
    state = trainer.init(weights.adapters(trainer.abstract_params, mesh), base)
    stored = fixture("lora") | {k: fixture("llama3")[k] for k in ("tokens", "labels")}
    batch = trainer.put_batch({k: stored[k] for k in ("tokens", "labels")})
    step, losses = trainer.trace_train_step().lower().compile(), []
    with jax.default_matmul_precision("highest"):
        for _ in range(10):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, stored["losses"], rtol=1e-4)
    found = logits(trainer.graph, state.whole, stored["tokens"])
    np.testing.assert_allclose(found, stored["logits"], atol=2e-3)
    # And what is exported is what peft saved.
    weights.arrays = {n: np.asarray(p[...]) for n, p in named_params(state.params).items()}
    (tmp_path / "out").mkdir()
    write_peft(weights, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "adapter_model.safetensors")
    saved = {k.removeprefix("final."): x for k, x in stored.items() if k.startswith("final.")}
    assert exported.keys() == saved.keys()
    for name, x in exported.items():
        np.testing.assert_allclose(x, saved[name], atol=2e-3, err_msg=name)
    page = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert set(page["target_modules"]) == set(TARGETS)
    assert (page["r"], page["lora_alpha"], page["peft_type"]) == (4, 8, "LORA")


@pytest.mark.parametrize("quantize", [slow(None), "int8"])
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_merged_and_unmerged_logits_are_equal(tmp_path, quantize, dtype):
    weights = open_weights(peft_folder(tmp_path, "final"))
    options = FLOAT32 | dict(compute_dtype=dtype, residual_dtype=dtype, quantize=quantize)
    config = weights.config.model_copy(update=options)
    weights = AdapterWeights(weights.folder, config, weights.base, weights.arrays, expected=None)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    tokens = fixture("llama3")["tokens"]
    beside = Trainer(
        Config(
            model=config.model_copy(update={"init_from": "base"}),
            train=TrainConfig(steps=1, batch_size=2, seq_len=37),
            optimizer=OptimizerConfig(learning_rate=1.0),
        ),
        mesh,
    )
    base, _ = load_base(weights.base, config, beside.abstract_base_params, mesh)
    adapters = weights.adapters(beside.abstract_params, mesh)
    unmerged = nnx.merge_state(adapters, base)
    expected = logits(beside.graph, unmerged, tokens)
    plain = nnx.eval_shape(lambda: create(weights.plain))
    graph, shapes = nnx.split(plain, nnx.Param)
    merged = jax.tree.unflatten(
        jax.tree.structure(shapes), [jnp.asarray(weights.param(n)) for n in named_params(shapes)]
    )
    for found in (logits(graph, merged, tokens), logits(*load_model(weights, mesh), tokens)):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < (1e-5 if dtype == "float32" else 0.03)  # bf16 rounds the merged matrix
    if dtype == "float32" and quantize is None:
        np.testing.assert_allclose(expected, fixture("lora")["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_relatives_give_the_logits_of_peft(tmp_path, name):
    """Read, written by write_peft and read again, and merged by convert."""
    weights = open_weights(adapters_for(tmp_path / "peft", name))
    (tmp_path / "out").mkdir()
    write_peft(weights, tmp_path / "out")
    words = [str(tmp_path / "peft"), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]
    assert convert.main(words) == 0
    tokens, expected = fixture("relatives")["tokens"], fixture("lora_relatives")[name]
    limit = 4e-6 * np.abs(expected).max()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        for folder in ("peft", "out"):
            weights = open_weights(tmp_path / folder)
            weights.config = weights.config.model_copy(update=FLOAT32)
            found = logits(*load_model(weights, mesh), tokens)
            np.testing.assert_allclose(found, expected, rtol=0, atol=limit)
    found = loaded_models.logits(tmp_path / "merged", tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)
    assert np.abs(expected - fixture("relatives")[name]).max() > 0.1  # the adapters matter


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (dict(use_dora=True), "use_dora=True is not supported"),
        (
            dict(feedforward_modules=["down_proj"], peft_type="IA3"),
            r"peft_type='IA3' is not supported; merge with peft's merge_and_unload$",
        ),
        (dict(bias="all"), "bias='all' is not supported; merge with peft's merge_and_unload$"),
        (dict(rank_pattern={"q_proj": 8}), "rank_pattern={'q_proj': 8} is not supported"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (dict(alora_invocation_tokens=[5]), r"alora_invocation_tokens=\[5\] is not supported"),
        (dict(base_model_name_or_path="meta/none"), "of the base meta/none, which is no folder"),
        (dict(base_model_name_or_path=""), "base_model_name_or_path='' is not a folder's name"),
        (dict(r=2), r"of another model than .*_proj.lora_.* that model needs"),
        (dict(r=1000), r"of another model than .*_proj.lora_.* that model needs"),
        (dict(r=None), r"adapter_config\.json: r=None: must be a whole number$"),
        (dict(r=0), r"adapter_config\.json: r=0: must be at least 1$"),
        (dict(lora_alpha="16"), r"adapter_config\.json: lora_alpha='16': must be a number$"),
    ],
)
def test_folders_of_peft_that_do_not_fit_are_refused(tmp_path, page, message):
    folder = peft_folder(tmp_path, **page)
    with pytest.raises(InputError, match=message) as raised:
        open_weights(folder)
    assert "\n" not in str(raised.value)


def test_how_adapters_were_drawn_matters_only_if_it_changed_their_base(tmp_path):
    for i, drawn in enumerate((True, False, "gaussian", "orthogonal")):
        assert open_weights(peft_folder(tmp_path / str(i), init_lora_weights=drawn)).arrays


def test_a_link_to_nothing_is_no_reason_to_take_the_bases_tokenizer(tmp_path):
    folder = peft_folder(tmp_path)
    assert open_weights(folder).text == tmp_path / "base"
    (folder / "tokenizer.json").symlink_to("../blobs/gone")
    with pytest.raises(InputError, match=r"init/tokenizer\.json is missing: copy"):
        open_tokenizer(open_weights(folder))


def test_adapters_may_lie_beside_their_base(tmp_path):
    apart = adapters_for(tmp_path / "apart", "mistral")
    shutil.copytree(apart / "base", tmp_path / "both")
    page = json.loads((apart / "adapter_config.json").read_text())
    page["base_model_name_or_path"] = str(tmp_path / "both")
    (tmp_path / "both" / "adapter_config.json").write_text(json.dumps(page))
    shutil.copy(apart / "adapter_model.safetensors", tmp_path / "both")
    one, two = (
        open_weights(folder).param("blocks.0.attention.q.weight")
        for folder in (apart, tmp_path / "both")
    )
    np.testing.assert_array_equal(one, two)


def test_adapters_of_a_run_take_its_converted_folder_as_their_base(tmp_path):
    folder = peft_folder(tmp_path)
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path), path, {"base_step": "6"})  # what jaxllm convert writes for a run
    assert open_weights(folder).arrays
    page = json.loads((folder / "adapter_config.json").read_text())
    page["base_model_name_or_path"] = str(folder)
    (other := tmp_path / "other").mkdir()
    (other / "adapter_config.json").write_text(json.dumps(page))
    shutil.copy(path, other)
    fix = "merge those first: jaxllm convert .* OUT --merge, and name OUT as base_model_name_or_p"
    with pytest.raises(InputError, match=fix):
        open_weights(other)
    page["base_model_name_or_path"] = str(tmp_path / "OUT")
    assert convert.main([str(folder), str(tmp_path / "OUT"), "--merge"]) == 0
    (other / "adapter_config.json").write_text(json.dumps(page))
    assert open_weights(other).arrays


def test_tensors_of_peft_that_do_not_fit_are_refused(tmp_path):
    folder = peft_folder(tmp_path)
    path = folder / "adapter_model.safetensors"
    whole = load_file(path)
    name = min(whole)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        save_file({key: x.astype(dtype) for key, x in whole.items()}, path)
        held = open_weights(folder).arrays
        assert {x.dtype for x in held.values()} == {np.dtype(np.float32)}
        assert all(np.any(x) for name, x in held.items() if name.endswith(".a"))  # B is zero
        assert any(name.endswith(".a") for name in held)
    for changed, message in (
        (whole | {name: whole[name].astype(np.int32)}, "lora_A.weight is I32, not F32 or F16"),
        (whole | {name: whole[name].astype(ml_dtypes.float8_e4m3fn)}, "is F8_E4M3, not F32 or F16"),
        (whole | {name: np.full_like(whole[name], np.nan)}, "lora_A.weight holds nan"),
        ({key: x for key, x in whole.items() if key != name}, f"it lacks {name}"),
    ):
        save_file(changed, path)
        with pytest.raises(InputError, match=message):
            open_weights(folder)
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(
        InputError, match=r"; adapter_model\.bin is a pickle, which is never opened"
    ):
        open_weights(folder)


@pytest.mark.parametrize(
    "page",
    [
        dict(layers_to_transform=[1]),
        dict(target_modules=r".*layers\.1\..*_proj"),
        dict(target_modules=[f"layers.1.{name}" for name in MODULES]),
        dict(exclude_modules=r".*layers\.0\..*"),
    ],
)
def test_adapters_of_some_layers_leave_the_others_as_they_are(tmp_path, page):
    folder = peft_folder(tmp_path, "final")
    path = folder / "adapter_model.safetensors"
    stored = {name: x for name, x in load_file(path).items() if ".layers.1." in name}
    whole = open_weights(folder)
    save_file(stored, path)
    with pytest.raises(InputError, match=r"it lacks .*layers\.0\."):
        open_weights(folder)
    known = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(known | page))
    weights = open_weights(folder)
    for name in named_params(nnx.eval_shape(lambda: create(weights.plain))):
        right = weights.base.param(name) if "blocks.0." in name else whole.param(name)
        np.testing.assert_array_equal(weights.param(name), right, err_msg=name)
    save_file(stored | {"base_model.model.lm_head.weight": np.ones((67, 16), np.float32)}, path)
    with pytest.raises(InputError, match=r"or not only adapters of q_proj, .*holds .*lm_head\."):
        open_weights(folder)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("init", [], "init is a folder of peft already; --merge makes a whole model"),
        ("init", ["--dtype", "bfloat16"], "--dtype needs --merge: adapters are written in float32"),
        (
            "init",
            ["--quantize", "int8"],
            "--quantize needs --merge, because {} holds some adapters",
        ),
        ("base", ["--merge"], "--merge is for adapters, and {} holds no adapters"),
    ],
)
def test_conversions_of_adapters_that_are_refused_say_why(
    tmp_path, capsys, source, options, message
):
    peft_folder(tmp_path)
    assert convert.main([str(tmp_path / source), str(tmp_path / "out"), *options]) == 2
    assert message.format(tmp_path / source) in capsys.readouterr().err


def test_adapters_of_another_model_are_refused(tmp_path):
    folder = peft_folder(tmp_path)
    shutil.rmtree(tmp_path / "base")
    tensors = {k: v for k, v in weights_of("llama3").items() if ".layers.1." not in k}
    folder_of(tmp_path / "base", "llama3", tensors, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"is of another model than .*: it holds .*layers\.1\."):
        open_weights(folder)
