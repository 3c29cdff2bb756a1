"""Trains a model: python train.py --config llama3_small.yaml [--section.key VALUE ...]

Reads the configuration, builds data, model and compiled step, loops, logs and saves.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from jaxllm import config as configs
from jaxllm.errors import InputError
from jaxllm.metrics import RunLog, SilentLog, error_line, peak_flops

# What a resumed run may change; everything else would make it another run.
CHANGEABLE = (
    "train.steps train.grad_accum train.log_every train.eval_every train.eval_batches"
    " train.checkpoint_every train.keep_checkpoints train.deterministic model.kernels model.remat"
    " data.prefetch data.cache_dir data.path data.val_path mesh.data mesh.fsdp mesh.tensor"
    " mesh.distributed sample.prompt sample.tokens sample.temperature sample.top_k sample.seed"
).split()


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        arguments, overrides = parse(sys.argv[1:] if argv is None else argv)
        return train(arguments, overrides)
    except InputError as e:
        error_line(str(e))
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(f"{message}; see --help")


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Splits the command line into our own options and the --section.key overrides."""
    parser = _Parser(
        prog="train.py",
        description="Trains a language model; every value of the configuration can be overridden.",
        epilog="keys of the configuration:\n" + configs.help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="NAME_OR_PATH", help="a file, or a name in configs/")
    parser.add_argument("--out_dir", type=Path, metavar="DIR", help="default runs/<config>-<time>")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out_dir"
    )
    arguments, rest = parser.parse_known_args(argv)
    overrides = {}
    words = iter(rest)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise InputError(f"unexpected argument {word}; values follow their --section.key")
        if not equals:
            value = next(words, None)
            if value is None or (value.startswith("--") and "." in value):
                raise InputError(f"--{key} needs a value")
        overrides[key] = value
    if arguments.resume and arguments.out_dir is None:
        raise InputError("--resume needs --out_dir, the directory of the run to go on with")
    if arguments.config is None and not arguments.resume:
        raise InputError("--config is missing: a file, or a name in configs/ like llama3_small")
    return arguments, overrides


def read_config(arguments: argparse.Namespace, overrides: dict[str, str]) -> configs.Config:
    """The configuration of a new run, or the stored one of a resumed run with its overrides."""
    if not arguments.resume:
        out_dir = arguments.out_dir
        if out_dir is not None and out_dir.exists():
            if not out_dir.is_dir():
                raise InputError(f"out_dir {out_dir} is a file")
            if any((out_dir / name).exists() for name in ("config.yaml", "checkpoints")):
                raise InputError(
                    f"out_dir {out_dir} already holds a run; add --resume to go on with it, or name"
                    " another directory"
                )
        return configs.load(arguments.config, overrides)
    stored_path = arguments.out_dir / "config.yaml"
    if not stored_path.is_file():
        raise InputError(f"out_dir {arguments.out_dir} holds no run to resume (no config.yaml)")
    stored = configs.load(str(stored_path))
    wanted = configs.load(arguments.config or str(stored_path), overrides)
    old, new = flatten(stored.model_dump()), flatten(wanted.model_dump())
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key) and key not in CHANGEABLE:
            raise InputError(
                f"{key}={new.get(key)!r} differs from {old.get(key)!r} of the run in"
                f" {arguments.out_dir}; a resumed run keeps it"
            )
    return wanted


def flatten(values: dict, prefix: str = "") -> dict:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


