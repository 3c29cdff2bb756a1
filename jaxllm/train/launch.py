"""Prepares a run: makes the mesh, opens weights and logs, restores, compiles."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm import sharding
from jaxllm.config import Config, DataConfig, SampleConfig
from jaxllm.data.loader import Dataset
from jaxllm.data.packing import Packed
from jaxllm.data.shards import Tokens
from jaxllm.errors import InputError
from jaxllm.files import write_whole
from jaxllm.infer.evaluate import text_bytes
from jaxllm.models import flops_per_token
from jaxllm.text import Tokenizer
from jaxllm.train import estimate, report
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.metrics import RunLog, SilentLog, Wandb, peak_flops
from jaxllm.train.programs import find_or_compile
from jaxllm.train.step import NONE, Trainer, TrainState
from jaxllm.train.verify import Canary
from jaxllm.weights.adapters import AdapterWeights, Base, load_base
from jaxllm.weights.pretrained import check_weights, load_params, open_weights
from jaxllm.weights.run import RunWeights
from pallas_kernels import dispatch


def join_devices(config: Config) -> Mesh:
    """The mesh over all devices of all processes.

    Raises InputError if the model, the batch or the kernels do not fit the devices.
    """
    mesh = sharding.make_mesh(config.mesh)
    sharding.check(config, mesh)
    check_kernels(config)
    return mesh


def check_kernels(config: Config) -> None:
    """Raises InputError if these devices cannot run model.kernels=mosaic or train.fp8."""
    if (fp8 := config.train.fp8) != "none" and jax.default_backend() != "cpu":  # a CPU emulates it
        if lack := dispatch.device_lacks("sm_89"):
            raise InputError(f"train.fp8={fp8} cannot run here: {lack}; use none")
    if config.model.kernels == "mosaic" and (lack := dispatch.device_lacks("sm_90a")):
        other = ", or auto with JAXLLM_KERNELS=general set" * (not dispatch.device_lacks("sm_80"))
        raise InputError(f"model.kernels=mosaic cannot run here: {lack}; use auto or xla{other}")


def open_initial_weights(config: Config, checkpoints: Checkpoints | None, newest: int | None):
    """Opens the weights of model.init_from, or returns None.

    newest: the step to resume from; then only adapters need weights: the base that the checkpoint
    names, or model.init_from if the base has moved or model.init_from has changed.
    Raises InputError if the weights belong to another model.
    """
    if not config.model.init_from:
        return None
    if newest is None or checkpoints is None:
        weights = open_weights(config.model.init_from)
    elif config.model.adapters is None:
        return None
    else:
        about, named = checkpoints.about(newest), config.model.init_from
        base, before = Base(**about["base"]), about["config"]["model"]["init_from"]
        moved = named != before or not Path(base.path).exists()
        weights = open_weights(named if moved else base.path, base.step)
    check_weights(weights, config)
    return weights


def base_of(weights):
    """The frozen weights that adapters adapt, from the result of `open_initial_weights`."""
    return weights.base if isinstance(weights, AdapterWeights) else weights


def make_trainer(config: Config, mesh: Mesh, weights) -> Trainer:
    """The trainer, with `open_initial_weights`'s result; InputError if the model does not fit."""
    packing = weights and base_of(weights).packing
    estimate.check_fits(config, mesh, packing)
    return Trainer(config, mesh, packing)


def with_models_tokenizer(data: DataConfig, folder: Path | None) -> DataConfig:
    """The data with the model's tokenizer, if it has one, and the files beside the tokenizer.

    folder: of the initial weights or of the run to resume.
    Raises InputError if data.tokenizer is another tokenizer, or has another chat template.
    """
    if data.trains_tokenizer or folder is None or not (folder / "tokenizer.json").exists():
        return data
    own = folder / "tokenizer.json"
    if data.tokenizer is not None:
        Tokenizer(own).check_same(Tokenizer(data.tokenizer), chats=data.source == "chat")
    return data.model_copy(update={"tokenizer": str(own)})


