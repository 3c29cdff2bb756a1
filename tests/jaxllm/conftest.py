import os

import jax
import pytest
from training_runs import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The path of a tiny configuration with a tiny corpus."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


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


@pytest.fixture
def no_tf32():
    """A GPU multiplies float32 exactly."""
    with jax.default_matmul_precision("highest"):
        yield
