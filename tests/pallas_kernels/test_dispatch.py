import ctypes
import logging
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import Packed, attention, dispatch, encoder, gelu, rope
from pallas_kernels.dispatch import Decision, Form

_compiler = dispatch.compiler  # tests replace it


@pytest.fixture(autouse=True)
def fresh():
    dispatch.reset()
    _compiler.cache_clear()
    dispatch._warn_of_compiler.cache_clear()
    yield
    dispatch.reset()
    _compiler.cache_clear()
    dispatch._warn_of_compiler.cache_clear()


@pytest.fixture
def incapable(monkeypatch):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: f"no {gpu} here")


def use_kernel(op, implementation, reason, gpu="sm_80", fallback="xla", slower=None):
    """Runs an op of one kernel and a fallback; whether the kernel ran."""
    kernel = Form(
        "hopper" if gpu.startswith("sm_90") else "general",
        call=lambda: True,
        gpu=gpu,
        why_not=lambda: reason,
        why_slower=lambda: slower,
    )
    return dispatch.run(op, (kernel, Form(fallback, lambda: False)), implementation)


def packed_attention(x, **options):
    """Of an array (B, T, 3, D), with RoPE."""
    packed = Packed(x.reshape(*x.shape[:2], -1), ((1, x.shape[3]),) * 3)
    packed = rope(packed, None, jnp.arange(x.shape[1]), theta=1e4, **options)
    return attention(packed, softcap=5.0, **options)


def test_auto_takes_the_kernel_where_it_is_supported(capable):
    assert use_kernel("op", None, None)
    assert dispatch.decisions() == [Decision("op", "general", "fits", "supported")]


def test_auto_takes_xla_with_the_ops_reason(capable):
    assert not use_kernel("op", None, "D=7 is odd")
    assert dispatch.decisions() == [Decision("op", "xla", "unsupported", "D=7 is odd")]


def test_auto_takes_xla_where_the_device_lacks_something(incapable):
    assert not use_kernel("op", None, None, "sm_90")
    assert dispatch.decisions() == [Decision("op", "xla", "device", "no sm_90 here")]


def test_auto_takes_what_is_faster(capable):
    assert not use_kernel("op", None, None, slower="D=7 is padded")
    assert not use_kernel("op", None, None, fallback="cudnn", slower="D=7 is padded")
    assert not use_kernel("op", None, "D=7 is odd", slower="D=7 is padded")
    assert dispatch.decisions() == [
        Decision("op", "xla", "slower", "faster, as D=7 is padded"),
        Decision("op", "cudnn", "slower", "faster, as D=7 is padded"),
        Decision("op", "xla", "unsupported", "D=7 is odd"),
    ]
    assert [d.supported for d in dispatch.decisions()] == [True, True, False]


def test_general_kernels_leave_no_place_to_those_for_hopper(capable, monkeypatch):
    monkeypatch.setenv("JAXLLM_KERNELS", "general")
    assert use_kernel("op", None, None)
    assert use_kernel("op", "mosaic", None, "sm_90a")
    assert not use_kernel("other", None, None, "sm_90a")
    assert dispatch.decisions()[-1] == Decision(
        "other", "xla", "setting", "JAXLLM_KERNELS=general, and this form is for hopper"
    )


FORMS = (
    Form("hopper", lambda x: "hopper", "sm_90a", lambda x: "x is odd" if x % 2 else None),
    Form("cudnn", lambda x: "cudnn", "sm_80", lambda x: "x is 3" if x == 3 else None),
    Form("general", lambda x: "general", "sm_80", lambda x: "x is 5" if x >= 5 else None),
    Form("xla", lambda x: "xla"),
)


@pytest.mark.parametrize(
    ("lacks", "asked", "x", "runs", "refused"),
    [
        ((), None, 2, "hopper", []),
        ((), None, 1, "cudnn", ["hopper"]),
        ((), None, 3, "general", ["hopper", "cudnn"]),
        (("sm_90a",), None, 2, "cudnn", ["hopper"]),
        (("sm_90a",), None, 3, "general", ["hopper", "cudnn"]),
        (("sm_90a",), "mosaic", 2, "general", ["hopper", "cudnn"]),
        (("sm_80", "sm_90a"), None, 2, "xla", ["hopper", "cudnn", "general"]),
        (("sm_80", "sm_90a"), "mosaic", 2, "hopper", []),  # a CPU interprets it
        ((), "xla", 2, "xla", []),
    ],
)
def test_the_first_form_that_fits_runs(monkeypatch, lacks, asked, x, runs, refused):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: f"no {gpu}" if gpu in lacks else None)
    assert dispatch.run("op", FORMS, asked, x) == runs
    form, decision, others = dispatch.choose("op", FORMS, asked, x)
    assert (form.runs, decision.runs, [o.runs for o in others]) == (runs, runs, refused)


