"""Flax models, data and training on the kernels of pallas_kernels."""


def load(path, step=None):
    """The model, the tokenizer and the model's configuration in a folder, as a named tuple.

    path: a run's directory, packed weights or a Hugging Face folder.
    step: of a run's checkpoint; None: the newest.
    The tuple also has `generate(prompt, tokens=200, temperature=0.8, ...)`, which returns a text,
    and `score(text)`, its log-likelihood in nats.  Raises jaxllm.errors.InputError.
    """
    from jaxllm.infer.loaded import load

    return load(path, step)


def __getattr__(name):
    if name != "__version__":
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    from importlib.metadata import version

    return version("jaxllm")
