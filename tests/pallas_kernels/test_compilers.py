"""Every compiler that users may have makes fast programs of the wgmma kernels; this needs no GPU.

JAX 0.11 calls ptxas; 0.12 calls nvJitLink, which compiles as `ptxas -c` does.  So each kernel of
the benchmark is compiled by every ptxas that PTXAS names, as this JAX would call it
(compile_ahead.py compiles in both ways): none may spill a register, run one wgmma after the other
(C7510 to C7514) or ignore setmaxnreg (C7504).  .ci/run installs what this needs.  Whoever sets
PTXAS wants the test: nothing is skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import compile_ahead
import jax
import pytest
from cases import slow

pytestmark = pytest.mark.skipif(
    "PTXAS" not in os.environ,
    reason="PTXAS=path:path names no ptxas to compile with (.ci/run shows how)",
)
# A second size changes the lengths of loops alone.
SPECS = [
    spec if spec.endswith(":0") else slow(spec)
    for op in compile_ahead.ops("sm_90a")
    for spec in compile_ahead.specs(op, every=True)
]


def builds(spec, gpu):
    """What every compiler makes of a case, with -c for JAX 0.12."""
    how = (jax.__version_info__ >= (0, 12),)
    made = compile_ahead.builds(spec, gpu, compile_ahead.ptxas(), relocatable=how)
    return [build for _, some in made for build in some]


# Bytes stored once a block and loaded once for each of its items, outside of its loops over tiles:
# at D = 64 (0:0 of JAX 0.11.2), with q, k and v in one array, and at D = 128 in long calls (0:1,
# 1:1) and without a mask (3:0).
SPILLS = {"0:0": 12, "0:1": 16, "1:0": 8, "1:1": 16, "3:1": 24, "6:0": 16, "6:1": 8}
ONCE = {(f"attention:{spec}", "attention_forward"): spilled for spec, spilled in SPILLS.items()}
ONCE["attention:3:0", "attention_backward_dkv"] = 4


@pytest.mark.parametrize("spec", SPECS)
def test_no_kernel_spills_or_waits_for_each_wgmma(spec):
    made = builds(spec, "sm_90")
    bad = [str(b) for b in made if b.complaints or b.spilled > ONCE.get((spec, b.kernel), 0)]
    assert not bad, f"{len(bad)} of {len(made)} programs are slow:\n" + "\n".join(bad)


# The kernels for every GPU, on the oldest one and on the newest.  The large tiles of attention on
# 8.0 and 9.0 spill a little, and are faster so on an H100 (docs/attention-tiles.md).
ATTENTION = ("general_attention_forward", "general_attention_backward_dkv")
VLSTM = (
    *("vlstm_states", "vlstm_forward"),
    *(f"vlstm_backward_{mode}" for mode in ("dq", "dk", "dv")),
)


@pytest.mark.parametrize(
    ("spec", "gpu", "bytes_", "kernels"),
    [
        slow("attention:0:1", "sm_80", 64, ATTENTION),  # D 128
        ("attention:0:0", "sm_120", 0, ATTENTION),  # D 64
        ("layer_norm:0:0", "sm_80", 0, ("layer_norm_backward",)),
        slow("layer_norm:2:0", "sm_80", 0, ("gated_layer_norm_backward",)),
        slow("layer_norm:2:0", "sm_90", 0, ("gated_layer_norm_backward",)),
        ("decode_attention:0:0", "sm_80", 0, ("general_decode_attention",)),
        slow("row_linear:2:0", "sm_80", 0, ("quantized_linear_row",)),
        slow("vlstm:0:1", "sm_80", 0, VLSTM),  # DQK 64, DV 128
        slow("vlstm:1:1", "sm_90", 0, VLSTM),  # 256, 512
        slow("vlstm:0:0", "sm_120", 0, VLSTM),  # 64, 64
        slow("vlstm:2:0", "sm_80", 0, VLSTM),
        slow("vlstm:0:0", "sm_90", 0, VLSTM),
        slow("vlstm:4:0", "sm_80", 0, (*VLSTM, "gated_layer_norm_backward")),
        # 256, 512: dq keeps A states in all registers; one of JAX 0.11.2 spills (docs/vlstm.md).
        *(slow("vlstm:1:1", gpu, 4, VLSTM) for gpu in ("sm_80", "sm_100", "sm_120")),
        slow(
            *("linear_cross_entropy:0:0", "sm_80", 0),
            ("linear_cross_entropy_statistics_and_gradient",),
        ),
        # 8192 columns; with the sums of layer norm's bias they spill 240 bytes.
        slow("rms_norm:1:2", "sm_120", 0, ("add_rms_norm_backward",)),
    ],
)
def test_kernels_for_other_gpus_hardly_spill(spec, gpu, bytes_, kernels):
    made = builds(spec, gpu)
    assert set(kernels) <= {b.kernel for b in made}
    bad = [str(b) for b in made if b.spilled > bytes_ or b.complaints]
    assert not bad, f"{len(bad)} of {len(made)} programs spill:\n" + "\n".join(bad)


# 4096 x 14336 of 4 and 8 bits, q with k and v, gate with up: blocks of an SM and their threads.
@pytest.mark.parametrize(
    ("spec", "blocks", "threads"),
    [
        slow("quantized_linear:1:0", 7, 128),
        slow("quantized_linear:4:0", 7, 128),
        slow("row_linear:1:0", 3, 256),
        ("row_linear:2:0", 7, 128),
    ],
)
def test_registers_let_all_blocks_of_one_row_run_at_once(spec, blocks, threads):
    """With the 76 registers that gate and up once had, theirs need a second wave."""
    made = [b for b in builds(spec, "sm_90") if b.kernel == "quantized_linear_row"]
    assert made
    for build in made:
        assert blocks * threads * -(-build.registers // 8) * 8 <= 65536, str(build)


CASTS = {"fp8_maximum", "quantize_fp8"}


@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        ("fp8_linear:0:0", CASTS),
        slow("mlp:2:0", CASTS | {"swiglu_maxima", "swiglu_fp8", "swiglu_backward_fp8"}),
        slow("mlp:3:0", {"quantize_fp8", "gelu_fp8", "gelu_backward_fp8"}),
        slow(
            "linear_cross_entropy:1:0",
            CASTS | {"linear_cross_entropy_statistics", "linear_cross_entropy_gradient_fp8"},
        ),
    ],
)
@pytest.mark.parametrize("gpu", ["sm_89", slow("sm_90"), slow("sm_100")])
def test_casts_to_fp8_do_not_spill(spec, kernels, gpu):
    made = builds(spec, gpu)
    assert kernels == {b.kernel for b in made}
    assert not [str(b) for b in made if b.bad()]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "calls"), [("gpt2_small", 12), ("vlstm_small", 15)])
def test_xla_takes_cublaslts_fp8_matmuls_for_all_products_of_a_block(config, calls):
    """And compiles at all: without the barrier in layers/mlp.py it fails for GPT-2."""
    script = Path(compile_ahead.__file__).with_name("fp8_calls.py")
    command = [sys.executable, str(script), config, "--model.n_layers", "1"]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    plain, fp8, _ = [line for line in done.stdout.splitlines() if "train.fp8=" in line]
    assert "f8" not in plain.replace("train.fp8", "")
    assert f"'__cublas$lt$matmul$f8': {calls}" in fp8


LAUNCH = ".maxntid 384 .minnctapersm 1"
FAST = "ret;"
IGNORED = "setmaxnreg.inc.sync.aligned.u32 232; ret;"
# 64 numbers read before the first one is written, for 32 registers.
SPILLED = "\n".join(
    [".reg .u64 %p; .reg .u32 %r<64>; ld.param.u64 %p, [p];"]
    + [f"ld.volatile.global.u32 %r{i}, [%p+{4 * i}];" for i in range(64)]
    + [f"st.volatile.global.u32 [%p+{4 * i}], %r{i};" for i in range(64)]
    + ["ret;"]
)


@pytest.mark.parametrize("relocatable", [False, True])
@pytest.mark.parametrize("compiler", compile_ahead.ptxas())
@pytest.mark.parametrize(
    ("body", "limit", "spills", "codes"),
    [
        (FAST, LAUNCH, False, []),
        (IGNORED, LAUNCH, False, ["C7504"]),
        (SPILLED, ".maxnreg 32", True, []),
    ],
    ids=["fast", "setmaxnreg", "spilled"],
)
def test_what_a_compiler_says_is_understood(
    tmp_path, compiler, relocatable, body, limit, spills, codes
):
    ptx = tmp_path / "k.ptx"
    ptx.write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n"
        f".visible .entry k(.param .u64 p) {limit} {{\n{body}\n}}\n"
    )
    made = compile_ahead.build(compile_ahead.Kernel("k", ptx, None), compiler, relocatable)
    if not relocatable:  # a whole program obeys setmaxnreg
        codes = []
    assert [complaint.split()[0] for complaint in made.complaints] == codes, made
    assert (made.spilled > 0) == spills
    assert made.bad() == bool(spills or codes)


@pytest.mark.parametrize("options", [["none"], slow(["none", "whole"]), slow(["all", "whole"])])
def test_sums_of_gradients_are_written_inside_matmuls(options):
    """But for q, k and v, which one matmul yields, and for the table, whose gradient has none."""
    bin_ = os.pathsep.join([str(Path(compile_ahead.ptxas()[0]).parent), os.environ["PATH"]])
    script = Path(__file__).parents[1] / "accumulated_step.py"
    paths = os.pathsep.join([str(script.parents[1]), *sys.path])
    environment = os.environ | {"PATH": bin_, "PYTHONPATH": paths, "XLA_FLAGS": ""}
    ran = subprocess.run(
        [sys.executable, script, *options], env=environment, stdout=subprocess.PIPE
    )
    assert ran.returncode == 0
    wanted = {"table": [0, 1], "head": [1, 0], "gate and up": [2, 0], "down": [1, 0]}
    if "whole" in options:
        wanted["same matmuls"] = True  # in the step that times them
    assert json.loads(ran.stdout.splitlines()[-1]) == wanted