def test_the_reason_is_about_the_call_where_one_is(monkeypatch):
    monkeypatch.setattr(
        dispatch, "device_lacks", lambda gpu: "an A100" if gpu == "sm_90a" else None
    )
    forms = (FORMS[0], *FORMS[2:])
    assert dispatch.choose("op", forms, None, 5)[1] == ("op", "xla", "unsupported", "x is 5")
    with pytest.raises(NotImplementedError, match="for this call: an A100; x is 5$"):
        dispatch.choose("op", forms, "mosaic", 5)
    assert Decision("op", "hopper", "device", "an A100") in dispatch.choose("op", forms, None, 5)[2]
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    forms = FORMS[0], FORMS[2]._replace(why_slower=lambda x: "x is 3"), FORMS[3]
    decision = dispatch.choose("op", forms, None, 3)[1]
    assert decision == ("op", "xla", "slower", "faster, as x is 3")  # a kernel supports it


def test_where_no_kernel_can_run_none_is_slower(incapable):
    assert not use_kernel("op", None, None, "sm_90", slower="D=7 is padded")
    assert dispatch.decisions() == [Decision("op", "xla", "device", "no sm_90 here")]


def test_mosaic_never_asks_the_device_nor_for_speed(incapable):
    assert use_kernel("op", "mosaic", None, slower="D=7 is padded")
    assert dispatch.decisions() == [Decision("op", "general", "asked", "asked for")]


def test_mosaic_raises_the_ops_reason_and_records_nothing():
    with pytest.raises(NotImplementedError, match=r"^op has no Mosaic kernel.*: D=7 is odd$"):
        use_kernel("op", "mosaic", "D=7 is odd")
    assert dispatch.decisions() == []


def test_xla_is_taken_when_asked_for(capable, caplog):
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        assert not use_kernel("op", "xla", None)
    assert dispatch.decisions() == [Decision("op", "xla", "asked", "asked for")]
    assert not caplog.records


def test_another_implementation_is_an_error():
    with pytest.raises(ValueError, match="implementation='triton' is not None, mosaic or xla"):
        use_kernel("op", "triton", None)


def test_each_fallback_is_logged_once_until_forgotten(capable, caplog):
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for _ in range(3):
            use_kernel("op", None, "D=7 is odd")
        use_kernel("op", None, "D=9 is odd")
        use_kernel("op", None, None)
        assert caplog.messages == ["op runs on XLA: D=7 is odd", "op runs on XLA: D=9 is odd"]
        dispatch.reset()
        use_kernel("op", None, "D=7 is odd")
        assert len(caplog.messages) == 3


@pytest.mark.parametrize(("platform", "level"), [("cpu", logging.INFO), ("gpu", logging.WARNING)])
def test_a_fallback_is_a_warning_on_a_gpu_only(capable, caplog, monkeypatch, platform, level):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        use_kernel("op", None, "D=7 is odd")
        for _ in range(2):  # what costs no speed is logged once, without a warning
            use_kernel("op", None, None, slower="D=7 is padded")
    assert [r.levelno for r in caplog.records] == [level, logging.INFO]
    assert caplog.messages[1] == "op runs on XLA: faster, as D=7 is padded"


def test_explain_counts_what_was_traced_not_what_was_called(capable):
    assert dispatch.explain() == "no op has been traced yet"
    f = jax.jit(lambda x: gelu(x, implementation="xla"))
    for _ in range(3):
        f(jnp.ones(4))
    jax.eval_shape(lambda x: gelu(gelu(x)), jnp.ones((128, 32)))
    use_kernel("attention", None, "D=7 is odd")
    assert dispatch.explain().splitlines()[:3] == [
        "gelu       xla      asked for (1 call traced)",
        "gelu       general  supported (2 calls traced)",
        "attention  xla      D=7 is odd (1 call traced)",
    ]


