"""How steady_step.py assigns the kernels of a profile to steps, and to their parts."""

from types import SimpleNamespace

import pytest
from steady_step import FIRST, Kernel, kernels, part, show

STEP = "jit(_train_step)"
BLOCK = f"{STEP}/transpose(jvp(jit(run_block)))"
REST = "AdamW, norms, copies"


@pytest.mark.parametrize(
    ("name", "op", "expected"),
    [  # as in profiles of an H100, JAX 0.12.0.1
        ("nvjet_sm90_tst_128x256_64x4", f"{BLOCK}/dot_general", "matmuls of the blocks"),
        ("nvjet_sm90_tst_128x256_64x4", f"{STEP}/jvp()/dot_general", "head and loss"),
        ("swiglu_mlp_backward_mosaic_gpu_kernel", "", "matmuls of the blocks"),
        ("linear_cross_entropy_statistics_and_gradient_mosaic_gpu_kernel", "", "head and loss"),
        ("quantize_fp8_mosaic_gpu_kernel", f"{STEP}/jvp()", "head and loss"),
        ("quantize_fp8_mosaic_gpu_kernel", BLOCK, "casts to fp8, maxima, scales"),
        ("attention_backward_dkv_mosaic_gpu_kernel", BLOCK, "attention"),
        ("rope_forward_mosaic_gpu_kernel", BLOCK, "attention"),
        ("gated_layer_norm_forward_mosaic_gpu_kernel", BLOCK, "norms with the residual"),
        ("loop_add_maximum_fusion_10", f"{BLOCK}/jit(chunkwise)", "vLSTM"),
        ("loop_convert_select_fusion_12", STEP, REST),
        ("loop_compare_fusion", f"{STEP}/lt", REST),
        ("input_reduce_fusion_2", "", REST),
        ("input_concatenate_fusion_15", "", REST),
        ("wrapped_convert", f"{STEP}/jvp()/convert_element_type", REST),
        ("wrapped_add", f"{BLOCK}/add_any", "biases and the rest"),
        ("MemcpyD2D", f"{STEP}/jvp()/slice", "biases and the rest"),
        ("encoder_backward_vocabulary_mosaic_gpu_kernel", "", "biases and the rest"),
    ],
)
def test_part(name, op, expected):
    assert part(Kernel(0.0, 1.0, name, op)) == expected


def test_steps_in_parts_are_counted_once(monkeypatch, capsys):
    """With train.grad_accum=2 each step has two first kernels."""
    events = [
        SimpleNamespace(start_ns=1e6 * i, duration_ns=5e5, name=name, stats=[])
        for i, name in enumerate([FIRST, "matmul"] * 2 * 6)
    ]
    monkeypatch.setattr("jaxllm.train.profiling.kernel_events", lambda path: iter(events))
    found, steps = kernels("", 2)
    assert steps == 2
    show(found, steps)
    assert "4.00 ms a step, 2.00 without any of 4 kernels" in capsys.readouterr().out
