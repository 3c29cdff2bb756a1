"""model.lora: gradients, training beside peft, files, resume, refusals."""

import json
import shutil

import jax
import jax.numpy as jnp
import loaded_models
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from huggingface_folders import ADAPTED, FIXTURES, adapters_for, fixture, folder_of, weights_of
from lora_models import batch_of, loss_in_float64, plain_arrays, state_of, trainer_of
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import tiny
from training_runs import devices_run, error_of, final_state, write_tiny

import train
from jaxllm.config import Config, Lora, MeshConfig, OptimizerConfig, TrainConfig
from jaxllm.errors import InputError
from jaxllm.infer import evaluate, generate
from jaxllm.infer.decode import load_model
from jaxllm.layers.weight import Adapter
from jaxllm.models import create
from jaxllm.sharding import make_mesh
from jaxllm.train.estimate import equations
from jaxllm.train.step import Trainer
from jaxllm.weights import convert
from jaxllm.weights.adapters import AdapterWeights, load_base, write_peft
from jaxllm.weights.places import named_params
from jaxllm.weights.pretrained import open_weights

FLOAT32 = dict(compute_dtype="float32", residual_dtype="float32", kernels="xla")
PROMPT = ["--prompt", "the", "--tokens", "4"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def no_tf32():
    with jax.default_matmul_precision("highest"):
        yield


def gradients(trainer, state, batch):
    """(loss, {dotted path: gradient}) as the train step computes them."""
    loss, grads = jax.jit(trainer._gradients)(state, trainer.put_batch(batch))
    return float(loss), {n: np.asarray(g[...], np.float64) for n, g in named_params(grads).items()}


@pytest.mark.parametrize(
    ("targets", "model", "limit"),
    [
        *((target, {}, 1e-5) for target in TARGETS),
        ("all", dict(remat="block"), 1e-5),
        ("all", dict(quantize="int8"), 1e-5),
        ("k_proj,down_proj", dict(quantize="int4", remat="mlp"), 1e-5),
        # bf16 rounds each activation by up to 2^-9, some twenty times in a row.
        ("all", dict(compute_dtype="bfloat16", quantize="int4"), 0.06),
        ("all", dict(compute_dtype="bfloat16"), 0.06),
    ],
)
def test_gradients_are_those_of_float64(targets, model, limit):
    trainer = trainer_of(dict(rank=4, alpha=2.0, targets=targets, rslora=True), **model)
    state, batch = state_of(trainer), batch_of()
    loss, found = gradients(trainer, state, batch)
    config = trainer.config.model
    with jax.enable_x64(True):
        arrays = {name: jnp.float64(x) for name, x in plain_arrays(state).items()}
        adapters = {name: arrays.pop(name) for name in found}
        both = jax.value_and_grad(lambda a: loss_in_float64(arrays | a, batch, config))
        expected, wanted = jax.device_get(both(adapters))
    assert len(found) == 2 * config.n_layers * (7 if targets == "all" else len(targets.split(",")))
    np.testing.assert_allclose(loss, expected, rtol=limit)
    for name, g in found.items():
        error = np.linalg.norm(g - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < limit, (name, error)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_base_has_no_gradient_and_no_float32_copy(quantize):
    model = dict(quantize=quantize, compute_dtype="bfloat16", remat="mlp")
    trainer = trainer_of(dict(rank=4), train=dict(seq_len=13), **model)
    shapes = {p.shape for p in jax.tree.leaves(trainer.abstract_base_params) if p.ndim == 2}
    shapes |= {shape[::-1] for shape in shapes}
    products = [
        v.aval.shape
        for equation in equations(trainer.trace_train_step().jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
        for v in equation.outvars
    ]
    assert products
    assert not shapes & set(products)
    state = trainer.abstract_state()
    matrices = [p for p in jax.tree.leaves(state.base) if p.ndim >= 2]
    assert {str(p.dtype) for p in matrices} <= {"bfloat16", "int32"}
    held = sum(p.size for p in jax.tree.leaves(state.saved()))
    assert held < 3 * trainer.n_trained + 200  # adapters, two moments, the watch


def test_an_adapter_begins_as_peft_has_it():
    adapter = Adapter((400, 30), (None, None), Lora(rank=8, alpha=16.0), rngs=nnx.Rngs(0))
    a = np.asarray(adapter.a[...])
    assert a.shape == (400, 8)
    assert not np.any(adapter.b[...])
    bound = 1 / np.sqrt(400)  # Kaiming's with a = sqrt(5)
    assert 0.99 * bound < np.abs(a).max() <= bound
    np.testing.assert_allclose(a.std(), bound / np.sqrt(3), rtol=0.05)
    assert adapter.scale == 2
    assert Lora(rank=16, alpha=8.0, rslora=True).scale == 2


def test_dropout_is_anew_each_step_and_the_same_in_recomputation():
    lora = dict(rank=4, dropout=0.5)
    trainer = trainer_of(lora)
    state, batch = state_of(trainer), batch_of()
    loss, found = gradients(trainer, state, batch)
    next_loss, _ = gradients(trainer, state._replace(step=state.step + 1), batch)
    assert loss != next_loss
    again, recomputed = gradients(trainer_of(lora, remat="block"), state, batch)
    np.testing.assert_allclose(loss, again, rtol=1e-6)
    for name, g in found.items():
        np.testing.assert_allclose(g, recomputed[name], rtol=1e-4, atol=1e-6)
    whole = trainer.whole(state.params, state.base)
    total, count = trainer.eval_step()(whole, trainer.put_batch(batch))
    plain, _ = gradients(trainer_of(dict(rank=4)), state, batch)
    np.testing.assert_allclose(total / count, plain, rtol=1e-6)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_dropout_takes_the_keys_of_every_generator(kind):
    with jax.default_prng_impl(kind):
        trainer = trainer_of(dict(rank=4, dropout=0.5))
        shapes = [x.shape for x in jax.tree.leaves(trainer.abstract_keys)]
        drawn = jax.eval_shape(trainer.dropout_keys, jnp.int32(0), 0)
        assert shapes == [x.shape for x in jax.tree.leaves(drawn)]
        gradients(trainer, state_of(trainer), batch_of())


def test_dropout_keeps_the_mean():
    adapter = Adapter((64, 30), (None, None), Lora(rank=8, dropout=0.3), rngs=nnx.Rngs(0))
    x = jnp.ones((1000, 64))
    kept = np.asarray(adapter.narrow(x)).mean(0)
    np.testing.assert_allclose(kept, adapter.a[...].sum(0), atol=0.05)


def test_two_devices_compute_what_one_does():
    found = devices_run("lora_devices.py", 2)
    for name, result in found.items():
        one = found[", ".join(["one", *name.split(", ")[1:]])]
        np.testing.assert_allclose(result["losses"], one["losses"], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            result["adapters"], one["adapters"], rtol=0, atol=1e-4, err_msg=name
        )


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
    found = logits(trainer.graph, trainer.whole(state.params, state.base), stored["tokens"])
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


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
    unmerged = beside.whole(weights.adapters(beside.abstract_params, mesh), base)
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, words of a LoRA run): a tiny base as a run and as a folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("lora")
    words = ["--config", str(write_tiny(folder)), "--model.kernels", "xla", "--sample.tokens", "0"]
    words += ["--train.eval_every", "0"]
    assert train.main([*words, "--out_dir", str(folder / "run"), "--train.steps", "2"]) == 0
    assert convert.main([str(folder / "run"), str(folder / "hf")]) == 0
    words += ["--data.tokenizer", str(folder / "run" / "tokenizer.json")]
    words += ["--model.init_from", str(folder / "hf"), "--model.lora.rank", "4"]
    words += ["--train.steps", "4", "--train.checkpoint_every", "2"]
    options = ["--model.lora.dropout", "0.1", "--model.quantize", "int4"]
    options += ["--train.verify_every", "3"]
    assert train.main([*words, *options, "--out_dir", str(folder / "lora")]) == 0
    return folder, words


def test_a_killed_run_resumes_bit_for_bit(runs):
    folder, _ = runs
    again = folder / "again"
    shutil.copytree(folder / "lora", again)  # as a process leaves it that is killed after step 2
    shutil.rmtree(again / "checkpoints" / "4")
    (again / "report.html").unlink()
    assert train.main(["--resume", "--out_dir", str(again)]) == 0
    pair = [jax.tree.leaves(final_state(folder / name, 4)) for name in ("lora", "again")]
    for a, b in zip(*pair, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    saved = final_state(folder / "lora", 4)
    assert jax.tree.leaves(saved.base) == []
    assert sum(p.size for p in jax.tree.leaves(saved.params)) == 8192


def test_a_run_becomes_a_folder_of_peft_and_a_merged_model(runs, capsys):
    folder, _ = runs
    for words in (["peft"], ["merged", "--merge"], ["packed", "--merge", "--quantize", "int8"]):
        words = [str(folder / "lora"), str(folder / words[0]), *words[1:], "--group", "64"]
        words = words if "--quantize" in words else words[:-2]
        assert convert.main(words) == 0
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        path.name for path in (folder / "peft").iterdir()
    }
    with safe_open(folder / "merged" / "model.safetensors", "numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
    assert convert.main([str(folder / "merged"), str(folder / "again_run")]) == 0
    losses = {}
    for name in ("lora", "peft", "again_run", "packed"):
        capsys.readouterr()
        where = ["--data.source", "text", "--data.path", str(folder / "0.txt")]
        assert evaluate.main(["--checkpoint", str(folder / name), *where]) == 0
        losses[name] = float(capsys.readouterr().out.split("loss ")[1].split()[0])
        assert generate.main(["--checkpoint", str(folder / name), *PROMPT]) == 0
    # The merged model has the base as it was trained, in int4; the folder of peft the whole one.
    assert losses["again_run"] == pytest.approx(losses["lora"], rel=2e-3)
    assert losses["packed"] == pytest.approx(losses["lora"], rel=5e-3)
    assert losses["peft"] == pytest.approx(losses["lora"], rel=2e-2)


def test_adapters_go_on_from_a_folder_of_peft(runs, capsys):
    folder, words = runs
    if not (folder / "peft2").exists():
        assert convert.main([str(folder / "lora"), str(folder / "peft2")]) == 0
    out = ["--model.init_from", str(folder / "peft2"), "--out_dir", str(folder / "on")]
    assert train.main([*words, *out, "--train.steps", "1"]) == 0
    other = ["--model.init_from", str(folder / "peft2"), "--out_dir", str(folder / "x")]
    line = error_of(capsys, *words, *other, "--model.lora.rank", "8")
    assert "model.lora.rank=8 differs from 4 of the adapters in" in line
    line = error_of(capsys, *words, *other, "--model.lora.targets", "q_proj")
    assert "model.lora.targets=['q_proj'] differs from ['q_proj', 'k_proj'" in line


def test_a_packed_base_is_trained_as_it_is(runs, capsys):
    folder, words = runs
    packed = folder / "base_int8"
    words_of = ["--quantize", "int8", "--group", "64"]
    assert convert.main([str(folder / "hf"), str(packed), *words_of]) == 0
    words = [*words, "--model.init_from", str(packed)]
    assert train.main([*words, "--out_dir", str(folder / "on_packed"), "--train.steps", "1"]) == 0
    assert "the others are int8, groups of 64" in capsys.readouterr().out
    assert generate.main(["--checkpoint", str(folder / "on_packed"), *PROMPT]) == 0
    line = error_of(capsys, *words, "--out_dir", folder / "x", "--model.quantize", "int4")
    assert "holds packed weights (int8, groups of 64); model.quantize=int4 cannot be packed" in line


def test_a_base_that_changed_is_refused(runs, capsys):
    folder, _ = runs
    moved = folder / "changed"
    shutil.copytree(folder / "hf", moved)
    kept = folder / "hf_kept"
    tensors = load_file(folder / "hf" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
    shutil.move(folder / "hf", kept)
    try:
        line = error_of(capsys, "--resume", "--out_dir", folder / "lora", "--train.steps", "9")
        assert f"{folder / 'hf'} does not exist" in line
        shutil.copytree(kept, folder / "hf")
        save_file(tensors, folder / "hf" / "model.safetensors")
        line = error_of(capsys, "--resume", "--out_dir", folder / "lora", "--train.steps", "9")
        assert f"the base {folder / 'hf'} changed since the adapters were trained" in line
        assert generate.main(["--checkpoint", str(folder / "lora"), *PROMPT]) == 2
        assert "changed since the adapters were trained" in capsys.readouterr().err
        assert convert.main([str(folder / "lora"), str(folder / "y"), "--merge"]) == 2
        assert "changed since the adapters were trained" in capsys.readouterr().err
    finally:
        shutil.rmtree(folder / "hf", ignore_errors=True)
        shutil.move(kept, folder / "hf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.lora.targets", "q_proj,w_proj"], "names 'w_proj', which does not exist; there"),
        (["--model.lora.rank", "33"], "lora.rank=33 exceeds 32, the smaller width of k_proj"),
        (["--train.fp8", "all"], "train.fp8=all is for training all weights"),
        (["--model.lora.dropout", "1"], "model.lora.dropout=1.0: must be less than 1"),
        (["--model.init_from", "null"], "model.lora needs model.init_from"),
        (["--model.lora", "null", "--model.quantize", "int4"], "quantize=int4 needs model.lora"),
    ],
)
def test_settings_that_do_not_fit_are_refused(runs, capsys, options, message):
    folder, words = runs
    if options[0] == "--model.lora":
        at = words.index("--model.lora.rank")
        words = [*words[:at], *words[at + 2 :]]
        options = options[2:]
    assert message in error_of(capsys, *words, "--out_dir", folder / "refused", *options)


def test_targets_are_text_or_a_list():
    assert Lora(targets="q_proj,all").adapts("v_proj")
    assert Lora(targets=["q_proj", "o_proj"]) == Lora(targets="q_proj,o_proj")
    assert tiny("llama3", lora=dict(targets=" q_proj, v_proj")).lora.adapts("v_proj")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (dict(use_dora=True), "use_dora=True is not supported"),
        (dict(peft_type="IA3"), "peft_type='IA3' is not supported; only 'LORA' is"),
        (dict(rank_pattern={"q_proj": 8}), "rank_pattern={'q_proj': 8} is not supported"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (dict(base_model_name_or_path="meta/none"), "of the base meta/none, which is no folder"),
        (dict(r=2), r"of another model than .*_proj.lora_.* that model needs"),
        (dict(r=1000), "lora.rank=1000 exceeds 16"),
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
        (whole | {name: whole[name].astype(np.int32)}, "lora_A.weight is int32, not floating"),
        (whole | {name: np.full_like(whole[name], np.nan)}, "lora_A.weight holds nan"),
        ({key: x for key, x in whole.items() if key != name}, f"it lacks {name}"),
    ):
        save_file(changed, path)
        with pytest.raises(InputError, match=message):
            open_weights(folder)
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(
        InputError, match=r"; adapter_model\.bin is a pickle, which is never opened$"
    ):
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
