"""Makes a run's directory of a fixture's model with the tokenizer of fixtures/evaluation."""

import json
import shutil

from huggingface_folders import FIXTURES, folder_of

from jaxllm import config as configs
from jaxllm.weights import convert

TEXTS = FIXTURES / "evaluation"
EXPECTED = json.loads((TEXTS / "expected.json").read_text(encoding="utf-8"))


def run_of(name, folder, dtype="float32"):
    """The run's directory that convert makes in an empty folder; it computes in `dtype`."""
    theirs = folder_of(folder / "theirs", name)
    shutil.copyfile(TEXTS / "tokenizer.json", theirs / "tokenizer.json")
    assert convert.main([str(theirs), str(folder / "run")]) == 0
    path = folder / "run" / "config.yaml"
    config = configs.load(str(path))
    model = config.model.model_copy(
        update=dict(compute_dtype=dtype, residual_dtype=dtype, kernels="xla")
    )
    train = config.train.model_copy(update=dict(seq_len=32))
    path.write_text(config.model_copy(update=dict(model=model, train=train)).to_yaml())
    return folder / "run"
