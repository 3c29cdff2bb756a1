import pytest

import pallas_kernels
from jaxllm import config
from jaxllm.config import CONFIG_DIR, InputError, command_line
from jaxllm.config.describe import help_text
from jaxllm.config.loading import keys
from jaxllm.config.model import MODEL_CONFIGS, RopeScaling

TYPES = ", ".join(MODEL_CONFIGS)  # in the order of the union

SMALL = "model: {type: gpt2, vocab_size: 9, n_layers: 1, n_heads: 1, d_model: 8, max_seq_len: 8}\n"
ALL = sorted(p.stem for p in CONFIG_DIR.glob("*.yaml"))


@pytest.mark.parametrize("name", ALL)
def test_every_configuration_survives_a_round_trip_through_yaml(name, tmp_path):
    loaded = config.load(name)
    copy = tmp_path / "copy.yaml"
    copy.write_text(loaded.to_yaml())
    assert config.load(str(copy)) == loaded


def test_a_name_works_with_and_without_yaml():
    assert config.load("llama3_small") == config.load("llama3_small.yaml")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("train.steps", "7", 7),
        ("sample.prompt", "def f(x):", "def f(x):"),
        ("sample.prompt", "null", None),
        ("data.shuffle", "false", False),
        ("data.val_path", "null", None),
        ("model.rope_scaling.factor", "32", 32.0),
        # Python's own values: "'int' object has no attribute 'lower'"
        ("optimizer.learning_rate", 3e-4, 3e-4),
        ("train.steps", 7, 7),
        ("data.val_path", None, None),
        ("data.shuffle", False, False),
    ],
)
def test_overrides_are_parsed_by_the_type_of_their_key(key, text, value):
    got = config.load("llama3_small", {key: text})
    for part in key.split("."):
        got = getattr(got, part)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.n_head": "3"}, "unknown key model.n_head; did you mean model.n_heads?"),
        ({"modle.n_heads": "3"}, "unknown key modle.n_heads; did you mean model.n_heads?"),
        ({"optimizer.lr": "3"}, "optimizer.lr; did you mean optimizer.learning_rate?"),
        ({"train.warmup_steps": "3"}, "did you mean optimizer.warmup_steps?"),
        ({"OPTIMIZER.EPS": "3"}, "did you mean optimizer.eps?"),
        ({"data.prefetch": "2147483647"}, "data.prefetch=2147483647: must be at most 1024"),
        ({"train.steps": "many"}, "train.steps='many': must be a whole number"),
        ({"train.steps": "0"}, "train.steps=0: must be at least 1"),
        ({"train.steps": "1.5"}, "train.steps='1.5': must be a whole number"),
        ({"optimizer.learning_rate": "nan"}, "learning_rate=nan: must be a finite number"),
        ({"optimizer.learning_rate": "-1"}, "learning_rate=-1.0: must be at least 1e-30"),
        ({"model.kernels": "cuda"}, "model.kernels='cuda': must be 'auto', 'mosaic' or"),
        ({"model.n_kv_heads": "3"}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ({"model.n_heads": "3"}, "d_model=256 is not a multiple of n_heads=3"),
        ({"train.seq_len": "512"}, "train.seq_len=512 exceeds model.max_seq_len=256"),
        ({"train.grad_accum": "3"}, "batch_size=8 is not a multiple of grad_accum=3"),
        ({"model.type": "bert"}, f"model.type='bert' is not one of {TYPES}"),
        ({"data.source": "text"}, "source=text needs data.path"),
        ({"data.shuffle": "maybe"}, "data.shuffle='maybe': must be true or false"),
        (
            {"model.type": "gpt2"},
            "model.n_kv_heads in llama3_small.yaml is for model.type",
        ),
        ({"train.steps": str(2**31)}, "train.steps=2147483648: must be less than 2147483648"),
        # float32 rounds it to 1, and the moments' bias correction 0 / 0 made parameters NaN.
        ({"optimizer.b1": "0.99999999"}, "optimizer.b1=0.99999999: must be at most 0.999999"),
        ({"optimizer.b2": "1"}, "optimizer.b2=1.0: must be at most 0.999999"),
        # float32 rounds it to 0, and 0 / 0 made every parameter without a gradient NaN.
        ({"optimizer.eps": "1e-50"}, "optimizer.eps=1e-50: must be at least 1e-30"),
        ({"model.softcap": "1e38"}, "model.softcap='1e38': must be at most 1e+30"),
        # The op refused it with a traceback.
        ({"model.rope_theta": "9e-10"}, "model.rope_theta=9e-10: must be at least 1e-09"),
        ({"train.seed": "4294967296"}, "train.seed=4294967296: must be less than 4294967296"),
        ({"sample.prompt": "a\ud800"}, "sample.prompt='a\\ud800': 'utf-8' codec can't encode"),
        ({"train.steps": "1_0"}, "train.steps='1_0': must be a number without _"),
        ({"optimizer.eps": "1_0.5"}, "optimizer.eps='1_0.5': must be a number without _"),
        ({"train.steps": "010"}, "train.steps='010': must be a number without _ or leading zeros"),
        ({"optimizer.eps": "00.5"}, "optimizer.eps='00.5': must be a number without _ or lead"),
        ({"train.batch_size": "9" * 23}, "must be less than 2147483648"),
        (
            {"train.batch_size": "2000000000"},
            "is 256000000000 tokens per step; the limit is 2147483647",
        ),
        ({"model.d_model": "2000000000"}, "model.d_model=2000000000: must be at most 1048576"),
        ({"model.vocab_size": "1000000000000"}, "model.vocab_size=1000000000000: must be at most"),
        ({"model.n_layers": "1000000000"}, "model.n_layers=1000000000: must be at most 4096"),
        (
            {"optimizer.weight_decay": "1e300"},
            "optimizer.weight_decay=1e+300: must be at most 1e+30",
        ),
        ({"optimizer.clip_norm": "1e300"}, "optimizer.clip_norm=1e+300: must be at most 1e+30"),
        ({"train.skip_spikes": "1e300"}, "train.skip_spikes=1e+300: must be at most 1e+30"),
        ({"model.rope_scaling.factor": "1e39"}, "scaling.factor=1e+39: must be at most 1e+30"),
        (
            {"model.rope_scaling.original_max_position_embeddings": str(2**31)},
            "original_max_position_embeddings=2147483648: must be less than 2147483648",
        ),
        # An unset variable of the shell: the cache would go to the current folder.
        ({"data.cache_dir": ""}, "data.cache_dir='': must not be empty"),
        ({"model.init_from": ""}, "model.init_from='': must not be empty"),
        ({"data.tokenizer": ""}, "data.tokenizer='': must not be empty"),
        ({"train.steps": 7.5}, "train.steps='7.5': must be a whole number"),
        ({"profile.steps": "5"}, "steps='5' is not FIRST:END"),
        ({"profile.steps": "5:502"}, "profile.steps=5:502 ends after train.steps=420; its end is"),
    ],
)
def test_bad_values_give_one_line_with_key_and_value(overrides, message):
    with pytest.raises(InputError) as error:
        config.load("llama3_small", overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [1, 2]", "model is [1, 2], not a section"),
        ("- a", "holds list, not sections"),
        ("", "holds NoneType, not sections"),
        ("model: {type: gpt2", "cannot be read as YAML"),
        ("model: {type: gpt2, type: gpt2}", "key type is given twice"),
        ("model: {type: gpt2, layers: 3}", "unknown key model.layers in bad.yaml; did you mean"),
        ("model: {type: gpt2}", "model.vocab_size is missing in /"),
        ("model: {type: gpt2}\ntrains: {steps: 3}", "unknown key trains"),
        ("model: {type: gpt2}\ntrains: {}", "unknown key trains in bad.yaml; did you mean train"),
        ("model: {type: [llama3]}", f"model.type=['llama3'] is not one of {TYPES}"),
        (f"model: {'[' * 3000}", "cannot be read as YAML: it is nested too deep"),
        ("model: &m {type: gpt2, d: *m}", "cannot be read as YAML: found unconstructable recursiv"),
        (f"model: {{type: gpt2, n_layers: {'9' * 5000}}}", "cannot be read as YAML: Exceeds the"),
        (
            SMALL + "train: {steps: 3, batch_size: 1, seq_len: 8}\noptimizer: {learning_rate: 1}"
            "\ntrain.steps: 4",
            "train.steps=4: is no key; in YAML a.b is the key b of",
        ),
        (SMALL + "train: {<<: [{steps: 9}, {steps: 8}]}", "<< takes one anchor, not a list"),
        (SMALL + "train: {steps: 1_0}", "train.steps='1_0': must be a whole number"),
        (SMALL + "train: {steps: 010}", "train.steps='010': must be a whole number"),
        (SMALL + "train: {steps: 1:30}", "train.steps='1:30': must be a whole number"),
    ],
)
def test_bad_files_give_one_line(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        config.load(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_anchors_are_merged_and_what_stands_beside_them_counts(tmp_path):
    path, rate = (
        tmp_path / "a.yaml",
        "optimizer: {learning_rate: &rate 1e-4, final_fraction: *rate}",
    )
    given = SMALL + rate + "\ntrain: {<<: {batch_size: 1, seq_len: 8, steps: 3}, steps: 9"
    path.write_text(given + "}")
    loaded = config.load(str(path))
    assert (loaded.train.batch_size, loaded.train.steps) == (1, 9)
    assert loaded.optimizer.final_fraction == 1e-4
    path.write_text(given + ", steps: 4}")
    with pytest.raises(InputError, match="key steps is given twice"):
        config.load(str(path))


@pytest.mark.parametrize("text", ["1e5", "1_0", "010", "12", "1.5", "no", ".inf", "1:30", "~"])
def test_text_survives_yaml_as_text(text, tmp_path):
    loaded = config.load("llama3_small", {"sample.prompt": text})
    (tmp_path / "copy.yaml").write_text(loaded.to_yaml())
    assert config.load(str(tmp_path / "copy.yaml")).sample.prompt == text


def test_the_error_for_a_missing_file_names_the_nearest():
    with pytest.raises(InputError, match=r"no configuration llama3_smal; did you mean llama3_s"):
        config.load("llama3_smal")


def test_help_has_every_key_of_every_model():
    text = help_text()
    for model_type in config.MODEL_CONFIGS:
        for key, field in keys(model_type).items():
            assert f"--{key} " in text
            assert field.description, f"{key} has no description"


def test_rope_scaling_matches_the_op():
    assert RopeScaling().model_dump() == pallas_kernels.RopeScaling()._asdict()


def test_full_size_models_have_the_published_shapes():
    llama = config.load("llama3_8b").model
    assert (llama.n_layers, llama.d_model, llama.n_heads, llama.n_kv_heads) == (32, 4096, 32, 8)
    assert (llama.d_ff, llama.vocab_size, llama.tie_embeddings) == (14336, 128256, False)
    assert config.load("llama3_1b").model.rope_scaling.factor == 32
    assert config.load("gpt2_124m").model.padded_vocab_size == 50304
    xlstm = config.load("xlstm_7b").model
    assert (xlstm.qk_dim, xlstm.v_dim, xlstm.ff_width) == (256, 512, 10944)
    small = config.load("vlstm_124m").model
    assert (small.qk_dim, small.v_dim) == (64, 128)


def test_a_second_run_of_the_same_second_gets_a_name_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line.time, "strftime", lambda form: "20260101-000000")
    names = []
    for _ in range(3):
        names.append(command_line.read(["--config", "gpt2_small"]).out_dir)
        names[-1].mkdir(parents=True)
    first = "gpt2_small-20260101-000000"
    assert [name.name for name in names] == [first, f"{first}-2", f"{first}-3"]
