"""Counts the fp8 matmuls and the kernels around them in a whole training step, without a GPU.

    uv run --extra cuda13 python tests/fp8_calls.py gpt2_124m llama3_124m vlstm_124m
    uv run --extra cuda13 python tests/fp8_calls.py llama3_1b --train.batch_size 4 --devices 2

Compiles the step of a configuration for H100s, with each value of train.fp8, and counts the
kernels of the compiled program.  Needs JAX's CUDA wheels, as tests/compile_ahead.py does.
"""

import collections
import os
import re
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from compile_ahead import GPUS, TARGET, needs_cuda_wheels
from scripts import Parser, run

FP8, MOSAIC = "__cublas$lt$matmul$f8", "mosaic_gpu_v2"


def compiled(config, devices: int) -> str:
    """The optimized program of the step."""
    import jax
    from jax.experimental import topologies

    from jaxllm import sharding
    from jaxllm.train.step import Trainer
    from pallas_kernels import dispatch

    features = "feature_extension: ACCELERATED_FEATURES"
    target = TARGET.format(major=9, minor=0, features=features, name=GPUS["sm_90"])
    found = topologies.get_topology_desc(
        "", "cuda", target_config=target, topology=f"1x1x{devices}"
    ).devices
    mesh = sharding.make_mesh(config.mesh, found)
    with dispatch.rehearsal():
        traced = Trainer(config, mesh).trace_train_step()
        print(dispatch.explain())
        with jax.default_device(found[0]):  # Mosaic reads its compute capability
            return traced.lower().compile().as_text()


def kernels(program: str) -> collections.Counter:
    """How often the program has each kind of kernel; a loop's kernels count once."""
    bodies = dict(re.findall(r"^%?([\w.\-]+) \(.*?\{\n(.*?)^\}", program, re.M | re.S))
    counted = collections.Counter()
    for line in program.splitlines():
        called = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = (.*?) (fusion|custom-call)\(", line)
        if called is None:
            continue
        if called[2] == "custom-call":
            counted[re.search(r'custom_call_target="([^"]*)"', line)[1]] += 1
        else:
            counted[_kind(called[1], bodies[re.search(r"calls=%([\w.\-]+)", line)[1]])] += 1
    return counted


def _kind(result: str, body: str) -> str:
    """What a fusion does, from its result's type and its instructions."""
    if "f8e" in result:
        if not re.search(r"(bf16|f32)\[\d+,.*parameter\(", body):
            return "transposes of fp8"
        return "casts to fp8, both orders" if "tuple(" in body else "casts to fp8, one order"
    if re.fullmatch(r"\(?((f32|bf16|pred|s32)\[1?\](\{0\})?(, )?)+\)?", result):
        return "single numbers"
    if "abs(" in body and "reduce(" in body and "[" in result:
        return "partial maxima" + " beside others" * ("multiply(" in body)
    return "others"


def main() -> None:
    from jaxllm.config import load
    from jaxllm.train.process import set_xla_flags

    parser = Parser(__doc__)
    parser.add_argument("config", nargs="+")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dump", type=Path, help="a file for the last program")
    arguments, rest = parser.parse_known_args()
    overrides = parser.overrides(rest)
    set_xla_flags(deterministic=True)
    needs_cuda_wheels()
    for name in arguments.config:
        for fp8 in ("none", "matmuls", "all"):
            config = load(name, overrides | {"train.fp8": fp8})
            program = compiled(config, arguments.devices)
            print(name, f"train.fp8={fp8}", dict(sorted(kernels(program).items())), flush=True)
            if arguments.dump:
                arguments.dump.write_text(program)


if __name__ == "__main__":
    run(main)
