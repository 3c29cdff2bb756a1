"""Runs that divide sequences over devices (mesh.context); test_sharding.py has the gradients."""

import os
import subprocess

import pytest
from eight_devices import MODELS, SEQ
from training_runs import REPO, command

import train
from jaxllm.config import Config, InputError, OptimizerConfig, TrainConfig
from jaxllm.sharding import abstract_mesh, check
from jaxllm.train import estimate
from jaxllm.train.metrics import read_metrics
from jaxllm.train.step import Trainer


def memory(seq_len, **mesh):
    """The estimated bytes by part of a Llama with its kernels, one sequence per step."""
    config = Config(
        model=MODELS["llama3"](kernels="mosaic", remat="block", qk_norm=False),
        train=TrainConfig(steps=1, batch_size=1, seq_len=seq_len),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=mesh,
    )
    trainer = Trainer(config, abstract_mesh(config.mesh, config.mesh.context))
    return estimate.state_memory(trainer) | estimate.activation_memory(trainer)


def test_each_device_needs_the_memory_of_its_part():
    half, two = memory(SEQ // 2), memory(SEQ, context=2)
    assert two["activations"] == half["activations"]
    assert two["logits"] == half["logits"]
    for part in ("parameters", "moments", "gradients", "bf16 copies"):  # vectors are not split
        assert half[part] / 2 <= two[part] < 0.52 * half[part]


SHORT = """--model.n_layers 1 --model.n_kv_heads 2 --data.pack documents
    --model.compute_dtype float32 --model.residual_dtype float32 --optimizer.schedule constant
    --train.eval_every 2 --sample.every 2 --sample.temperature 0
    --train.checkpoint_every 2""".split()


def logged(out_dir):
    """({(step, "loss" or "val_loss"): value}, the samples)."""
    rows = read_metrics(out_dir / "metrics.jsonl")
    values = {(r["step"], key): r[key] for r in rows for key in ("loss", "val_loss") if key in r}
    return values, [r["sample"] for r in rows if "sample" in r]


@pytest.mark.slow
@pytest.mark.usefixtures("same_environment")
def test_two_processes_share_sequences_sample_save_and_resume_on_other_devices(tiny, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    words = "--processes 2 --mesh.context 2 --train.steps 2".split()
    both = subprocess.Popen(
        command(tiny, two, *SHORT, *words),
        cwd=REPO,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    whole = ["--config", str(tiny), "--out_dir", str(one), *SHORT, "--train.steps", "3"]
    assert train.main(whole) == 0
    output = both.communicate()[0]
    assert both.returncode == 0, output
    assert "mesh {'data': 1, 'fsdp': 1, 'context': 2, 'tensor': 1}" in output
    more = "--mesh.context 1 --train.steps 3".split()
    assert train.main(["--resume", "--out_dir", str(two), *more]) == 0
    (want, texts), (got, other_texts) = logged(one), logged(two)
    assert got.keys() == want.keys()
    for key in want:
        assert got[key] == pytest.approx(want[key], rel=1e-4), key
    assert len(texts) == 2
    assert other_texts == texts


class Mesh:
    shape = {"data": 1, "fsdp": 2, "context": 4, "tensor": 2}


def llama(seq_len=8, **more):
    model = dict(vocab_size=8, n_layers=1, n_heads=8, n_kv_heads=8, d_model=64, d_ff=64)
    return Config(
        model=model | dict(type="llama3", max_seq_len=16) | more,
        train=TrainConfig(steps=1, batch_size=2, seq_len=seq_len),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


def test_a_model_that_does_not_divide_is_refused_with_the_fix():
    check(llama(), Mesh)
    with pytest.raises(InputError) as error:
        check(llama(n_kv_heads=4), Mesh)
    assert str(error.value) == (
        "mesh.tensor=2 x mesh.context=4 does not divide model.n_kv_heads=4; lower it to a divisor"
        " and use mesh.fsdp for the other devices"
    )
    with pytest.raises(InputError, match=r"mesh.context=4 does not divide model.d_model=68; low"):
        check(llama(d_model=68, d_head=8), Mesh)


def test_a_sequence_that_does_not_divide_is_refused_with_the_fix():
    with pytest.raises(InputError, match=r"train.seq_len=10 is not a multiple of mesh.context=4;"):
        check(llama(seq_len=10), Mesh)