class StopSignals:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one stops at once."""

    def __enter__(self):
        self.received: int | None = None
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        self.received = number
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)


def train(arguments: argparse.Namespace, overrides: dict[str, str]) -> int:
    """The whole run; returns the exit status."""
    config = read_config(arguments, overrides)
    name = Path(arguments.config or "run").stem
    out_dir = arguments.out_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.train.deterministic:  # read by XLA when the GPU is first used
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()

    # JAX takes seconds to import: wrong arguments are told before that.
    import jax
    from jax.errors import JaxRuntimeError

    from jaxllm import sharding
    from jaxllm.checkpoint import Checkpoints
    from jaxllm.data import open_dataset
    from jaxllm.models import flops_per_token
    from jaxllm.training import Trainer
    from pallas_kernels import backend

    if config.mesh.distributed:
        jax.distributed.initialize()  # finds the others through the cluster's environment
    first = jax.process_index() == 0
    say = print if first else lambda *_, **__: None
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_model(config.model, mesh)
    sharding.check_batch(config.train, mesh)
    if config.model.kernels == "mosaic" and (lacks := backend.device_lacks("sm_90a")):
        raise InputError(f"model.kernels=mosaic cannot run here: {lacks}; use auto or xla")

    dataset = open_dataset(
        config.data,
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
    )
    checkpoints = Checkpoints(out_dir / "checkpoints", config.train.keep_checkpoints)
    start = checkpoints.newest() if arguments.resume else 0
    if start is None:
        raise InputError(f"{out_dir} holds no complete checkpoint to resume from")
    about = {
        "config": config.model_dump(),
        "data_fingerprint": dataset.fingerprint,
        "jax": jax.__version__,
    }
    samples = start * config.train.batch_size
    if arguments.resume:
        saved = checkpoints.about(start)
        if saved["data_fingerprint"] != dataset.fingerprint:
            raise InputError(
                f"the data changed since the checkpoint (fingerprint {dataset.fingerprint}, was"
                f" {saved['data_fingerprint']}): another corpus, tokenizer or Python version"
            )
        samples = saved["samples"]
        if start >= config.train.steps:
            raise InputError(
                f"{out_dir} is at step {start} of train.steps={config.train.steps}; raise"
                " --train.steps to go on"
            )

    device = jax.devices()[0]
    trainer = Trainer(config, mesh)
    tokens = config.train.batch_size * config.train.seq_len
    flops = tokens * flops_per_token(config.model, config.train.seq_len)
    peak = peak_flops(device.device_kind)
    say(f"model    {config.model.type}, {trainer.n_params:,} parameters")
    say(f"data     {dataset.description}")
    say(f"devices  {jax.device_count()} x {device.device_kind}, mesh {dict(mesh.shape)}")
    if peak is not None:
        say(
            f"MFU      {flops / tokens:,.0f} FLOPs a token (6 x matmul parameters + sequence mixing)"
            f" x tokens/s / ({jax.device_count()} x {peak / 1e12:.0f} TFLOP/s)"
        )
    state = checkpoints.restore(start, trainer.abstract_state()) if start else trainer.init()
    if first:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    if device.platform == "gpu":
        # A resumed process must run the very program of the first one: XLA picks its matmuls by
        # timing them, so another compilation may choose others and differ in the last bit.
        jax.config.update("jax_compilation_cache_dir", str(out_dir.resolve() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    clock = time.perf_counter()
    backend.forget()
    traced = trainer.trace_train_step()
    say("kernels  " + backend.explain().replace("\n", "\n         "))
    step_program = traced.lower().compile()
    say(f"compiled in {time.perf_counter() - clock:.1f} s; writing to {out_dir}", flush=True)
    evaluate = trainer.eval_step()

    world, rank = jax.process_count(), jax.process_index()
    batches = dataset.train_batches(config.train.batch_size, rank, world, start_sample=samples)
    log = (
        RunLog(out_dir, config.train.steps, start, tokens, flops, peak and peak * mesh.size)
        if first
        else SilentLog()
    )

    def validate(step: int) -> float:
        total, count = 0.0, 0.0
        for batch in dataset.val_batches(
            config.train.batch_size, rank, world, config.train.eval_batches
        ):
            loss, n = evaluate(state.params, trainer.put_batch(batch))
            total, count = total + float(loss), count + float(n)
        log.evaluation(step, total / count)
        return total / count

    def save(step: int, val_loss: float | None) -> None:
        position = samples + (step - start) * config.train.batch_size
        checkpoints.save(step, state, dict(about, samples=position), val_loss)

    def due(step: int, every: int) -> bool:
        return step == config.train.steps or (every > 0 and step % every == 0)

    def note(step: int, metrics: dict, began: float) -> float:
        """Waits for a step, logs it, and returns the time it was done."""
        values = {k: float(v) for k, v in metrics.items()}
        now = time.perf_counter()
        if step % config.train.log_every == 0 or step == config.train.steps:
            log.train(step, values["loss"], values["lr"], values["grad_norm"], now - began)
        if not values["loss"] < float("inf"):
            raise InputError(
                f"the loss is {values['loss']} at step {step}; lower optimizer.learning_rate or"
                f" look at the data (samples {samples + (step - 1 - start) * config.train.batch_size}"
                " on); the last checkpoint is kept"
            )
        return now

    try:
        with StopSignals() as stop:
            waiting = None  # the step before: the devices work on the next while it is logged
            clock = time.perf_counter()
            for step in range(start + 1, config.train.steps + 1):
                state, metrics = step_program(state, trainer.put_batch(next(batches)))
                if waiting is not None:
                    clock = note(*waiting, clock)
                waiting = (step, metrics)
                stopping = stop.received is not None
                evaluating = due(step, config.train.eval_every)
                saving = due(step, config.train.checkpoint_every) or stopping
                if evaluating or saving:
                    note(*waiting, clock)
                    waiting = None
                    val_loss = validate(step) if evaluating and not stopping else None
                    if saving:
                        save(step, val_loss)
                    clock = time.perf_counter()
                if stopping:
                    checkpoints.close()
                    log.draw()
                    log.say(
                        f"stopped by {signal.Signals(stop.received).name} after step {step}; saved"
                        f" in {out_dir}, go on with --resume --out_dir {out_dir}"
                    )
                    return 128 + stop.received
        checkpoints.close()
        log.draw()
        if config.sample.tokens:
            log.say(sample_text(config, trainer, state, dataset))
        log.say(f"done: {out_dir}")
        return 0
    except JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise InputError(
            f"out of memory on the {device.device_kind}: lower train.batch_size={config.train.batch_size},"
            " or raise train.grad_accum, or set model.remat=block"
        ) from e
    finally:
        log.close()


def sample_text(config, trainer, state, dataset) -> str:
    """A sample of text from the trained model, for the end of the run."""
    import jax

    from jaxllm.sample import generate

    if dataset.tokenizer is None:
        return "no sample: the data came without a tokenizer (data.tokenizer)"
    prompt = dataset.tokenizer.encode(config.sample.prompt)
    if not prompt:
        return "no sample: sample.prompt is empty"
    shape = trainer.mesh.shape
    with jax.set_mesh(trainer.mesh):
        tokens = generate(
            trainer.graph,
            state.params,
            prompt,
            config.sample,
            window=config.train.seq_len,
            rows=shape["data"] * shape["fsdp"],
        )
    return f"sample:\n{config.sample.prompt}{dataset.tokenizer.decode(tokens)}"


if __name__ == "__main__":
    sys.exit(main())
