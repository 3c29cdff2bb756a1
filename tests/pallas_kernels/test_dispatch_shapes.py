"""Which implementation runs which shapes under implementation=None, and for what reason."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from jax import export

from pallas_kernels import (
    Packed,
    attention,
    cross_entropy,
    dispatch,
    encoder,
    gelu,
    layer_norm,
    mlp,
    quantize,
    quantized_linear,
    rms_norm,
    rope,
    swiglu,
    vlstm,
)
from pallas_kernels.bench import compiling, operands
from pallas_kernels.bench.cases import CASES
from pallas_kernels.flash_attention import op as attention_op


@pytest.fixture(autouse=True)
def fresh():
    dispatch.reset()
    yield
    dispatch.reset()


ARRAYS = {  # shapes that the kernels of these ops do not support
    "gelu": (gelu, [(128, 192), (192,)]),
    "mlp": (lambda x, up, down: mlp(x, up, down, gate=up), [(0, 64), (64, 704), (704, 64)]),
    "swiglu": (swiglu, [(0, 128), (0, 128)]),
    "layer_norm": (layer_norm, [(2, 9000)]),
    "attention": (attention, [(1, 8, 1, 260)] * 3),
    "packed": (lambda x: attention(Packed(x, ((1, 260),) * 3)), [(1, 9, 3 * 260)]),
    "vlstm": (vlstm, [*[(1, 8, 1, 8)] * 3, *[(1, 8, 1)] * 2]),
}


@pytest.mark.parametrize("op", list(ARRAYS))
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_without_a_gpu_or_with_an_old_one_that_is_the_reason(monkeypatch, request, platform, op):
    request.addfinalizer(dispatch._device_lacks.cache_clear)  # this GPU is for no other test
    device = SimpleNamespace(compute_capability="7.5", core_count=40)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    dispatch._device_lacks.cache_clear()
    f, shapes = ARRAYS[op]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    jax.eval_shape(lambda *arrays: f(*arrays), *arrays)  # a new function, so that JAX traces it
    reasons = {d.why for d in dispatch.decisions()}
    own = {"cpu": "the platform is cpu, not gpu", "gpu": "the GPU has compute capability 7.5"}
    assert reasons
    assert all(why.startswith(own[platform]) for why in reasons), reasons


def test_every_case_names_the_gpu_that_its_op_needs(monkeypatch):
    asked, choose = [], dispatch.choose

    def record_form(op, forms, *call, **options):
        asked.append(forms[0].gpu)
        return choose(op, forms, *call, **options)

    monkeypatch.setattr(dispatch, "choose", record_form)
    for case in CASES:
        asked.clear()
        jax.eval_shape(compiling.public(case), *operands.structs(case, case.sizes[0]))
        assert asked[0] == case.gpu, case.op  # an op may then call another


SIZES = [
    (case, sizes) if sizes is case.sizes[0] else slow(case, sizes)
    for case in CASES
    for sizes in case.sizes
]


@pytest.mark.parametrize(("case", "sizes"), SIZES, ids=lambda x: getattr(x, "op", None))
def test_the_sizes_of_models_run_on_their_kernels(capable, case, sizes):
    jax.eval_shape(compiling.public(case), *operands.structs(case, sizes))
    kernels = [d for d in dispatch.decisions() if d.runs not in ("cudnn", "xla")]
    assert {d.why for d in kernels} <= {"supported"}
    others = {d.why for d in dispatch.decisions() if d not in kernels}
    assert others <= {
        "forward, bf16 with a bias: cuBLASLt fuses it with the matmul before",
        "faster, as XLA fuses the step of a small state with its neighbours",
    }


def rows(n, c):
    return [(n, c), (c,)]


@pytest.mark.parametrize(
    ("op", "shapes", "why"),
    [
        (layer_norm, rows(8, 1000), "C=1000 is not a positive multiple of 64"),
        (layer_norm, rows(8, 960), None),
        (layer_norm, rows(8, 33), "C=33 is not a positive multiple of 64"),
        (layer_norm, rows(8, 64), None),
        (rms_norm, rows(8, 4160), None),
        (rms_norm, rows(8, 5120), None),
        (layer_norm, rows(8, 260), "C=260 is not a positive multiple of 64"),
        (rms_norm, rows(8, 3), "C=3 is not a positive multiple of 64"),
        (cross_entropy, [(5, 8, 384)], "40 rows, of one block each, are fewer than 41"),
        (cross_entropy, [(41, 300)], "V=300 is not a positive multiple of 128"),
        (cross_entropy, [(41, 384)], None),
        (rope, [(1, 128, 1, 80)], "tiles of 8 pairs, for D=80, are smaller than 16 pairs"),
        (rope, [(3, 333, 1, 64)], "B T=999 is not a multiple of 32, the positions of a tile"),
        (rope, [(1, 64, 1, 96)], None),
        (rope, [(64, 1, 1, 96)], "XLA fuses the rotation of one position with other ops"),
        (gelu, [(8, 8, 64)], "XLA fuses 64 rows or fewer with other ops"),
        (swiglu, [(64, 64)] * 2, "XLA fuses 64 rows or fewer with other ops"),
        (swiglu, [(65, 64)] * 2, "the kernel would pad 4160 elements to a multiple of 4096"),
        (swiglu, [(128, 32)] * 2, None),
        (encoder, [(500, 72)], None),  # slower, but XLA's form is not deterministic
    ],
)
def test_which_shapes_xla_is_faster_for(capable, op, shapes, why):
    call = lambda x, *more: op(x, *more)
    if op is rope:
        call = lambda q: op(q, q, jnp.arange(q.shape[1]))
    elif op is cross_entropy:
        call = lambda x: op(x, jnp.zeros(x.shape[:-1], jnp.int32))
    elif op is encoder:
        call = lambda wte: op(jnp.zeros((2, 8), jnp.int32), wte, None)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    jax.eval_shape(call, *arrays)
    (decision,) = dispatch.decisions()
    assert (decision.op, decision.runs == "xla") == (op.__name__, bool(why))
    assert decision.why in ({f"faster, as {why}", why} if why else {"supported"})


@pytest.mark.parametrize(
    ("shape", "scale", "why"),
    [
        ((1, 100, 2, 64), 0.0, "scale=0.0 is less than 1e-30"),  # it gives NaN
        ((1, 128, 2, 64), -1.0, "scale=-1.0 is less than 1e-30"),
        ((2**14, 2, 2**10, 64), None, "q have 2147483648 elements"),  # wrong gradients
    ],
)
def test_where_cudnn_is_wrong_it_does_not_run(capable, shape, scale, why):
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert attention_op.cudnn_why_not((q, q, q), scale=scale).startswith(why)
    if scale is not None:
        jax.eval_shape(lambda q: attention(q, q, q, scale=scale), q)
        assert [decision.runs for decision in dispatch.decisions()] == ["xla"]


@pytest.mark.parametrize("shape", [(1, 18, 18, 64), (1, 16, 20, 64), (1, 16, 16, 72), (1, 9, 9, 4)])
def test_shapes_that_need_padding_run_on_kernels_whose_sums_have_an_order(capable, shape):
    b, t, s, d = shape
    q, k = (jax.ShapeDtypeStruct((b, n, 2, d), jnp.bfloat16) for n in (t, s))
    jax.eval_shape(lambda q, k: attention(q, k, k, causal=False), q, k)
    assert [decision.runs for decision in dispatch.decisions()] == ["hopper"]


SYMBOLIC = {  # shapes after a batch of a symbolic size
    "rms_norm": (rms_norm, [(9, 64)]),
    "rope": (lambda q: rope(q, q, jnp.arange(9)), [(9, 2, 64)]),
    "attention": (attention, [(9, 2, 64)] * 3),
    "quantized_linear": (lambda x: quantized_linear(x, quantize(jnp.ones((128, 16)))), [(9, 128)]),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_sizes_that_are_symbolic_run_on_xla(capable, name):
    """jax.export of a symbolic batch failed on a GPU, where the kernels compared and divided it."""
    op, shapes = SYMBOLIC[name]
    (b,) = export.symbolic_shape("b")
    arrays = [jax.ShapeDtypeStruct((b, *shape), jnp.bfloat16) for shape in shapes]
    found = export.export(jax.jit(lambda *arrays: op(*arrays)), platforms=["cpu"])(*arrays)
    assert found.out_avals[0].shape[0] == b
    (decision,) = dispatch.decisions()
    assert (decision.runs, decision.why[:18]) == ("xla", "a size is symbolic")
