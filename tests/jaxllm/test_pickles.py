"""Reading weights, checkpoints, shards and tokenizers never unpickles anything."""

import contextlib
import gc
import json
import os
import pickle
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.data.shards import check_shard
from jaxllm.data.sources import Source
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.weights.pretrained import open_weights

unpickled = []  # names that a pickle looked up, as every harmful pickle must


def watch(event, arguments):
    if event == "pickle.find_class":
        unpickled.append(arguments)


sys.addaudithook(watch)


class Trap:
    """Creates a folder when unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def trap(tmp_path):
    """The bytes of a pickle; asserts afterwards that nothing was unpickled."""
    marker = tmp_path / "executed"
    unpickled.clear()  # of other files' tests in this process
    content = pickle.dumps(Trap(marker))
    pickle.loads(content)  # the trap works and is detected
    assert marker.exists()
    assert unpickled.pop() == ("posix", "mkdir")
    marker.rmdir()
    yield content
    assert not marker.exists()
    assert unpickled == []


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.safetensors"]
)
def test_weights(trap, tmp_path, name):
    (tmp_path / name).write_bytes(trap)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InputError):
        open_weights(tmp_path)


def test_data_and_tokenizers(trap, tmp_path):
    objects = np.array([pickle.loads, None], dtype=object)
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    (tmp_path / "pickle").write_bytes(trap)
    for path in (tmp_path / "objects.npy", tmp_path / "pickle"):
        with pytest.raises(InputError):
            check_shard(path, tmp_path / "cache", 100)
        with pytest.raises(InputError):
            Tokenizer(path)
        for kind in ("text", "jsonl", "parquet"):
            with pytest.raises(InputError):
                list(Source(kind, [(path.name, path)], "text").pieces())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")
def test_checkpoints(trap, tmp_path):
    state = {"a": jnp.arange(300.0), "b": jnp.int32(1)}
    checkpoints = Checkpoints(tmp_path / "x", keep=1)
    checkpoints.save(1, state, {"samples": 8}, 2.0)
    checkpoints.close()
    restored = Checkpoints(tmp_path / "x", keep=1).restore(1, state)
    np.testing.assert_array_equal(restored["a"], state["a"])
    files = sorted(p for p in (tmp_path / "x" / "1").rglob("*") if p.is_file())
    assert len(files) > 5
    for path in files:
        kept = path.read_bytes()
        path.write_bytes(trap)
        with contextlib.suppress(InputError):  # restoring does not need all files
            Checkpoints(tmp_path / "x", keep=1).restore(1, state)
        path.write_bytes(kept)
    gc.collect()  # Orbax's leftovers warn now and not in another test