@pytest.mark.parametrize(
    ("capability", "gpu", "lacks"),
    [
        ("9.0", "sm_80", None),
        ("9.0", "sm_90", None),
        ("9.0", "sm_90a", None),
        ("10.0", "sm_90", None),
        ("10.0", "sm_90a", "the GPU has compute capability 10.0, the kernel needs 9.0"),
        ("8.9", "sm_80", None),
        ("8.9", "sm_89", None),
        ("8.6", "sm_89", "the GPU has compute capability 8.6, the kernel needs 8.9 or newer"),
        ("8.9", "sm_90", "the GPU has compute capability 8.9, the kernel needs 9.0 or newer"),
        ("7.5", "sm_80", "the GPU has compute capability 7.5, the kernel needs 8.0 or newer"),
        ("gfx942", "sm_80", "compute capability gfx942 is not an NVIDIA GPU's"),
        (None, "sm_80", "compute capability None is not an NVIDIA GPU's"),
    ],
)
def test_what_a_gpu_lacks(monkeypatch, capability, gpu, lacks):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert dispatch._device_lacks.__wrapped__(gpu) == lacks


@pytest.mark.parametrize(("gpu", "lacks"), [("sm_80", False), ("sm_89", False), ("sm_90", True)])
def test_a_gpu_with_little_shared_memory(monkeypatch, gpu, lacks):
    device = SimpleNamespace(compute_capability="12.0", shared_memory_per_block_optin=99 * 1024)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    why = "the GPU has 99 KB of shared memory for a block, the kernel needs 227"
    assert dispatch._device_lacks.__wrapped__(gpu) == (why if lacks else None)


def test_a_cpu_lacks_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert dispatch._device_lacks.__wrapped__("sm_80") == "the platform is cpu, not gpu"


def on_gpu_compiled_by(monkeypatch, name, cuda, jax_version=(0, 11, 2)):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    monkeypatch.setattr(dispatch, "compiler", lambda: dispatch.Compiler(name, cuda))


@pytest.mark.parametrize(("name", "cuda"), [("ptxas", (13, 0)), ("nvJitLink", (13, 5))])
def test_explain_tells_what_compiles_the_kernels(capable, caplog, monkeypatch, name, cuda):
    on_gpu_compiled_by(monkeypatch, name, cuda)
    use_kernel("op", None, None)
    line = f"kernels compiled by {name} {cuda[0]}.{cuda[1]} (JAX {jax.__version__})"
    assert dispatch.explain().splitlines()[1:] == [line]
    assert not caplog.records


@pytest.mark.parametrize(
    ("cuda", "jax_version"), [((12, 9), (0, 11, 2)), ((13, 6), (0, 12, 0)), ((13, 0), (0, 13, 0))]
)
@pytest.mark.parametrize("asked", [None, "mosaic"])
def test_a_compiler_that_may_be_slow_is_logged_once(
    capable, caplog, monkeypatch, cuda, jax_version, asked
):
    on_gpu_compiled_by(monkeypatch, "nvJitLink", cuda, jax_version)
    for op in ("a", "b"):
        use_kernel(op, None, "D=7 is odd")
    assert "compiled" not in dispatch.explain() + caplog.text
    for op in ("a", "b"):
        use_kernel(op, asked, None)
    (logged,) = [m for m in caplog.messages if "compiled" in m]
    assert logged == (
        f"kernels compiled by nvJitLink {cuda[0]}.{cuda[1]} (JAX {jax.__version__}) may be slow; "
        "known to be fast with CUDA 13.0 to 13.5 and JAX 0.11 to 0.12: see Install in README.md"
    )
    assert dispatch.explain().splitlines()[-1] == logged


