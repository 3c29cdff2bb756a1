"""The commands: `jaxllm COMMAND ...`, `python -m jaxllm COMMAND ...`, `python train.py ...`.

This file imports only the standard library, and Python 3.6 can parse it: a Python that is too old
or lacks JAX prints one line that says what to install, and --help is immediate.
"""

import difflib
import errno
import importlib
import importlib.util
import os
import sys

from jaxllm import __version__

OLDEST = (3, 12)  # pyproject.toml has the same
_SAME = "jax jaxlib flax optax grain jaxtyping pydantic safetensors tokenizers pyarrow rich jinja2"
_SAME += " prompt_toolkit matplotlib"
NEEDED = {name: name for name in _SAME.split()}  # pyproject.toml has them: {distribution: module}
NEEDED.update({"orbax-checkpoint": "orbax", "pyyaml": "yaml", "tensorboardx": "tensorboardX"})
FOREIGN = ("JAX_ENABLE_X64", "JAX_NUMPY_", "JAX_TRANSFER_GUARD", "JAX_DISABLE_JIT")
FOREIGN += ("JAX_DEFAULT_PRNG_IMPL", "JAX_RANDOM_SEED_OFFSET", "JAX_THREEFRY_", "JAX_DEBUG_INFS")
COMMANDS = {  # {command: (module with its `main`, summary)}
    "train": ("jaxllm.train.run", "train a model, or resume a run"),
    "chat": ("jaxllm.infer.chat", "talk with a chat model"),
    "generate": ("jaxllm.infer.generate", "write text with a trained model"),
    "evaluate": ("jaxllm.infer.evaluate", "loss and perplexity, HellaSwag, lm-evaluation-harness"),
    "report": ("jaxllm.train.report", "one HTML page about one or more runs"),
    "convert": ("jaxllm.weights.convert", "Hugging Face folders to runs, and back"),
    "data": ("jaxllm.data.command", "prepare: text to token shards; train-tokenizer: a BPE"),
    "benchmark": ("pallas_kernels.bench.run", "time every kernel against XLA and cuDNN"),
}


def main(argv=None):
    """Runs the command that the first word names; returns its exit status."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {command:<11}{summary}" for command, (_, summary) in COMMANDS.items()]
        more = "`jaxllm COMMAND --help` lists the options of a command, `jaxllm --version` prints"
        page = ["usage: jaxllm COMMAND ...\n\ncommands:", *lines, f"\n{more} the version."]
        return _print("\n".join(page))
    if name == "--version":
        return _print(f"jaxllm {__version__}")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
        return _error(f"unknown command {name!r}; {hint}")
    return run(name, words)


def run(name, words=None):
    """Runs a command on its arguments (None: this process's); returns its exit status."""
    lack = _lack()
    if lack:
        return _error(lack)
    kernels = os.environ.get("JAXLLM_KERNELS", "")
    if kernels not in ("", "general"):  # pallas_kernels/dispatch.py
        return _error(f"JAXLLM_KERNELS={kernels} is not general: set that, or unset it")
    # Settings of a user's other programs: float64, random numbers, errors of optax, transfers,
    # compilation, infinities.
    for setting in [x for x in os.environ if x.startswith(FOREIGN)]:
        del os.environ[setting]
    if name == "convert":  # it needs no GPU, whose memory another process may use
        os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxllm import terminal

    terminal.protect_streams(lossy=name == "train")
    with terminal.ended_by_interrupt():
        command = importlib.import_module(COMMANDS[name][0]).main
        if name not in ("chat", "convert", "data"):  # on Ctrl-C these clean up or go on
            return command(words)
    return command(words)


def _lack():
    """A line that says what this Python lacks and how to install it, or None."""
    if sys.version_info < OLDEST:
        version = ".".join(map(str, sys.version_info[:3]))
        return (
            f"jaxllm needs Python {OLDEST[0]}.{OLDEST[1]} or newer, and {sys.executable} is"
            f" {version}; put `uv run` before the command to fetch one (pip install uv)"
        )
    if sys.flags.optimize > 1:
        return "python -OO (PYTHONOPTIMIZE=2) removes the texts of --help; use -O, or neither"
    missing = [name for name, module in NEEDED.items() if not importlib.util.find_spec(module)]
    if not missing:
        return None
    more = f" and {len(missing) - 3} more packages" if len(missing) > 3 else ""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    checkout = os.path.exists(os.path.join(root, "pyproject.toml"))
    what = f"'{root}' (with an NVIDIA GPU '{root}[cuda13]')" if checkout else " ".join(missing)
    return (
        f"{sys.executable} lacks {', '.join(missing[:3])}{more}; install them:"
        f" {sys.executable} -m pip install {what}"
    )


def _print(text):
    """Prints a text; returns the exit status."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        if error.errno != errno.EPIPE:  # EPIPE: the reader has exited, as in `| head`
            _error(f"standard output cannot be written: {error.strerror}")
            return 1
    return 0


def _error(message):
    sys.stderr.write(f"error: {message}\n")
    return 2
