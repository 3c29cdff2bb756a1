"""What a process that calls pallas_kernels.torch imports, and which plans it finds on disk."""

import inspect
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch_plans import make_anew  # noqa: E402

import pallas_kernels as jk  # noqa: E402
import pallas_kernels.torch as pk  # noqa: E402
from pallas_kernels.torch import ops, trace  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def in_a_process(code, **environment):
    """What Python prints, without the settings of these tests."""
    own = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "PYTHONPATH")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=own | environment, capture_output=True, text=True,
        cwd=ROOT,
    )  # fmt: skip
    assert not ran.returncode, ran.stderr
    return ran.stdout.split()


# A call in a process: fake tensors, as there is no GPU.
CALL = """
import sys, torch, pallas_kernels.torch as pk
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x = torch.empty(2, 65, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.empty(256, device="cuda", requires_grad=True)
    y = pk.rms_norm(x, w)
print(y.shape[1], "jax" in sys.modules, "jaxlib" in sys.modules)
"""


def test_a_known_call_imports_no_jax(tmp_path):
    cache = {"PALLAS_KERNELS_CACHE": str(tmp_path)}
    code = CALL + "import jax\nprint(jax.config.jax_platforms)"
    assert in_a_process(code, **cache)[:2] == ["65", "True"]
    assert in_a_process(code, **cache)[-1] == "None"  # nothing of ours has started JAX
    (kept,) = tmp_path.iterdir()
    before = kept.read_bytes()
    assert in_a_process(CALL, **cache) == ["65", "False", "False"]
    assert [x.read_bytes() for x in tmp_path.iterdir()] == [before]
    assert in_a_process(CALL, **cache, JAXLLM_KERNELS="general")[1] == "True"


def test_the_import_takes_neither_jax_nor_the_compiler():
    code = "import sys, pallas_kernels.torch; print(*({'jax', 'torch._dynamo'} & {*sys.modules}))"
    assert in_a_process(code) == []


@pytest.mark.parametrize("first", ["torch._dynamo", "pallas_kernels.torch"])
def test_torch_compile_knows_the_ops(first):
    code = f"import {first}, torch._dynamo as d, pallas_kernels.torch as pk\n"
    code += "print(*map(d.trace_rules.is_callable_allowed, (pk.rms_norm, pk.vlstm, pk.patch)))"
    assert in_a_process(code) == ["True", "True", "False"]


def test_an_op_has_the_signature_of_ours():
    assert inspect.signature(pk.rope) == inspect.signature(jk.rope)


def test_jax_takes_no_gpu():
    code = "import pallas_kernels.torch.trace, jax; print(jax.config.jax_platforms)"
    assert in_a_process(code) == ["cpu"]


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A function that makes a call as in a new process, and returns whether it was traced."""
    make_anew(monkeypatch)
    traced = []
    of = trace.trace
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(trace, "trace", lambda *given: traced.append(0) or of(*given))

    def call(op=pk.rms_norm, like=torch.bfloat16, **options):
        from torch._subclasses.fake_tensor import FakeTensorMode

        traced.clear()
        ops._known.clear()
        ops._versions.cache_clear()
        with FakeTensorMode():
            x = torch.empty(4, 256, dtype=like)
            y = op(x, torch.empty(256), **options)
        assert y.shape == x.shape
        return bool(traced)

    assert call()
    assert not call()
    return call


def test_another_call_is_another_plan(kept):
    assert kept(eps=1e-6)
    assert kept(like=torch.float16)
    assert kept(pk.layer_norm)
    assert not kept(eps=1e-6)


@pytest.mark.parametrize("package", ["jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"])
def test_another_jax_makes_plans_anew(package, kept, monkeypatch):
    of = ops.distributions
    other = [types.SimpleNamespace(version="0.99")]
    monkeypatch.setattr(
        ops, "distributions", lambda name: other if name == package else of(name=name)
    )
    assert kept()
    assert not kept()


def test_another_pytorch_makes_plans_anew(kept, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert kept()
    assert not kept()


def test_another_source_makes_plans_anew(kept, monkeypatch, tmp_path):
    copy = tmp_path / "copy" / "pallas_kernels"
    shutil.copytree(ROOT / "pallas_kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jk, "__file__", str(copy / "__init__.py"))
    assert not kept()
    for path in (copy / "rotary.py", copy / "norms" / "kernels.py", copy / "torch" / "glue.py"):
        path.write_text(path.read_text() + "# another comment\n")
        assert kept()
        assert not kept()


@pytest.mark.parametrize("harm", ["cut", "empty", "flip", "text"])
def test_a_damaged_plan_is_made_anew(harm, kept, tmp_path, caplog):
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    path.write_bytes({"cut": good[:-9], "empty": b"", "flip": flipped, "text": b"x" * 99}[harm])
    assert kept()
    (said,) = [r.getMessage() for r in caplog.records]
    assert said == f"{path} is damaged: rms_norm is traced again"
    assert not kept()
