import json
import os

import numpy as np
import pytest
import yaml
from training_runs import TINY


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The path of a tiny configuration with a tiny corpus."""
    folder = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "rat", "run"]
    for i in range(8):
        text = " ".join(rng.choice(words, 3000))
        (folder / f"{i}.txt").write_text(text)
    content = json.loads(json.dumps(TINY))
    content["data"].update(path=str(folder / "*.txt"), cache_dir=str(folder / "cache"))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """JAX's compilation cache, which the processes that tests start share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture
def same_environment(monkeypatch):
    """Restores XLA_FLAGS, which train.main sets, after the test."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
