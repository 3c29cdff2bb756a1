"""Trains a model: jaxllm train --config llama3_small.yaml [--section.key VALUE ...]

Reads the configuration, builds data, model and compiled step (launch.py), then trains, logs and
saves.
"""

import argparse
import contextlib
import gc
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from pathlib import Path
from statistics import fmean

from jaxllm.config import Config, command_line
from jaxllm.data.cache import keep_compiled, source_digest
from jaxllm.data.opening import check_paths, open_dataset
from jaxllm.errors import Corruption, InputError, RunError, memory_errors
from jaxllm.files import inside, own
from jaxllm.train import processes, report
from jaxllm.train.metrics import check_tracker, read_metrics
from jaxllm.train.process import StopSignals, no_long_pauses, set_xla_flags


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: failed, 2: bad input, 128 + n: stopped by n."""
    return command_line.exit_status(
        lambda: _run(argv), memory="lower train.batch_size, or set model.remat=block"
    )


def _run(argv: list[str] | None) -> int:
    source_digest()  # cached before the code is imported, so it digests what runs
    arguments = command_line.read(argv)
    config = arguments.config
    if arguments.resume and not arguments.restart:
        check_checkpoints(arguments.out_dir, config.train.checkpoint_every)
    gpus = None if arguments.dry_run == "here" else arguments.dry_run
    try:
        check_input(config, arguments.resume, arguments.out_dir)
    except InputError as e:
        if arguments.dry_run is None:
            raise
        print(f"note: {e}", file=sys.stderr)  # the run itself may start elsewhere, or later
    if gpus is not None:  # such as 64xH200, which this machine need not have
        os.environ["JAX_PLATFORMS"] = "cpu"
        from jaxllm.train.predict import predict

        print(predict(config, gpus))
        return 0
    set_xla_flags(config.train.deterministic)
    if where := processes.places(arguments):
        return processes.watch(where, lambda: _train(arguments))
    return _train(arguments)


def _start_devices() -> None:
    """Starts JAX's backend; the first code that uses a device waits for it and gets its error."""
    import jax

    with contextlib.suppress(Exception):
        jax.devices()


def _train(arguments: argparse.Namespace) -> int:
    threading.Thread(target=_start_devices).start()  # CUDA starts while Python imports the rest
    if arguments.dry_run:
        return dry_run(arguments.config)
    resume, status, again = arguments.resume, None, False
    while status is None:
        with contextlib.ExitStack() as stack:
            if again:
                gc.collect()  # frees the last attempt's arrays before the state is loaded again
            gc.set_threshold(100_000)  # 700 costs 1.5 of the 11 s until the 1.3B is lowered
            run = Run(arguments.config, arguments.out_dir, resume, stack)
            alone = run.world == 1
            stops = stack.enter_context(StopSignals()).after if alone else processes.stops_after
            with no_long_pauses():
                status = run.loop(stops, again)
        del run
        resume = again = True
    return status


def check_checkpoints(out_dir: Path, every: int) -> None:
    """Raises InputError if a run's checkpoints are gone; before the first, the folder is empty."""
    folder = out_dir / "checkpoints"
    last = lambda: max((row["step"] for row in read_metrics(out_dir / "metrics.jsonl")), default=0)
    if not folder.is_dir() or (not any(folder.iterdir()) and 0 < every < last()):
        fix = "copy its checkpoints/, or add --restart to begin again and replace its metrics"
        raise InputError(f"out_dir {out_dir} has no checkpoints to resume from; {fix}")


def check_input(config: Config, resume: bool, out_dir: Path) -> None:
    """Raises InputError for a valid configuration that cannot be trained, or names missing files.

    Does not import JAX, which takes seconds.
    resume: the weights come from the checkpoint, except the frozen base of adapters.
    """
    for key in ("compute_dtype", "residual_dtype"):
        if getattr(config.model, key) == "float16":
            raise InputError(
                f"model.{key}=float16 is for inference only: gradients below 6e-8 would be lost"
                " without loss scaling; train in bfloat16 (or float32)"
            )
    if config.model.init_from is not None and (config.model.adapters or not resume):
        command_line.check_exists(Path(config.model.init_from), "model.init_from=")
    check_paths(data := config.data)
    if data.text_column != "text" and data.source not in ("jsonl", "parquet") and not resume:
        raise InputError(
            f"data.text_column={data.text_column} is not read with source={data.source}: omit it,"
            " or set text"
        )
    for path in filter(None, (data.path, data.val_path)):
        for key, folder in (("out_dir ", out_dir), ("data.cache_dir=", data.cache_dir)):
            if folder and inside(folder, path) and data.source in ("text", "jsonl", "chat"):
                raise InputError(f"{key}{folder} is inside the data, {path}: name one outside it")
    check_tracker(config)


