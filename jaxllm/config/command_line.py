"""Command lines: what all commands share, and the words of `jaxllm train`."""

import argparse
import errno
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm import config as configs
from jaxllm.config.describe import INDENT, columns
from jaxllm.errors import InputError, RunError, error_line, memory_errors

# What a resumed run may change; everything else would make it another run.
CHANGEABLE = frozenset(
    """
    train.steps train.grad_accum train.log_every train.eval_every train.eval_batches
    train.checkpoint_every train.keep_checkpoints train.skip_spikes train.max_skips
    train.deterministic train.tracker model.kernels model.remat data.prefetch data.cache_dir
    data.path data.val_path mesh.data mesh.fsdp mesh.tensor mesh.distributed sample.prompt
    sample.tokens sample.every sample.temperature sample.top_k sample.seed profile.steps
    """.split()
)


class Arguments(NamedTuple):
    """What to run, where, whether it goes on with a run that is there, or only says its needs."""

    config: configs.Config
    out_dir: Path
    resume: bool
    dry_run: bool


def read(argv: list[str]) -> Arguments:
    """Reads the command line; raises InputError, prints help for --help."""
    words, overrides = _parse(argv)
    if words.resume:
        return Arguments(_resumed_config(words, overrides), words.out_dir, True, words.dry_run)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    out_dir = words.out_dir or Path("runs") / f"{Path(words.config).stem}-{stamp}"
    check_free(out_dir)
    return Arguments(configs.load(words.config, overrides), out_dir, False, words.dry_run)


class _Help(argparse.RawDescriptionHelpFormatter):
    """At most 100 columns, on wider terminals too."""

    def __init__(self, prog: str, **options):
        super().__init__(prog, max_help_position=INDENT, width=columns(), **options)


class Parser(argparse.ArgumentParser):
    """Whatever is wrong with the words becomes an InputError; --batch-size is --batch_size."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def add_argument(self, *names: str, **options) -> argparse.Action:
        hyphens = [name.replace("_", "-") for name in names if name.startswith("--")]
        action = super().add_argument(*names, *hyphens, **options)
        action.option_strings = [name for name in names if name.startswith("-")]  # those in --help
        return action

    def error(self, message):
        raise InputError(f"{message}; see --help")


def exit_status(
    run: Callable[[], int | None], *, memory: str = "use a larger one", interrupted: str = ""
) -> int:
    """Runs a command: its own status (None: 0 done), 1 failed on the way, 2 bad input, 130 Ctrl-C.

    memory: what helps if the device is out of it.  interrupted: a line on what Ctrl-C left.
    """
    status = 0
    try:
        with memory_errors(memory):
            status = run() or 0
        sys.stdout.flush()
    except InputError as error:
        error_line(str(error))
        return 2
    except RunError as error:
        error_line(str(error))
        return 1
    except KeyboardInterrupt:
        logging.disable()  # Orbax would tell the checkpoint that it has to give up
        print(interrupted, file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        if error.errno == errno.ENOSPC:
            error_line(f"{error.filename or 'standard output'} cannot be written: {error.strerror}")
            return 1
        # Else the reader of a pipe has gone: `| head`.
    return status


def _parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    parser = Parser(
        prog="jaxllm train",
        usage="jaxllm train --config NAME_OR_PATH [--section.key VALUE ...]\n"
        "       jaxllm train --resume --out_dir DIR [--section.key VALUE ...]",
        description="Trains a language model.  Every value of its configuration has an option that"
        " overrides it.",
        epilog=configs.help_text(),
    )
    parser.add_argument(
        "--config",
        metavar="NAME_OR_PATH",
        help="a YAML file, or one of "
        + ", ".join(sorted(path.stem for path in configs.CONFIG_DIR.glob("*.yaml"))),
    )
    parser.add_argument(
        "--out_dir", metavar="DIR", help="of the run (default: runs/<config>-<time>)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out_dir"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="say what memory and time the run needs, and stop; compiles and writes nothing",
    )
    arguments, rest = parser.parse_known_args(argv)
    overrides = read_overrides(rest)
    if arguments.out_dir == "":
        raise InputError("--out_dir is empty; name a directory, or leave it out")
    arguments.out_dir = arguments.out_dir and Path(arguments.out_dir).expanduser()
    if arguments.resume and arguments.out_dir is None:
        raise InputError("--resume needs --out_dir, the directory of the run to go on with")
    if arguments.config is None and not arguments.resume:
        raise InputError("--config is missing: a file, or a name in configs/ like llama3_small")
    return arguments, overrides


def read_overrides(words: list[str]) -> dict[str, str]:
    """{"section.key": value} of the words --section.key VALUE and --section.key=VALUE."""
    overrides = {}
    rest = iter(words)
    for word in rest:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise InputError(f"unexpected argument {word}; a value follows its --section.key")
        if not equals:
            value = next(rest, None)
            if value is None or (value.startswith("--") and "." in value):
                raise InputError(f"--{key} needs a value")
        overrides[key.replace("-", "_")] = value
    return overrides


def check_free(out_dir: Path) -> None:
    """Raises InputError if a run is there, or cannot be."""
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"out_dir {out_dir} is a file")
    check_writable(out_dir, "out_dir ")
    if any((out_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
        raise InputError(
            f"out_dir {out_dir} already holds a run; add --resume to go on with it, or name another"
        )


def check_writable(folder: Path, name: str = "") -> None:
    """Raises InputError if a folder cannot be made where it is to be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise InputError(f"{name}{folder} cannot be made: {there} {why}; name another")


def _resumed_config(words: argparse.Namespace, overrides: dict[str, str]) -> configs.Config:
    stored_path = words.out_dir / "config.yaml"
    if not stored_path.is_file():
        raise InputError(f"out_dir {words.out_dir} holds no run to resume (no config.yaml)")
    stored = configs.load(str(stored_path))
    wanted = configs.load(words.config or str(stored_path), overrides)
    old, new = _flat(stored.model_dump()), _flat(wanted.model_dump())
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key) and key not in CHANGEABLE:
            raise InputError(
                f"{key}={new.get(key)!r} differs from {old.get(key)!r} of the run in"
                f" {words.out_dir}; a resumed run keeps it"
            )
    return wanted


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
