import os

import jax
import pytest
from training_runs import write_tiny

from jaxllm.train import process, run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The path of a tiny configuration with a tiny corpus."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def _same_flags():
    """Each run in this process sets XLA_FLAGS, part of the cache's keys, as a process's first."""
    before = os.environ.get("XLA_FLAGS", "")

    def set_xla_flags(deterministic):
        os.environ["XLA_FLAGS"] = before
        process.set_xla_flags(deterministic)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "set_xla_flags", set_xla_flags)
        yield


@pytest.fixture(scope="module")
def own_programs(tmp_path_factory):
    """A folder for what killed processes compile: they may leave half of a file in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
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