def prompt_of(config: SampleConfig, data: Dataset) -> str:
    """The text that samples continue: sample.prompt, or the first words of the validation data."""
    if config.prompt is not None or data.tokenizer is None:
        return config.prompt or ""
    if not isinstance(data.val, Tokens):  # conversations
        return "Hello"
    ids = data.val.read(0, min(16, len(data.val)))
    text = data.tokenizer.decode(ids, special=False).partition("\ufffd")[0].strip()
    return " ".join(text.split()[:3]) or "The"


def check_unfinished(out_dir: Path, start: int, steps: int) -> None:
    """Raises InputError for a run that has all of its steps and its report.

    A run that was killed after its last checkpoint has no report, or an older one.
    """
    files = (out_dir / name for name in ("metrics.jsonl", "report.html"))
    logged, reported = (path.exists() and path.stat().st_mtime_ns for path in files)
    if start > steps or (start == steps and reported and reported >= logged):
        raise InputError(f"{out_dir} is at step {start} of {steps}; raise --train.steps")


def print_header(trainer: Trainer, data: Dataset | None) -> None:
    """Prints the model, the data, the devices, and how MFU is computed."""
    config, mesh = trainer.config, trainer.mesh
    steps, rows, warmup = config.train.steps, config.train.batch_size, config.optimizer.warmup_steps
    print(f"model    {trainer.describe()}")
    print(f"data     {'not opened in a dry run' if data is None else data.description}")
    if data is not None and isinstance(data.train, Packed):
        print(f"epochs   {steps * rows / len(data.train):.3g} ({steps:,} steps of {rows:,} rows)")
    elif data is not None and data.tokenizer is not None:
        print(f"text     {data.tokenizer.documents()}; {data.tokenizer.describe()}")
    vocab = config.model.vocab_size
    if data is not None and 2 * data.vocab_size < vocab:
        print(
            f"         the data has {data.vocab_size:,} of the {vocab:,} ids of model.vocab_size:"
            " the others cost memory and time, and are never read"
        )
    if warmup > steps:
        print(
            f"rate     optimizer.warmup_steps={warmup} exceeds train.steps={steps}: the learning"
            f" rate ends at {steps / warmup:.3g} of its peak"
        )
    print(f"devices  {estimate.device_name(mesh)}, mesh {dict(mesh.shape)}")
    if config.train.fp8 != "none":
        head = " and the head" * (config.train.fp8 == "all")
        print(
            f"fp8      the blocks' linear layers{head} in e4m3, their gradients in e5m2; evaluation"
            f" and samples in {config.model.compute_dtype}"
        )
    if peak := peak_flops(mesh.devices.flat[0].device_kind):
        flops = flops_per_token(config.model, config.train.seq_len)
        print(
            f"MFU      {flops:,.0f} FLOPs per token (6 x matmul parameters, 4 x if frozen, +"
            f" sequence mixing) x tokens/s / ({mesh.size} x {peak / 1e12:.0f} TFLOP/s)"
        )


def initial_state(
    trainer: Trainer, checkpoints: Checkpoints, restored: int | None, weights
) -> tuple[TrainState, Base | None]:
    """(state to train from, identity of the adapters' base).

    The state comes from the checkpoint of step `restored`, or is new.
    weights: the result of `open_initial_weights`.
    Raises InputError if the base has changed.
    """
    base, identity = NONE, None
    if trainer.lora is not None:
        held, model = base_of(weights), trainer.config.model
        base, checksum = load_base(held, model, trainer.abstract_base_params, trainer.mesh)
        step = held.step if isinstance(held, RunWeights) else None
        identity = Base(str(held.folder.absolute()), step, checksum, str(held.packing or ""))
        known = weights.expected if isinstance(weights, AdapterWeights) else None
        if restored is not None:
            known = Base(**checkpoints.about(restored)["base"])
        if known is not None:
            known._replace(path=identity.path).check(checksum, identity.packed)
    if restored is not None:
        saved = trainer.abstract_state().saved()
        return trainer.complete(checkpoints.restore(restored, saved), base), identity
    params = None
    if trainer.lora is None and weights is not None:
        params = load_params(weights, trainer.abstract_state().params)
    elif isinstance(weights, AdapterWeights):
        params = weights.adapters(trainer.abstract_params, trainer.mesh)
    return trainer.init(params, base), identity


