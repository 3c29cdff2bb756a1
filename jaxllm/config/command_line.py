"""Command lines: what all commands share, and the options of `jaxllm train`."""

import argparse
import difflib
import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any

from jaxllm.config.describe import INDENT, columns, help_text
from jaxllm.config.loading import CONFIG_DIR, flat, load, parse
from jaxllm.config.sections import Config
from jaxllm.errors import InputError, RunError, error_line, memory_errors
from jaxllm.files import on_hub

# A resumed run may change these settings, and all of mesh, sample and profile; any other setting
# would make it a different run.
CHANGEABLE = """
train.steps train.grad_accum train.log_every train.eval_every train.eval_batches train.fp8
train.checkpoint_every train.keep_checkpoints train.skip_spikes train.max_skips train.autotune
train.verify_every train.on_corruption train.deterministic train.tracker model.kernels model.remat
model.init_from data.prefetch data.cache_dir data.path data.val_path data.tokenizer
""".split()

# It may change these if the command line says so: the state fits, but the losses differ.
_RATES = "learning_rate muon_learning_rate schedule warmup_steps final_fraction decay_fraction"
RATE = frozenset(f"optimizer.{name}" for name in _RATES.split())
_OF_OUTPUT = errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO
GLOB = "the shell has made several words of a glob: put it in quotes, as in 'texts/*.txt'"


def read(argv: list[str] | None) -> argparse.Namespace:
    """The options of `jaxllm train`, with `config` checked; raises InputError for bad input."""
    args, overrides = _parse(argv)
    if args.resume:
        args.config = _resumed_config(args, overrides)
        return args
    config = load(args.config, overrides)
    if args.out_dir is None:
        if config.mesh.distributed or args.process is not None:
            raise InputError("several processes need --out_dir: a directory that all of them see")
        name = f"runs/{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = map(Path, (name, *(f"{name}-{i}" for i in range(2, 99))))  # same second
        args.out_dir = next((path for path in names if not os.path.lexists(path)), Path(name))
    check_free(args.out_dir)
    args.config = config
    return args


def _path(text: str) -> Path:
    if not text:  # from an unset variable; Path would take it as the current directory
        raise argparse.ArgumentTypeError("it is empty; name a file or a folder")
    return Path(text).expanduser()  # a shell leaves ~ as it is in quotes and after =


def _number(name: str, kind: type, text: str) -> int | float:
    try:
        return parse(name, text, kind)  # as in a configuration: int would read 1_0 as 10
    except InputError as error:  # a ValueError, whose message argparse would not print
        raise argparse.ArgumentTypeError(str(error)) from error


