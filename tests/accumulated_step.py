"""Run by test_compilers.py in a separate process: what an H100's step does with summed gradients.

    python tests/accumulated_step.py none|all [whole]         (train.fp8)

Compiles a step of a one-block Llama in two parts ahead of time, without its kernels as where
matmuls are timed, and prints JSON: for each matrix, how many matmuls write its float32 sum in
place, and how many additions write it on their own.  `whole`: compiles the kernels, too, and says
whether the step then has the same matmuls.
"""

import json
import re
import sys

from jaxllm.train.process import set_xla_flags

set_xla_flags(deterministic=True)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from compile_ahead import GPUS, TARGET  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jaxllm.config import Config, Llama3Config, OptimizerConfig, TrainConfig  # noqa: E402
from jaxllm.train import programs  # noqa: E402
from jaxllm.train.step import Trainer  # noqa: E402
from pallas_kernels import dispatch  # noqa: E402

# q has the shape of `out`, which is left out.
MODEL = dict(vocab_size=16384, n_layers=1, n_heads=16, n_kv_heads=4, d_model=1024)
MATRICES = {
    "table": (16384, 1024),
    "head": (1024, 16384),
    "gate and up": (1024, 5632),
    "down": (5632, 1024),
}


def matmuls(text: str) -> list[str]:
    """The library's matmuls in a compiled program, without the names of their operands."""
    lines = (line for line in text.splitlines() if 'custom_call_target="__cublas' in line)
    return sorted(re.sub(r"%[\w.-]+|, metadata=\{.*?\}|ROOT ", "", line) for line in lines)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    features = "feature_extension: ACCELERATED_FEATURES"
    target = TARGET.format(major=9, minor=0, features=features, name=GPUS["sm_90"])
    options = dict(target_config=target, topology="1x1x1")
    devices = topologies.get_topology_desc("", "cuda", **options).devices
    config = Config(
        model=Llama3Config(**MODEL, d_ff=5632, max_seq_len=2048),
        train=TrainConfig(steps=2, batch_size=16, seq_len=2048, grad_accum=2, fp8=sys.argv[1]),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    axes = "data", "fsdp", "context", "tensor"
    trainer = Trainer(config, Mesh(np.array(devices).reshape(1, 1, 1, 1), axes))
    with dispatch.rehearsal():
        traced = trainer.trace_train_step()
    with jax.default_device(devices[0]):  # Mosaic reads its compute capability
        hollow = programs._without_kernels(traced).compile({"xla_gpu_mock_custom_calls": True})
        text = hollow.as_text()
        found: dict = {}
        if sys.argv[2:] == ["whole"]:
            text = traced.lower().compile().as_text()
            found = {"same matmuls": matmuls(text) == matmuls(hollow.as_text())}
    for name, shape in MATRICES.items():
        array = rf"f32\[{shape[0]},{shape[1]}\]"
        matmul = rf" = \({array}.*custom-call\(.*__cublas.*output_to_operand_aliasing"
        # In the loop's body; the optimizer's additions yield the parameter with its moments.
        alone = rf" = {array}\S* fusion\(.*calls=\S*add"
        found[name] = [len(re.findall(pattern, text)) for pattern in (matmul, alone)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
