"""Compares predictions for GPUs that this machine lacks with counts by hand."""

import re
from pathlib import Path

import jax
import pytest
from cases import slow
from training_runs import error_of

import train
from jaxllm.config import Config, Llama3Config, MeshConfig, OptimizerConfig, TrainConfig, load
from jaxllm.sharding import abstract_mesh
from jaxllm.train import estimate, metrics, predict
from jaxllm.train.step import Trainer

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("same_environment")
LAYERS, C, F, V, T = 3, 256, 768, 1024, 128
QKV = C * (C + 2 * 128)
BLOCK = QKV + C * C + 3 * C * F
MODEL = Llama3Config(
    vocab_size=V, n_layers=LAYERS, n_heads=2, n_kv_heads=1, d_model=C, d_ff=F, max_seq_len=T
)


def trainer_of(count, accum=1, batch=64, **mesh):
    config = Config(
        model=MODEL,
        train=TrainConfig(steps=4, batch_size=batch, seq_len=T, grad_accum=accum),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=MeshConfig(**mesh),
    )
    return Trainer(config, abstract_mesh(config.mesh, count))


def test_the_state_is_split_by_fsdp_and_by_a_split_optimizer():
    whole = estimate.state_memory(trainer_of(1))
    fsdp, zero, plain = (
        estimate.state_memory(trainer_of(8, **mesh))
        for mesh in (dict(fsdp=8), dict(shard_optimizer=True), {})
    )
    assert plain == whole
    for part in ("parameters", "moments", "gradients"):
        assert fsdp[part] == pytest.approx(whole[part] / 8, rel=0.02)  # norms are not split
        assert zero[part] == pytest.approx(whole[part] / 8, rel=1e-3)
    assert zero["bf16 copies"] == whole["bf16 copies"] == 2 * LAYERS * BLOCK
    assert zero["gathered"] == 4 * (2 * V * C + (2 * LAYERS + 1) * C)
    assert whole["gathered"] == fsdp["gathered"] == 0
    # Nothing is split over one replica.
    assert estimate.state_memory(trainer_of(8, fsdp=8, shard_optimizer=True)) == fsdp


def test_traffic_follows_the_ring_formulas():
    weights = 2 * LAYERS * BLOCK + 4 * (2 * V * C + (2 * LAYERS + 1) * C)
    of = lambda *a, **b: {t.axis: t for t in predict.traffic(trainer_of(*a, **b), "H200")}
    assert of(1) == {}
    (data,) = of(4).values()
    assert data.size == 2 * 3 / 4 * weights
    assert (data.bandwidth, data.way) == (0.8 * 450e9, "NVLink")
    (zero,) = of(4, accum=4, shard_optimizer=True).values()
    assert zero.size == 5 * 3 / 4 * weights  # four times gradients, once the weights
    both = of(32, accum=2, fsdp=8)
    norms = 4 * (2 * LAYERS + 1) * C  # which fsdp does not split
    moved = weights - (4 + 2) * V * C  # no embedding, and the head in bf16
    embedded = 2 * 2 * 64 * T * C  # in bf16, forward and backward
    assert both["fsdp"].size == pytest.approx(7 / 8 * (2 * 3 * moved + embedded / 32), rel=0.02)
    assert both["data"].size == pytest.approx(
        2 * 2 * 3 / 4 * ((weights - norms) / 8 + norms), rel=1e-6
    )
    assert both["data"].bandwidth == 0.8 * 50e9  # each GPU of a host is in another group
    assert (both["data"].way, both["fsdp"].way) == ("the network", "NVLink")
    wide = of(64, fsdp=64)["fsdp"]
    assert (wide.bandwidth, wide.way) == (0.8 * 400e9, "the network")  # all 8 adapters of a host
    tensor = of(2, tensor=2)["tensor"]
    assert tensor.size == 5 * LAYERS * 64 * T * C * 2
    assert tensor.seconds == tensor.size / tensor.bandwidth
    long = of(4, data=1, fsdp=2, context=2)
    assert long["fsdp"].size == pytest.approx(3 / 4 * (3 * moved + embedded / 4), rel=0.02)
    exchanged = C + 2 * 128 + C  # queries, keys, values; outputs
    assert long["context"].size == 2 * LAYERS / 2 * 2 * (64 * T / 4) * exchanged


def test_recomputed_matmuls_are_counted():
    total = predict.flops_per_token(MODEL, T)
    again = {"none": 0, "dots": 0, "mlp": QKV + C * C}
    again |= {"attention": BLOCK - C * F, "block": BLOCK - C * F}  # the last product is not needed
    for remat, weights in again.items():
        model = MODEL.model_copy(update={"remat": remat})
        mixing = LAYERS * 2 * T * C if remat == "block" else 0
        expected = (2 * LAYERS * weights + mixing) / total
        assert predict.recomputed(model, T) == pytest.approx(expected, rel=1e-9)


