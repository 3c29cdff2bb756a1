"""Compares packed documents (data.pack) with separate ones, from the token files to the step."""

import re
from itertools import islice

import data_settings
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow
from evaluation_run import EXPECTED, run_of
from flax import nnx
from tiny_models import tiny

from jaxllm.config import IGNORE, Config, DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from jaxllm.data.loader import documents
from jaxllm.data.shards import ShardWriter
from jaxllm.errors import InputError
from jaxllm.infer import evaluate
from jaxllm.infer.decode import load_model
from jaxllm.models import MODELS
from jaxllm.sharding import make_mesh
from jaxllm.text import Tokenizer, train_tokenizer
from jaxllm.train.step import Trainer
from jaxllm.weights.pretrained import open_weights
from pallas_kernels import dispatch

T, END = 32, 0  # tokens per row; train_tokenizer gives the end-of-text token id 0
SHAPE = dict(vocab_size=250, n_layers=1, d_model=64, max_seq_len=T)
OPTIONS = {"llama3": dict(window=6, softcap=2.0)}


@pytest.fixture
def data(tmp_path):
    """A configuration with shards whose documents have 0 to 24 tokens after an end of text."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 250, rng.integers(0, 25)) for _ in range(60)]
    for name, part in (("train", texts[:40]), ("val", texts[40:])):
        (tmp_path / name).mkdir()
        writer = ShardWriter(tmp_path / name / "0.bin", 300)
        for text in part:
            writer.append(np.append(END, text).astype(np.uint32))
        writer.close()
    train_tokenizer(["a text"], 257, tmp_path / "tokenizer.json")
    assert Tokenizer(tmp_path / "tokenizer.json").separator == END
    return DataConfig(
        source="shards",
        path=str(tmp_path / "train"),
        val_path=str(tmp_path / "val"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        cache_dir=str(tmp_path / "cache"),
        pack="documents",
    )


def opened(data, **changes):
    return data_settings.opened(data.model_copy(update=changes), seq_len=T, seed=3, vocab_size=300)


def batches_of(data, n, start=0, **changes):
    batches = opened(data, **changes).train_batches(4, 0, 1, start)
    found = list(islice(batches, n))
    batches.close()
    return found


def separate_documents(tokens, labels, rows, end=END):
    """The documents of a batch in separate rows, padded to (rows, T)."""
    pieces = []
    for row, targets in zip(tokens, labels, strict=True):
        cuts = [0, *np.flatnonzero(row == end), len(row)]
        pieces += [(row[a:b], targets[a:b]) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    assert len(pieces) <= rows
    separate = np.zeros((rows, T), np.int32), np.full((rows, T), IGNORE, np.int32)
    for i, piece in enumerate(pieces):
        for whole, part in zip(separate, piece, strict=True):
            whole[i, : len(part)] = part
    return map(jnp.asarray, separate)


def test_documents_begin_with_their_separator():
    tokens = np.array([[5, 6, 0, 7, 8, 9, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    packed = documents(tokens, 0)
    np.testing.assert_array_equal(
        packed["segment_ids"], [[0, 0, 1, 1, 1, 1, 2, 3], [1, 1, 1, 1, 1, 1, 1, 1]]
    )
    np.testing.assert_array_equal(
        packed["positions"], [[0, 1, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]]
    )
    assert {x.dtype for x in packed.values()} == {np.dtype(np.int32)}


def test_packing_changes_neither_tokens_nor_labels_nor_their_order(data):
    packed, stream = batches_of(data, 12), batches_of(data, 12, pack="stream")
    for mine, plain in zip(packed, stream, strict=True):
        assert set(plain) == {"tokens", "labels"}
        for name, rows in plain.items():
            np.testing.assert_array_equal(mine[name], rows)
        for name, rows in documents(plain["tokens"], END).items():
            np.testing.assert_array_equal(mine[name], rows)
    # The last token of a document predicts its end.
    assert any((batch["labels"] == END).any() for batch in packed)
    for at, resumed in enumerate(batches_of(data, 5, start=7 * 4)):
        for name, rows in resumed.items():
            np.testing.assert_array_equal(rows, packed[7 + at][name])
    val = next(iter(opened(data).val_batches(2, 0, 1)))
    np.testing.assert_array_equal(val["positions"], documents(val["tokens"], END)["positions"])


def test_documents_without_a_known_end_are_refused(data, tmp_path):
    with pytest.raises(InputError, match=r"data\.pack=documents needs the token between documen"):
        opened(data, tokenizer=None)
    writer = ShardWriter(tmp_path / "endless.bin", 300)
    writer.append(np.full(200, 7, np.uint32))
    writer.close()
    endless = dict(path=str(tmp_path / "endless.bin"))
    with pytest.raises(
        InputError, match=r"finds no end-of-text token \(id 0 of .* 200 tokens; set"
    ):
        opened(data, **endless)
    assert opened(data, **endless, pack="stream").separator is None


def trainer_of(name, data, **train):
    config = Config(
        model=tiny(name, **SHAPE, **OPTIONS.get(name, {})),
        data=data,
        train=TrainConfig(**dict(steps=2, batch_size=4, seq_len=T) | train),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=0.0, b1=0.5),
    )
    return Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))


@pytest.mark.parametrize("name", [slow(x) if x in ("llama3", "vlstm") else x for x in MODELS])
def test_a_packed_step_equals_a_step_on_separate_documents(name, data):
    packed = trainer_of(name, data, grad_accum=2)
    batch = batches_of(data, 1)[0]
    assert set(packed.abstract_batch()) == set(batch)
    params = packed.init().params
    # Large weights and open gates make tokens depend on everything that they see.
    params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, params)
    if name == "vlstm":
        for block in params["blocks"].values():
            block["vlstm"]["i"]["bias"][...] = jnp.zeros(2)

    tokens, labels = separate_documents(batch["tokens"], batch["labels"], rows=24)
    assert (labels != IGNORE).any(1).sum() > 8  # documents
    count = (labels != IGNORE).sum()
    assert count == batch["labels"].size

    @jax.jit
    @jax.value_and_grad
    def mean_loss(params):
        return nnx.merge(packed.graph, params).loss(tokens, labels, scale=1 / float(count))

    with jax.default_matmul_precision("highest"):  # a GPU would use TF32
        loss, grads = mean_loss(params)
        step = packed.trace_train_step().lower().compile()
        state, metrics = step(packed.init(params), packed.put_batch(batch))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    moments = jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))
    expected = jax.tree.leaves(grads)
    largest = max(float(jnp.abs(g).max()) for g in expected)
    for g, moment in zip(expected, moments, strict=True):
        allowed = 1e-5 * np.abs(g).max() + np.finfo(np.float32).eps * largest
        np.testing.assert_allclose(moment / 0.5, g, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", [slow("gpt2"), "llama3", slow("vlstm")])
def test_a_packed_step_runs_on_the_kernels(name, data):
    """The kernels must support segments and positions: mosaic raises where there is no kernel."""
    config = trainer_of(name, data).config
    mosaic = dict(kernels="mosaic", compute_dtype="bfloat16", residual_dtype="bfloat16")
    model = config.model.model_copy(update=mosaic | dict(d_model=128))
    dispatch.reset()
    Trainer(config.model_copy(update=dict(model=model)), make_mesh(config.mesh)).trace_train_step()
    mixing = "vlstm" if name == "vlstm" else "attention"
    ran = {decision.op: decision.runs for decision in dispatch.decisions()}
    kernels = ("hopper", "general")
    assert ran[mixing] in kernels
    assert ran["encoder"] in kernels


def test_without_packing_a_batch_has_only_tokens_and_labels(data):
    plain = trainer_of("gpt2", data.model_copy(update=dict(pack="stream")))
    assert set(plain.abstract_batch()) == {"tokens", "labels"}


def test_evaluation_packs_like_the_run(tmp_path, capsys):
    run = run_of(next(iter(EXPECTED)), tmp_path / "made")
    config = run / "config.yaml"
    assert "pack: stream" in config.read_text()
    config.write_text(config.read_text().replace("pack: stream", "pack: documents"))
    (tmp_path / "texts").mkdir()
    for i in range(5):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the cat {i} sat on {'the mat ' * i}\n" * 2)
    where = f"--data.source text --data.path {tmp_path / 'texts'} --data.cache_dir {tmp_path}"
    with jax.default_matmul_precision("highest"):
        assert evaluate.main(f"--checkpoint {run} {where} --batch_size 2".split()) == 0
        said = capsys.readouterr().out

        tokenizer = Tokenizer(run / "tokenizer.json")
        again = DataConfig(
            source="text",
            path=str(tmp_path / "texts"),
            val_path=str(tmp_path / "texts"),
            tokenizer=str(tokenizer.path),
            cache_dir=str(tmp_path),
        )
        val = data_settings.opened(again, seq_len=T, training=False).val
        stream = val.read(0, len(val))
        assert (stream == tokenizer.separator).sum() == 5
        rows = [stream[i : i + T + 1] for i in range(0, len(stream) - 1, T)]
        tokens, labels = separate_documents(
            [row[:-1] for row in rows], [row[1:] for row in rows], 24, tokenizer.separator
        )
        graph, params = load_model(open_weights(run), make_mesh(MeshConfig(), jax.devices()[:1]))
        loss = jax.jit(lambda params: nnx.merge(graph, params).loss(tokens, labels))(params)
    loss, count = float(loss) / (len(stream) - 1), f"{len(stream) - 1:,} tokens"
    assert count in said
    assert float(re.search(r"loss ([\d.]+)", said)[1]) == pytest.approx(loss, abs=6e-5)