def dry_run(config: Config) -> int:
    """Prints what a run needs; compiles and writes nothing.  Raises InputError if it cannot fit."""
    from jaxllm.train import estimate, launch

    mesh = launch.join_devices(config)
    path = config.model.init_from  # may be on another machine, unless adapters need its packing
    opens = config.model.adapters is not None or (path is not None and Path(path).exists())
    weights = launch.open_initial_weights(config, None, None) if opens else None
    trainer = launch.make_trainer(config, mesh, weights)
    launch.print_header(trainer, None)
    launch.trace_step(trainer)
    print(f"kernels  {launch.kernel_summary()}")
    print(estimate.summarize(trainer))
    return 0


class Run:
    """One training run: the constructor builds, checks and compiles it; `loop` trains.

    stack: gets the lock of the run's directory, which keeps other processes out.
    """

    def __init__(self, config: Config, out_dir: Path, resume: bool, stack: contextlib.ExitStack):
        # Imported late, because JAX takes seconds and a bad command line should fail at once.
        import jax

        from jaxllm import sharding
        from jaxllm.train import launch
        from jaxllm.train.checkpoint import Checkpoints
        from jaxllm.train.profiling import StepClock, StepTrace
        from jaxllm.weights.checksums import tokenizer_digest

        self.config, self.out_dir, train = config, out_dir, config.train
        self.chat = config.data.source == "chat"
        self.advice = (
            f"lower train.batch_size={train.batch_size}, raise train.grad_accum, or set"
            " model.remat=block"
        )
        self.mesh = launch.join_devices(config)
        self.part = sharding.batch_part(self.mesh)
        self.world, self.rank = jax.process_count(), jax.process_index()
        self.holds = lambda: True
        if self.rank == 0:  # Checkpoints would delete another process's running save
            self.holds = stack.enter_context(own(out_dir))
            if not resume:  # another process may have made it while this one started
                command_line.check_free(out_dir)
        self.checkpoints = Checkpoints(out_dir / "checkpoints", train.keep_checkpoints)
        newest = self.checkpoints.newest() if resume else None
        if resume and newest is None:
            print(f"resume   {out_dir} holds no complete checkpoint: starting again")
        weights = launch.open_initial_weights(config, self.checkpoints, newest)
        self.trainer = launch.make_trainer(config, self.mesh, weights)
        origin = (weights and weights.text) if newest is None else out_dir
        data = launch.with_models_tokenizer(config.data, origin)
        self.dataset = open_dataset(config.model_copy(update={"data": data}))
        self.prompt = launch.prompt_of(config.sample, self.dataset)
        self.start, self.samples, saved, changed = 0, 0, {}, ""
        self.skips = 0  # updates skipped in a row, up to the last recorded step
        self.times: list[float] = []  # seconds of each step since the last logged one
        if newest is not None:
            self.start = newest
            self.samples = self.checkpoints.samples(newest, self.dataset.fingerprint)
            saved, now = self.checkpoints.about(newest), config.model_dump()
            free = command_line.RATE  # config.yaml may have changed since this checkpoint
            changed = command_line.check_kept(saved.get("config", {}), now, free, out_dir)
            launch.check_unfinished(out_dir, newest, train.steps)
        launch.print_header(self.trainer, self.dataset)
        if self.start < train.steps:
            self.checkpoints.check_disk_space(self.trainer.abstract_state().saved())
        if newest is not None:
            print(f"resume   from the checkpoint of step {newest} in {out_dir}{changed}")
        keep_compiled()
        # Weights are read and packed while XLA compiles; both take equally long for a large model.
        with memory_errors(self.advice), ThreadPoolExecutor(1) as pool:
            fresh, lowered = self.start == 0, threading.Event()
            compiling = pool.submit(launch.compile_step, self.trainer, out_dir, fresh, lowered.set)
            compiling.add_done_callback(lambda _: lowered.set())  # also if it failed
            if newest is None and weights is None:
                lowered.wait()  # drawing weights in Python would halve the speed of lowering
            self.state, self.base = launch.initial_state(
                self.trainer, self.checkpoints, newest, weights
            )
            self.step_program, self.canary = compiling.result()
        self.evaluate = self.trainer.eval_step()
        # Only process 0 traces: processes on one machine would write to the same file.
        span = range(*config.profile.span) if self.rank == 0 else range(0)
        self.clock = StepClock(self._record)
        self.trace = StepTrace(span, out_dir / "profile", self.clock)
        try:
            self.log = launch.open_log(self.trainer, self.dataset, out_dir, self.start, saved)
        except OSError as e:
            raise InputError(f"cannot write to {e.filename or out_dir}: {e.strerror}") from e
        self.tokenizer = tokenizer_digest(out_dir)
        if self.log.damage:
            self.log.message(f"resume   metrics.jsonl is damaged: {self.log.damage}")

    def loop(self, stops: Callable[[int], int | None], again: bool) -> int | None:
        """Trains to the last step or a signal; returns the exit status, None to roll back.

        stops: returns the signal that stops the run after a step, or None.
        again: whether this run has rolled back to its first step, which it does only once.
        """
        batches = self.dataset.train_batches(self.config.train.batch_size, *self.part, self.samples)
        try:
            with memory_errors(self.advice):
                if self.chat and self.start == 0:
                    self._sample(0)  # the reply before training, for comparison
                step, received = self._take_steps(batches, stops)
            self._finish()
            if received is not None:
                options = shlex.join(["--resume", "--out_dir", str(self.out_dir.absolute())])
                self.log.message(
                    f"stopped by {signal.Signals(received).name} after step {step} and saved:"
                    f" continue with {options}"
                )
                return 128 + received
            if self.rank == 0:
                self.log.message(report.summarize_run(self.out_dir, self.prompt, self.chat))
            return 0
        except RunError as e:
            with contextlib.suppress(RunError):
                self.checkpoints.close()  # waits for a save in progress
            if not isinstance(e, Corruption):
                raise
            stuck = again and (self.checkpoints.on_disk() or 0) == self.start
            if stuck or self.config.train.on_corruption == "stop":
                advice = "continue with --resume, on other devices if it happens again"
                raise RunError(f"{e}; {advice}") from e
            self.log.message(f"{e}; going on from the newest checkpoint")
            del self.state  # makes room for the restored state
            return None
        finally:
            self.trace.close()
            batches.close()
            self.log.close()

    def _take_steps(
        self, batches: Iterator[dict], stops: Callable[[int], int | None]
    ) -> tuple[int, int | None]:
        """Takes all steps, or until a signal; returns (last step, signal or None)."""
        steps = self.config.train.steps
        # A signal or a kill may have left out the evaluation or the sample of the saved step.
        due = self._due(self.start) - self.log.logged - {"checkpoint"} if self.start else set()
        self._evaluate_sample_save(self.start, due)
        for step in range(self.start + 1, steps + 1):
            self.trace.before(step)
            batch = self.trainer.put_batch(next(batches))
            if self.canary is not None and step % self.config.train.verify_every == 0:
                self.state, metrics = self.canary.take(step, self.state, batch)
            else:
                self.state, metrics = self.step_program(self.state, batch)
            self.clock.started(step, metrics)
            # Read only once per step: a later signal takes effect after the next step.  The last
            # step ignores it.
            received = stops(step) if step < steps else None
            due = {"checkpoint"} if received is not None else self._due(step) - {"loss"}
            if kernels := self.trace.after(step, received is not None):
                self.log.message(kernels)
            if due:
                self._evaluate_sample_save(step, due, ends=received is not None or step == steps)
            if received is not None:
                return step, received
        return steps, None

    def _due(self, step: int) -> set[str]:
        """What is due after a step, by its key in metrics.jsonl, and "checkpoint"."""
        train = self.config.train
        every = {"loss": train.log_every, "val_loss": train.eval_every}
        every |= {"sample": self.config.sample.every, "checkpoint": train.checkpoint_every}
        return {key for key, n in every.items() if step == train.steps or (n and step % n == 0)}

    def _evaluate_sample_save(self, step: int, due: set[str], ends: bool = False) -> None:
        if not self.holds():
            fix = "move it back and --resume, or start again"
            raise RunError(f"{self.out_dir} was deleted or moved while the run wrote to it: {fix}")
        with self.clock.stopped():
            val_loss = self._validate(step) if "val_loss" in due else None
            if step == self.config.train.steps and val_loss is not None and not isfinite(val_loss):
                raise RunError(f"the run ends at a loss of {val_loss}; {self._not_finite(step)}")
            if "sample" in due:
                self._sample(step)
            # While updates are skipped, parameters may be bad: a save would replace good ones.
            if "checkpoint" in due and (ends or not self.skips):
                self._save(step, val_loss)

    def _finish(self) -> None:
        """Waits for the last checkpoint; writes loss.png and report.html."""
        try:
            self.checkpoints.close()
        finally:  # a disk that is too full for a checkpoint may have room for these
            self.log.draw()
            if self.rank == 0:
                try:
                    report.write([self.out_dir], self.out_dir / "report.html")
                except (InputError, OSError) as e:  # nothing was logged yet; the disk is full
                    self.log.message(f"no report.html: {getattr(e, 'strerror', e)}")

    def _record(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Logs a finished step; raises RunError for corruption or too many skipped updates."""
        train = self.config.train
        if self.canary is not None:
            self.canary.check(step)
        loss, lr, norm, skips = (values[k] for k in ("loss", "lr", "grad_norm", "skips"))
        self.skips = int(skips)
        self.times.append(seconds)
        if skips or "loss" in self._due(step):
            self.log.train(step, loss, lr, norm, fmean(self.times), self.skips)
            self.times.clear()
        if not skips:
            return
        self.log.message(
            f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}: update skipped"
            f" ({skips:.0f} in a row)"
        )
        if skips >= train.max_skips:
            raise RunError(self._why_skipped(step, isfinite(loss) and isfinite(norm)))

    def _why_skipped(self, step: int, finite: bool) -> str:
        """One line with the step, its samples, and what was not finite, if anything."""
        train, sample = self.config.train, self._samples_at(step - 1)
        text = (
            f"{train.max_skips} updates in a row were skipped (train.max_skips), up to step {step}"
            f" on samples {sample} to {sample + train.batch_size - 1};"
        )
        if finite:
            return f"{text} its loss is a spike; raise train.skip_spikes={train.skip_spikes}"
        return f"{text} {self._not_finite(step)}"

    def _not_finite(self, step: int) -> str:
        """The first non-finite layer of the current model on a step's samples, and the fix."""
        import jax

        from jaxllm.train.verify import first_not_finite

        train, sample = self.config.train, self._samples_at(step - 1)
        batches = self.dataset.train_batches(train.batch_size, *self.part, sample)
        batch = self.trainer.put_batch(next(batches))
        batches.close()
        with jax.set_mesh(self.mesh):
            layer = first_not_finite(self.trainer.graph, self.state.whole, **batch)
        fix = "lower optimizer.learning_rate, or resume from an older checkpoint"
        return f"first not finite: {layer}; {fix}"

    def _samples_at(self, step: int) -> int:
        return self.samples + (step - self.start) * self.config.train.batch_size

    def _validate(self, step: int) -> float:
        """Mean validation loss per token, in nats."""
        train = self.config.train
        total, count, whole = 0.0, 0.0, self.state.whole
        for batch in self.dataset.val_batches(train.batch_size, *self.part, train.eval_batches):
            loss, n = self.evaluate(whole, self.trainer.put_batch(batch))
            total, count = total + float(loss), count + float(n)
        self.log.evaluation(step, total / count)
        return total / count

    def _save(self, step: int, val_loss: float | None) -> None:
        about = {
            "config": self.config.model_dump(),
            "data_fingerprint": self.dataset.fingerprint,
            "samples": self._samples_at(step),
            **self.log.state(),
            **self.tokenizer,
        }
        if self.base is not None:
            about["base"] = self.base._asdict()
        if problem := self.checkpoints.save(step, self.state.saved(), about, val_loss):
            self.log.message(problem)

    def _sample(self, step: int) -> None:
        """Logs a text that the current model writes."""
        import jax

        from jaxllm import sharding
        from jaxllm.infer.decode import generate

        config, tokenizer = self.config.sample, self.dataset.tokenizer
        if config.tokens == 0:
            return
        if tokenizer is None:
            self.log.message("no sample: the data has no tokenizer (data.tokenizer)")
            return
        asked = [{"role": "user", "content": self.prompt}]
        prompt = tokenizer.chat(asked)[0] if self.chat else tokenizer.prompt(self.prompt)
        if not prompt:
            self.log.message("no sample: sample.prompt is empty")
            return
        mesh = sharding.whole_sequences(self.mesh)
        rows = mesh.shape["data"] * mesh.shape["fsdp"]
        # A model trained on separate documents cannot continue past the end of one.
        ends = tokenizer.ends if self.dataset.separator is not None else ()
        ends = tokenizer.chat_ends if self.chat else ends
        model = self.trainer.graph, self.state.whole
        try:
            with memory_errors(self.advice), jax.set_mesh(mesh):
                tokens = generate(*model, prompt, config, sample=step, rows=rows, ends=ends)
        except RunError as e:
            self.log.message(f"no sample: {e}")
            return
        if self.chat:
            text = f"> {self.prompt}\n{tokenizer.decode(tokens, special=False)}"
        else:
            decode = lambda ids: tokenizer.decode(ids, clean=False)
            known = len(decode(prompt))  # the spaces after a prompt depend on it
            text = tokenizer.cleaned(self.prompt + decode(prompt + tokens)[known:])
        self.log.sample(step, text)