def test_a_prediction_needs_neither_data_nor_gpus(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # a call would fail
    command = "--config llama3_124m --model.n_layers 1 --train.batch_size 64 --train.grad_accum 1"
    options = "--mesh.shard_optimizer true --dry_run 64xH200"
    assert train.main(f"{command} {options}".split()) == 0
    out = capsys.readouterr().out
    assert "predict  64 x H200, 8 in a host" in out
    assert "not measured" in out
    assert "traffic  data: " in out
    rows = {line.split()[0]: line.split() for line in out.splitlines()[-5:]}
    assert list(rows) == ["none", "dots", "mlp", "attention", "block"]
    memory = [float(row[1]) for row in rows.values()]
    again = [float(row[4].rstrip("%")) for row in rows.values()]
    assert memory == sorted(memory, reverse=True)
    assert again == sorted(again)
    for row in rows.values():
        assert row[3] == "fits"
        assert 0 < float(row[5]) < float(row[7])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dry_run 64xB300", "--dry_run 64xB300 is not COUNTxKIND with a KIND of H100, H200"),
        ("--dry_run true", "--dry_run true is not COUNTxKIND"),
        ("--dry_run 3xH100 --mesh.fsdp 2", "is not 3, the number of devices"),
        ("--dry_run 3xH100", "is not a multiple of 3 devices"),
        ("--dry_run 8xH100 --model.compute_dtype float32", "predicts runs on our kernels only"),
        ("--dry_run 8xA100 --train.fp8 all", "train.fp8=all cannot run on A100: it needs sm_89"),
        (
            "--dry_run 8xL40S --model.kernels mosaic",
            "=mosaic cannot be predicted for L40S; use aut",
        ),
        (
            "--dry_run 8xB200 --model.kernels mosaic",
            "=mosaic cannot be predicted for B200; use aut",
        ),
        ("--dry_run 8xH100 --model.kernels xla", "kernels=xla cannot be predicted for H100; use a"),
    ],
)
def test_predictions_that_cannot_be_made_are_refused(options, message, capsys):
    assert message in error_of(capsys, "--config", "llama3_124m", *options.split())


ONE_EACH = "H100", "RTX4090"  # on the Hopper forms and on the general ones


@pytest.mark.parametrize("kind", [k if k in ONE_EACH else slow(k) for k in predict.GPUS])
def test_columns_never_touch_and_tiny_models_are_not_absurd(kind, capsys):
    words = "--config gpt2_small --train.batch_size 100000 --train.seq_len 16 --model.n_layers 2"
    for more, most in (("", 1e9), (" --train.batch_size 1", 2e5)):
        assert train.main(f"{words}{more} --dry_run 1x{kind}".split()) == 0
        rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
        rows = rows[[row[0] for row in rows].index("none") :]
        assert [len(row) for row in rows] == [7] * 5, rows
        assert all(float(row[6].split(" to ")[1].replace(",", "")) < most for row in rows)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GeForce RTX 4090", "NVIDIA B200", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
)
def test_a_device_is_known_by_its_name(name):
    kind = next(kind for kind in predict.GPUS if kind in name.replace(" ", ""))
    assert predict.PEAK_FLOPS[kind] == metrics.peak_flops(name)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA RTX A1000 6GB Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_slower_relative_of_a_device_does_not_have_its_peak(name, peak):
    assert metrics.peak_flops(name) == peak


def test_the_kinds_have_a_peak():
    assert set(predict.GPUS) <= set(predict.PEAK_FLOPS)


@pytest.mark.parametrize("remat", ["none", *map(slow, ("dots", "mlp", "attention", "block"))])
def test_the_page_has_these_figures(remat):
    page = (REPO / "docs/several-gpus.md").read_text()
    row = re.search(rf"^\| `{remat}` \| ([\d.]+) / ([\d.]+) \| ([\d.]+) / ([\d.]+) \|$", page, re.M)
    assert row, page
    cases = ("llama3_1b", 1, 4), ("llama3_8b", 8, 8)
    found = []
    for name, count, rows in cases:
        changes = {"train.batch_size": str(rows), "train.grad_accum": "1", "mesh.fsdp": str(count)}
        config = load(f"{REPO}/configs/{name}.yaml", changes)
        trainer = Trainer(config, abstract_mesh(config.mesh, count))
        kept = estimate.activation_memory(trainer, config.with_model(kernels="mosaic", remat=remat))
        state = sum(estimate.state_memory(trainer).values())
        found += [sum(kept.values()) / 2**30, (state + sum(kept.values())) / 2**30]
    assert found == pytest.approx([float(x) for x in row.groups()], abs=0.051), found