_NUMBERS = {"N": int, "I": int, "X": float}
_TYPES: dict[str, Callable] = {x: partial(_number, x, kind) for x, kind in _NUMBERS.items()}
_TYPES |= dict.fromkeys(("DIR", "FILE", "SOURCE", "OUT"), _path)
_TYPES |= dict.fromkeys("TEXT STRING NAME NAME,... PATH COUNTxKIND HOST:PORT".split(), str)
_TYPES["NAME_OR_PATH"] = lambda text: "/dev/stdin" if text == "-" else text


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError and accepts --batch-size for --batch_size."""

    def __init__(self, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter
        help_ = partial(raw, max_help_position=INDENT, width=columns())
        super().__init__(formatter_class=help_, allow_abbrev=False, **options)

    def option(self, spec: str, help: str, *, among=None, **options: Any) -> None:
        """Adds an option as --help lists it: "--step N", or the flag "--chat".

        The value's placeholder names its type, a key of _TYPES, or lists its choices: "a|b".
        help: ends with the default, if there is one.
        among: a group of options that exclude each other.
        """
        name, _, value = spec.partition(" ")
        if "|" in value:
            options["choices"] = value.split("|")
        elif value:
            options |= {"type": _TYPES[value], "metavar": value}
        else:
            options["action"] = "store_true"
        if "default" in options and "action" not in options:
            help += " (default: %(default)s)"
        hyphens = [name.replace("_", "-")] * name.startswith("--")
        action = (among or self).add_argument(name, *hyphens, help=help, **options)
        action.option_strings = action.option_strings[:1]  # --help lists only this spelling

    def parse_known_args(self, args=None, namespace=None):
        self.words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def overrides(self, words: list[str], first: str | None = None) -> dict[str, str]:
        """Parses --section.key VALUE and --section.key=VALUE into {"section.key": value}.

        first: the option that a lone first word seems to belong to.
        """
        overrides, rest = {}, iter(words)
        for word in rest:
            key, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or not key:
                hint = "a value follows its --section.key"
                if first and not overrides:
                    hint = f"write {first} {word}"
                elif os.path.exists(word):
                    hint = f"write --out_dir {word}" if "--resume" in self.words else GLOB
                raise InputError(f"unexpected argument {word}; {hint}")
            if "." not in key and self._meant(word):
                self.error(f"unrecognized arguments: {word}")
            if not equals:
                value = next(rest, None)
                if value is None or (value.startswith("--") and "." in value):
                    raise InputError(f"--{key} needs a value")
            overrides[key.replace("-", "_")] = value
        return overrides

    def _meant(self, word: str) -> list[str]:
        """The option that a misspelt one resembles, or none."""
        known = self._option_string_actions
        return difflib.get_close_matches(re.split("[ =]", word)[0], known, 1, cutoff=0.7)

    def error(self, message):
        if "are required: " in message:  # perhaps because one of them is misspelt
            options = [x for x in self.words if re.fullmatch(r"--[^.]+", x.partition("=")[0])]
            odd = (x for x in options if x.partition("=")[0] not in self._option_string_actions)
            message = next((f"unrecognized arguments: {x}" for x in odd), message)
        kind, _, words = message.partition("unrecognized arguments: ")
        if not kind and words and all(map(os.path.exists, words.split())):
            message += f"; {GLOB}"
        elif near := self._meant(words):
            message += f"; did you mean {near[0]}?"
        if message.endswith("expected one argument"):
            message += " (write OPTION=VALUE for a value that begins with -)"
        raise InputError(f"{message}; see --help")


def exit_status(
    run: Callable[[], int | None], *, memory: str = "use a larger one", interrupted: str = ""
) -> int:
    """Runs a command; returns its own status (None: 0), 1: failed, 2: bad input, 130: Ctrl-C.

    memory: advice for when the device runs out of memory.
    interrupted: the line that Ctrl-C prints.
    """
    status = 0
    try:
        with memory_errors(memory):
            status = run() or 0
        sys.stdout.flush()
    except (InputError, RunError) as error:
        error_line(str(error))
        return 2 if isinstance(error, InputError) else 1
    except (AssertionError, RuntimeError, ValueError) as error:
        why = _no_device()
        if "determine home directory" in str(error):
            why = "a path begins with ~ or ~USER, which has no home directory: name it in full"
        if re.search("for (JAX flag|environment) ", str(error)):  # jax reads them as it is imported
            why = f"{error}: set another value, or unset it"
        if why is None:
            raise
        error_line(why)
        return 2
    except KeyboardInterrupt:
        logging.disable()  # Orbax would log the checkpoint that it abandons
        if interrupted:
            print(interrupted, file=sys.stderr)
        return 130
    except OSError as error:
        if error.strerror == os.strerror(errno.ENOENT) and not error.filename:  # of os.getcwd
            error_line("the current folder was deleted: cd to one that exists")
            return 2
        if not (error.filename or error.errno in _OF_OUTPUT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        if error.errno != errno.EPIPE:  # the reader of a pipe has exited, as in `| head`
            used = "read or written" if error.filename else "written"
            error_line(f"{error.filename or 'standard output'} cannot be {used}: {error.strerror}")
            return 1
    return status


def _no_device() -> str | None:
    """Why JAX has no device, or None if it has one."""
    platforms, jax = os.environ.get("JAX_PLATFORMS"), sys.modules.get("jax")
    if not (platforms and jax):
        return None
    try:
        jax.devices()
    except (AssertionError, RuntimeError):
        return f"JAX_PLATFORMS={platforms}: JAX finds no such device; unset it, or set it to cpu"
    return None


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    parser = Parser(
        prog="jaxllm train",
        usage="jaxllm train --config NAME_OR_PATH [--section.key VALUE ...]\n"
        "       jaxllm train --resume --out_dir DIR [--section.key VALUE ...]",
        description="Trains a language model.  An option overrides each value of its"
        " configuration.",
        epilog=help_text(),
    )
    known = ", ".join(sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")))
    parser.option("--config NAME_OR_PATH", f"a YAML file, - for standard input, or one of {known}")
    parser.option("--out_dir DIR", "the run's folder (default: runs/CONFIG-TIME)")
    parser.option("--resume", "continue from the newest checkpoint in --out_dir")
    parser.option(
        "--restart",
        "with --resume: if the checkpoints are missing, begin again and replace the metrics",
    )
    parser.option(
        "--dry_run COUNTxKIND",
        "estimate the memory and time of the run here, or predict them on GPUs like 64xH200;"
        " compile and write nothing",
        nargs="?",
        const="here",
    )
    parser.option("--processes N", "train in N processes, each with one GPU")
    parser.option("--process I", "start only process I (from 0) of N here, with all GPUs it has")
    parser.option("--coordinator HOST:PORT", "with --process: process 0's machine, and a free port")
    arguments, rest = parser.parse_known_args(argv)
    overrides = parser.overrides(rest, None if arguments.config or arguments.resume else "--config")
    _check_processes(arguments, overrides)
    if arguments.restart and not arguments.resume:
        raise InputError("--restart needs --resume")
    if arguments.resume and arguments.out_dir is None:
        raise InputError("--resume needs --out_dir, the directory of the run to resume")
    if arguments.config is None and not arguments.resume:
        raise InputError("--config is missing: a file, or a name in configs/ like llama3_small")
    return arguments, overrides


def _check_processes(args: argparse.Namespace, overrides: dict[str, str]) -> None:
    """Raises InputError for options that do not describe one or more processes."""
    count, index, coordinator = args.processes, args.process, args.coordinator
    most = 64 if index is None else 2**16  # without --process all run on this machine
    if count is not None and not 1 <= count <= most:
        raise InputError(f"--processes {count} must be 1 to {most}")
    if index is not None or coordinator is not None:
        if count is None or index is None or coordinator is None:
            raise InputError("--process I needs --processes N and --coordinator HOST:PORT")
        if not 0 <= index < count:
            last = count - 1
            raise InputError(f"--process {index} is not one of 0 to {last} (--processes {count})")
        port = re.fullmatch(r".+:([1-9]\d{0,4})", coordinator, re.ASCII)
        if port is None or int(port[1]) > 65535:
            raise InputError(f"--coordinator {coordinator} is not HOST:PORT, with PORT up to 65535")
    if count is not None and overrides.get("mesh.distributed") == "true":
        raise InputError("mesh.distributed=true finds processes itself; omit it, or --processes")


def check_free(out_dir: Path) -> None:
    """Raises InputError if `out_dir` already holds a run, or cannot hold one."""
    check_writable(out_dir, "out_dir ", checkpoints=True)
    if what := holds(out_dir):
        resumable = what == "a run" and (out_dir / "config.yaml").is_file()
        resume = "add --resume to continue it, or " * resumable
        raise InputError(f"out_dir {out_dir} already holds {what}; {resume}name another")


def holds(folder: Path) -> str | None:
    """What a folder already holds, which no other command may overwrite, or None."""
    known = {"packed.json": "packed weights", "adapter_config.json": "adapters for peft"}
    known |= {"config.json": "a model", "checkpoints/0": "weights from jaxllm convert"}
    known |= dict.fromkeys(("config.yaml", "metrics.jsonl", "checkpoints"), "a run")
    known |= dict.fromkeys(("prepare.json", "chat.json"), "prepared data")
    known |= dict.fromkeys(("run.json", "loss.png", "report.html"), "a report")
    return next((what for name, what in known.items() if (folder / name).exists()), None)


def check_writable(folder: Path, name: str = "", *, checkpoints: bool = False) -> None:
    """Raises InputError unless `folder` is a writable folder or can be created."""
    refuse = f"{name}{folder} cannot be created"
    # Orbax, which globs and encodes the path, would lose all arrays below a folder [a].
    odd = checkpoints and re.search(r"[*?[\\\ud800-\udfff]", os.path.realpath(folder))
    if odd:
        raise InputError(f"{refuse}: checkpoints cannot have {odd[0]!r} in their path; rename it")
    if re.match(r"\w{2,}:/", str(folder)):  # gs://bucket would become a folder "gs:" here
        raise InputError(f"{refuse}: it is an address; name a local folder, or mount it as one")
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder.is_symlink():
            link = f"it is a symbolic link to {os.readlink(folder)}, which does not exist"
            raise InputError(f"{refuse}: {link}; name another") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{refuse}: {getattr(error, 'strerror', error)}; name another") from error
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "is not writable" if existing.is_dir() else "is a file"
        raise InputError(f"{refuse}: {existing} {why}; name another")


def check_exists(folder: Path, name: str = "") -> None:
    """Raises InputError if a folder of weights is missing, before the slow import of JAX."""
    if not os.path.exists(folder.expanduser()):
        what = f"a run's directory, packed weights or a Hugging Face folder{on_hub(folder)}"
        raise InputError(f"{name}{folder} does not exist: name {what}")


def _resumed_config(args: argparse.Namespace, overrides: dict[str, str]) -> Config:
    for folder in (args.out_dir, args.out_dir / "checkpoints"):
        check_writable(folder, "out_dir ", checkpoints=True)
    stored_path = str(args.out_dir / "config.yaml")
    if not os.path.isfile(stored_path):
        raise InputError(f"out_dir {args.out_dir} holds no run to resume (no config.yaml)")
    if (what := holds(args.out_dir)) not in ("a run", "a model"):  # a run may have a config.json
        fix = f"start a run with --model.init_from {args.out_dir} and another --out_dir"
        raise InputError(f"out_dir {args.out_dir} holds {what}, not a run to resume; {fix}")
    stored, wanted = load(stored_path), load(args.config or stored_path, overrides)
    check_kept(stored.model_dump(), wanted.model_dump(), RATE & set(overrides), args.out_dir)
    return wanted


def check_kept(stored: dict, wanted: dict, free: Set[str], out_dir: Path) -> str:
    """The settings that a resumed run changes, for the end of a line; "" if it changes none.

    Raises InputError for a setting that it cannot change, unless it is in `free`.
    An earlier version may have stored fewer settings.
    """
    changed, unread = [], set() if wanted["model"].get("lora") else {"model.init_from"}
    free = {*free, *CHANGEABLE} - unread  # only adapters read their initial weights again
    old, new = flat(stored), flat(wanted)
    # Another model has other values everywhere, so its type comes first.
    for key in ["model.type", *sorted(new)]:
        value, before = new[key], old.get(key, new[key])
        if value == before:
            continue
        changed.append(f"{key}={value!r} (was {before!r})")
        if key not in free and not key.startswith(("mesh.", "sample.", "profile.")):
            weights = f" from its weights (--model.init_from {out_dir}, another --out_dir)"
            fits = not key.startswith("model.")  # its weights do not fit another model
            fix = f"to change it say --{key} {value} here" if key in RATE else "restore it"
            raise InputError(
                f"{key}={value!r} differs from {before!r}, which the run in {out_dir} keeps: {fix},"
                f" or start a new run{weights * fits}"
            )
    return f"; changed: {', '.join(changed)}" if changed else ""