def test_a_cpu_asks_for_no_compiler(capable, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(dispatch, "compiler", lambda: pytest.fail("asked"))
    use_kernel("op", None, None)
    use_kernel("op", "mosaic", None)
    assert "compiled" not in dispatch.explain()


@pytest.mark.parametrize(
    ("jaxlib", "loads", "name", "cuda"),
    [
        ("0.11.2", 13, "ptxas", (13, 0)),
        ("0.12.0.1", 13, "nvJitLink", (13, 5)),
        ("0.13.0.dev1", 12, "nvJitLink", (12, 5)),
        ("0.12.0.1", None, "ptxas", (13, 0)),
    ],
)
def test_which_compiler_jaxlib_takes(monkeypatch, tmp_path, jaxlib, loads, name, cuda):
    def load(file):
        if file != f"libnvJitLink.so.{loads}":
            raise OSError(file)

        def version(major, minor):
            major._obj.value, minor._obj.value = loads, 5
            return 0

        return SimpleNamespace(nvJitLinkVersion=version)

    ptxas = tmp_path / "cu13" / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    ptxas.chmod(0o755)
    nvidia = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: nvidia)
    monkeypatch.setattr(dispatch.jaxlib, "__version__", jaxlib)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert dispatch.compiler() == dispatch.Compiler(name, cuda)


def test_a_compiler_that_is_not_found_is_no_error(capable, caplog, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "compiler", lambda: None)
    use_kernel("op", None, None)
    assert (
        dispatch.explain().splitlines()[-1] == f"kernels compiled by ptxas (JAX {jax.__version__})"
    )
    assert not caplog.records


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (lambda x, **o: gelu(x, **o), {"gelu"}),
        (lambda x, **o: packed_attention(x, **o), {"rope", "attention"}),
        # shard_map once took one device's part of the table's gradient for the whole.
        (lambda x, **o: encoder(jnp.zeros((2, 8), int), x.reshape(-1, 64), None, **o), {"encoder"}),
    ],
)
def test_no_kernel_runs_where_shard_map_checks_types_that_vary(capable, op, names):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    specs = dict(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("d"))
    x = jnp.ones((8, 8, 3, 64), jnp.bfloat16)  # a multiple of GELU's blocks and of RoPE's tiles
    for check in (False, True):
        for asked in (None, "mosaic", "xla"):
            dispatch.reset()
            f = jax.shard_map(lambda x, b=asked: op(x, implementation=b), check_vma=check, **specs)
            if check and asked == "mosaic":
                with pytest.raises(NotImplementedError, match="pass check_vma=False"):
                    jax.eval_shape(f, x)
                continue
            jax.eval_shape(f, x)
            assert {d.op for d in dispatch.decisions()} == names
            xla = check or asked == "xla"
            assert all((d.runs == "xla") == xla for d in dispatch.decisions())


def test_the_extra_installs_what_is_known_to_be_fast():
    extra = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = extra["project"]["optional-dependencies"]["cuda13"]
    pin = re.fullmatch(r"jax\[cuda13\]==(\d+)\.(\d+)\..*", extra[0])
    assert (int(pin[1]), int(pin[2])) == dispatch._JAX[1]
    (major, minor), (_, last) = dispatch._CUDA
    for package, line in zip(("nvidia-nvjitlink", "nvidia-cuda-nvcc"), extra[1:], strict=True):
        assert line.startswith(f"{package}>={major}.{minor},<{major}.{last + 1};")


@pytest.mark.parametrize("default", ["cpu", jax.devices("cpu")[0]], ids=["platform", "device"])
def test_a_call_by_default_on_the_cpu_runs_no_kernel(monkeypatch, default):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_device_lacks", lambda gpu: None)
    assert dispatch.device_lacks("sm_80") is None
    with jax.default_device(default):
        assert dispatch.device_lacks("sm_80") == "jax_default_device is the cpu"
        assert dispatch.run("op", FORMS[2:], None, 2) == "xla"


def test_a_call_with_arrays_on_the_cpu_runs_no_kernel(capable, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "compiler", lambda: None)
    forms = (Form("general", lambda x: 2 * x, "sm_80"), Form("xla", lambda x: x))
    x = jax.device_put(1.0, jax.devices("cpu")[0])
    assert dispatch.run("op", forms, None, x) == 1
    assert dispatch.decisions()[0].why == "the arrays are on the cpu"
    assert jax.grad(lambda x: dispatch.run("op", forms, None, x))(x) == 1
    with pytest.raises(NotImplementedError, match="the arrays are on the cpu"):
        dispatch.run("op", forms, "mosaic", x)
    assert dispatch.run("op", forms, None, jnp.ones(())) == 2  # goes where jit runs