def compile_step(
    trainer: Trainer, out_dir: Path, fresh: bool, lowered: Callable[[], None]
) -> tuple[Callable, Canary | None]:
    """Compiles the train step and, if asked for, the verified step; prints how the ops run.

    fresh: the run starts at step 0, so the matmul times in `out_dir` come from a killed process.
    lowered: called once Python's part is done.
    """
    config, device, timings = trainer.config.train, trainer.mesh.devices.flat[0], None
    if device.platform == "gpu":
        # A resumed process must run the same program.  XLA chooses its matmuls by timing them, so a
        # new compilation may choose differently and change the last bits: the run keeps the times.
        compiled = out_dir.resolve() / "compiled"
        if config.autotune and config.deterministic and jax.process_count() == 1:
            timings = compiled / "timings.txt"
        if fresh and jax.process_index() == 0:
            (compiled / "timings.txt").unlink(missing_ok=True)  # the folder may be the user's
    clock = time.perf_counter()
    find = functools.partial(find_or_compile, trainer, timings=timings, lowered=lowered)
    program, canary = find(trace_step), None
    print(f"kernels  {kernel_summary()}")
    if config.verify_every:
        canary = Canary(trainer, find(Trainer.trace_verified_step))
    print(f"compiled in {time.perf_counter() - clock:.1f} s, writing to {out_dir}")
    return program, canary


def trace_step(trainer: Trainer) -> jax.stages.Traced:
    """Traces the train step; raises InputError if its ops cannot run as asked for."""
    try:
        return trainer.trace_train_step()
    except NotImplementedError as e:  # only kernels=mosaic raises it
        raise InputError(f"model.kernels=mosaic cannot run: {e}; use auto or xla") from e


def kernel_summary() -> str:
    """How the traced ops run: `dispatch.explain()`, or a line if all run on XLA for one reason."""
    decisions = dispatch.decisions()
    reasons = {decision.why for decision in decisions}
    if len(reasons) == 1 and all(decision.runs == "xla" for decision in decisions):
        return f"all ops run on XLA: {reasons.pop()}"
    return dispatch.explain().replace("\n", "\n         ")


def open_log(
    trainer: Trainer, dataset: Dataset, out_dir: Path, start: int, saved: dict
) -> RunLog | SilentLog:
    """Creates the run's directory with tokenizer.json, config.yaml and run.json; opens the log."""
    if jax.process_index() != 0:
        return SilentLog(out_dir, start)
    config, tokenizer = trainer.config, dataset.tokenizer
    tokens = config.train.batch_size * config.train.seq_len
    if tokenizer is not None:  # makes the directory self-contained
        tokenizer.copy_to(out_dir)
    # Written first: a folder with checkpoints/ but no config.yaml could neither begin nor resume.
    write_whole(out_dir / "config.yaml", config.to_yaml().encode())
    # With this folder --resume restarts a run that was killed before its first checkpoint; it
    # refuses a copy of a run without the folder.
    (out_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = dict(model=trainer.describe(), tokens_per_step=tokens)
    about["device"] = estimate.device_name(trainer.mesh)
    if tokenizer is not None and isinstance(val := dataset.val, Tokens):
        # From all parts of the data, 2^16 tokens in stretches of 2^8.
        starts = range(0, len(val), max(256, len(val) // 256))
        val = Tokens([part for at in starts for part in val.slice(at, at + 256).parts])
        each = text_bytes(tokenizer, val, len(val) - 1) / (len(val) - 1)
        about |= {"tokenizer": tokenizer.digest, "bytes_per_token": each}
    report.describe(out_dir, about, dispatch.decisions())
    tracker, peak = None, peak_flops(trainer.mesh.devices.flat[0].device_kind)
    if config.train.tracker == "wandb":
        tracker = Wandb(out_dir, config.model_dump())
        print(f"tracker  wandb, {tracker.where}")
    peak = peak and peak * trainer.mesh.size
    flops = flops_per_token(config.model, config.train.seq_len) * tokens
    return RunLog(out_dir, config.train.steps, start, tokens, flops, peak, tracker, saved)
