"""Trains a model: python train.py --config llama3_small.yaml [--section.key VALUE ...]

Reads the configuration, builds data, model and the compiled step, loops, logs and saves.
"""

import contextlib
import shutil
import signal
import sys
import time
from math import isfinite
from pathlib import Path

from jaxllm.config import Config, command_line
from jaxllm.errors import InputError, RunError, memory_errors
from jaxllm.files import write_whole
from jaxllm.train.metrics import RunLog, SilentLog, peak_flops, read_metrics, say
from jaxllm.train.process import (
    StopSignals,
    alone,
    check_kernels,
    no_long_pauses,
    set_xla_flags,
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0: done, 1: it failed, 2: bad input, 128 + the signal that
    stopped it."""
    return command_line.exit_status(
        lambda: _run(sys.argv[1:] if argv is None else argv),
        memory="lower train.batch_size, or set model.remat=block",
    )


def _run(argv: list[str]) -> int:
    arguments = command_line.read(argv)
    command_line.check_trainable(arguments.config)
    set_xla_flags(arguments.config.train.deterministic)
    with contextlib.ExitStack() as held:
        run = Run(*arguments, held)
        with StopSignals() as stop, no_long_pauses():
            return run.loop(stop)


class Run:
    """One run of training: built, checked and compiled by the constructor, driven by `loop`.

    held: takes the lock of the run's directory, once there is something to keep others from.
    """

    def __init__(self, config: Config, out_dir: Path, resume: bool, held: contextlib.ExitStack):
        # JAX takes seconds to import: a wrong command line is told before that.
        import jax

        from jaxllm import sharding
        from jaxllm.data import open_dataset
        from jaxllm.train.checkpoint import Checkpoints
        from jaxllm.train.step import Trainer

        self.config, self.out_dir = config, out_dir
        self.lower = (
            f"lower train.batch_size={config.train.batch_size}, raise train.grad_accum, or set"
            " model.remat=block"
        )
        if config.mesh.distributed:
            try:
                jax.distributed.initialize()  # finds the others in the cluster's environment
            except (ValueError, RuntimeError) as e:
                raise InputError(
                    f"mesh.distributed=true finds no other hosts ({e}); start it on each of them"
                    " by Slurm or another cluster that JAX knows, or set mesh.distributed=false"
                ) from e
        self.world, self.rank = jax.process_count(), jax.process_index()
        self.say = say if self.rank == 0 else lambda text: None
        self.mesh = sharding.make_mesh(config.mesh)
        sharding.check_model(config.model, self.mesh)
        sharding.check_batch(config.train, self.mesh)
        check_kernels(config)
        if resume and self.rank == 0:  # Checkpoints deletes what another's save has not finished
            held.enter_context(alone(out_dir))
        self.checkpoints = Checkpoints(out_dir / "checkpoints", config.train.keep_checkpoints)
        newest = self.checkpoints.newest() if resume else None
        if resume and newest is None:
            self.say(f"resume   {out_dir} holds no complete checkpoint: it starts again")
        weights = None
        if config.model.init_from and newest is None:
            from jaxllm.weights.pretrained import check_weights, open_weights

            weights = open_weights(config.model.init_from)
            check_weights(weights, config)
        self.dataset = open_dataset(
            config.data,
            seq_len=config.train.seq_len,
            seed=config.train.seed,
            vocab_size=config.model.vocab_size,
        )
        self.trainer = Trainer(config, self.mesh)
        self.start, self.samples = 0, 0
        if newest is not None:
            self.start = newest
            self.samples = self.checkpoints.samples(newest, self.dataset.fingerprint)
            self._check_unfinished()
        self.tokens = config.train.batch_size * config.train.seq_len
        self._introduce()
        if self.start < config.train.steps:
            self.checkpoints.check_room(self.trainer.abstract_state().saved())
        if newest is not None:
            self.say(f"resume   from the checkpoint of step {newest} in {out_dir}")
            saved = self.trainer.abstract_state().saved()
            self.state = self.trainer.with_copies(self.checkpoints.restore(self.start, saved))
        elif weights:
            from jaxllm.weights.pretrained import load_params

            with memory_errors(self.lower):
                params = load_params(weights, self.trainer.abstract_state().params)
                self.state = self.trainer.init(params)
        else:
            self.state = self.trainer.init()
        self._compile()
        if not resume and self.rank == 0:  # here the first file is written
            held.enter_context(alone(out_dir))
            command_line.check_free(out_dir)
        try:
            self.log = self._open_log()
        except OSError as e:
            raise InputError(f"cannot write to {out_dir}: {e.strerror}") from e

    def loop(self, stop: StopSignals) -> int:
        """Trains to the last step; returns the exit status."""
        from jaxllm.train.profiling import StepTrace

        train = self.config.train
        batches = self.dataset.train_batches(
            train.batch_size, self.rank, self.world, start_sample=self.samples
        )
        try:
            if self.start == train.steps:
                self._complete()
            waiting = None  # the step before is logged while the devices work on the next
            trace = StepTrace(self.config.profile.span, self.out_dir / "profile")
            clock = time.perf_counter()
            for step in range(self.start + 1, train.steps + 1):
                if trace.begins(step):
                    if waiting is not None:
                        self._note(*waiting, clock)
                        waiting = None
                    trace.start()
                    clock = time.perf_counter()
                batch = self.trainer.put_batch(next(batches))
                self.state, metrics = self.step_program(self.state, batch)
                if waiting is not None:
                    clock = self._note(*waiting, clock)
                waiting = (step, metrics)
                # Read once: a signal from here on is seen a step later, after the last one never.
                received = stop.received if step < train.steps else None
                evaluating = self._due(step, train.eval_every) and not received
                sampling = self._due(step, self.config.sample.every) and not received
                saving = self._due(step, train.checkpoint_every) or received
                if evaluating or sampling or saving or trace.ends(step):
                    self._note(*waiting, clock)
                    waiting = None
                    if trace.ends(step):
                        self.log.say(trace.stop())
                    val_loss = self._validate(step) if evaluating else None
                    if sampling:
                        self._sample(step)
                    if saving:
                        self._save(step, val_loss)
                    clock = time.perf_counter()
                if received is not None:
                    self._finish()
                    self.log.say(
                        f"stopped by {signal.Signals(received).name} after step {step}, saved:"
                        f" go on with --resume --out_dir {self.out_dir}"
                    )
                    return 128 + received
            self._finish()
            self.log.say(f"done: {self.out_dir}")
            return 0
        except RunError:
            with contextlib.suppress(RunError):
                self.checkpoints.close()  # what is on its way to the disk arrives there
            raise
        finally:
            batches.close()
            self.log.close()

    def _check_unfinished(self) -> None:
        """Raises InputError for a run that has all of its steps and its report.

        One that was killed after its last checkpoint lacks the report, or has one of before.
        """
        steps, report = self.config.train.steps, self.out_dir / "report.html"
        metrics = self.out_dir / "metrics.jsonl"
        reported = report.exists() and not (
            metrics.exists() and metrics.stat().st_mtime_ns > report.stat().st_mtime_ns
        )
        if self.start > steps or (self.start == steps and reported):
            raise InputError(
                f"{self.out_dir} is at step {self.start} of train.steps={steps}; raise"
                " --train.steps to go on"
            )

    def _complete(self) -> None:
        """Does what is done after the last step and a run killed there lacks."""
        rows = read_metrics(self.out_dir / "metrics.jsonl")
        there = {key for row in rows if row["step"] == self.start for key in row}
        if "val_loss" not in there:
            self._validate(self.start)
        if "sample" not in there:
            self._sample(self.start)

    def _introduce(self) -> None:
        import jax

        from jaxllm.models import flops_per_token

        kind = jax.devices()[0].device_kind
        peak = peak_flops(kind)
        flops = flops_per_token(self.config.model, self.config.train.seq_len)
        self.flops, self.peak = flops * self.tokens, peak and peak * jax.device_count()
        self.say(f"model    {self.config.model.type}, {self.trainer.n_params:,} parameters")
        self.say(f"data     {self.dataset.description}")
        self.say(f"devices  {jax.device_count()} x {kind}, mesh {dict(self.mesh.shape)}")
        if peak is not None:
            self.say(
                f"MFU      {flops:,.0f} FLOPs a token (6 x matmul parameters + sequence mixing)"
                f" x tokens/s / ({jax.device_count()} x {peak / 1e12:.0f} TFLOP/s)"
            )

    def _compile(self) -> None:
        import jax

        from pallas_kernels import dispatch

        if jax.default_backend() == "gpu":
            # A resumed process has to run the very program of the first: XLA picks its matmuls by
            # timing them, so another compilation may pick others and differ in the last bit.
            compiled = self.out_dir.resolve() / "compiled"
            if self.start == 0 and self.rank == 0:  # killed while it wrote, it left half a program
                shutil.rmtree(compiled, ignore_errors=True)
            jax.config.update("jax_compilation_cache_dir", str(compiled))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        clock = time.perf_counter()
        try:
            traced = self.trainer.trace_train_step()
        except NotImplementedError as e:  # only kernels=mosaic insists
            raise InputError(f"model.kernels=mosaic cannot run: {e}; use auto or xla") from e
        self.ops = dispatch.decisions()
        self.say("kernels  " + dispatch.explain().replace("\n", "\n         "))
        with memory_errors(self.lower):
            self.step_program = traced.lower().compile()
        seconds = time.perf_counter() - clock
        self.say(f"compiled in {seconds:.1f} s, writing to {self.out_dir}")
        self.evaluate = self.trainer.eval_step()

    def _open_log(self) -> RunLog | SilentLog:
        """Makes the run's directory and what is known of it from the start."""
        if self.rank != 0:
            return SilentLog()
        from jaxllm.train import report

        self.out_dir.mkdir(parents=True, exist_ok=True)
        if self.dataset.tokenizer is not None:  # whoever has the directory can read its tokens
            path, tokenizer = self.out_dir / "tokenizer.json", self.dataset.tokenizer.path
            if path.exists() and path.read_bytes() != tokenizer.read_bytes():
                raise InputError(
                    f"{path} is another tokenizer than the data's; name another out_dir"
                )
            write_whole(path, tokenizer.read_bytes())
        write_whole(self.out_dir / "config.yaml", self.config.to_yaml().encode())
        model = f"{self.config.model.type}, {self.trainer.n_params:,} parameters"
        report.describe(self.out_dir, model, self.tokens, self.ops)
        steps = self.config.train.steps
        return RunLog(self.out_dir, steps, self.start, self.tokens, self.flops, self.peak)

    def _finish(self) -> None:
        """Waits for the last checkpoint; leaves loss.png and report.html."""
        from jaxllm.train import report

        try:
            self.checkpoints.close()
        finally:  # a disk without room for a checkpoint may have some for these
            self.log.draw()
            if self.rank == 0:
                try:
                    report.write([self.out_dir], self.out_dir / "report.html")
                except (InputError, OSError) as e:  # nothing was logged yet, or the disk is full
                    self.log.say(f"no report.html: {e}")

    def _due(self, step: int, every: int) -> bool:
        return step == self.config.train.steps or (every > 0 and step % every == 0)

    def _note(self, step: int, metrics: dict, began: float) -> float:
        """Waits for a step, logs it, and returns the time when it was done."""
        with memory_errors(self.lower):
            values = {k: float(v) for k, v in metrics.items()}
        now = time.perf_counter()
        loss, lr, norm, skips = (values[k] for k in ("loss", "lr", "grad_norm", "skips"))
        if skips or self._due(step, self.config.train.log_every):
            self.log.train(step, loss, lr, norm, now - began, int(skips))
        if skips:
            self.log.say(
                f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}: update skipped"
                f" ({skips:.0f} in a row)"
            )
        if skips >= self.config.train.max_skips:
            raise RunError(self._why_skipped(step, isfinite(loss) and isfinite(norm)))
        return now

    def _why_skipped(self, step: int, finite: bool) -> str:
        """One line on the step, its data, and the first layer that is not finite if it was that."""
        train, sample = self.config.train, self._samples_at(step - 1)
        samples = f"{sample} to {sample + train.batch_size - 1}"
        text = (
            f"{train.max_skips} updates in a row were skipped (train.max_skips), up to step {step}"
            f" on the samples {samples};"
        )
        if finite:
            return f"{text} its loss is a spike; raise train.skip_spikes={train.skip_spikes}"
        import jax

        from jaxllm.train.guard import first_not_finite

        batches = self.dataset.train_batches(train.batch_size, self.rank, self.world, sample)
        batch = self.trainer.put_batch(next(batches))
        batches.close()
        with jax.set_mesh(self.mesh):
            layer = first_not_finite(self.trainer.graph, self.state.params, **batch)
        return (
            f"{text} first not finite: {layer}; lower optimizer.learning_rate, or resume from an"
            " older checkpoint"
        )

    def _samples_at(self, step: int) -> int:
        return self.samples + (step - self.start) * self.config.train.batch_size

    def _validate(self, step: int) -> float:
        """Mean validation loss a token, in nats."""
        train = self.config.train
        total, count = 0.0, 0.0
        for batch in self.dataset.val_batches(
            train.batch_size, self.rank, self.world, train.eval_batches
        ):
            loss, n = self.evaluate(self.state.params, self.trainer.put_batch(batch))
            total, count = total + float(loss), count + float(n)
        self.log.evaluation(step, total / count)
        return total / count

    def _save(self, step: int, val_loss: float | None) -> None:
        about = {
            "config": self.config.model_dump(),
            "data_fingerprint": self.dataset.fingerprint,
            "samples": self._samples_at(step),
        }
        if problem := self.checkpoints.save(step, self.state.saved(), about, val_loss):
            self.log.say(problem)

    def _sample(self, step: int) -> None:
        """Logs a text by the model as it is now, behind its prompt."""
        import jax

        from jaxllm.infer.decode import generate

        config, tokenizer = self.config.sample, self.dataset.tokenizer
        if config.tokens == 0:
            return
        if tokenizer is None:
            self.log.say("no sample: the data came without a tokenizer (data.tokenizer)")
            return
        prompt = tokenizer.prompt(config.prompt)
        if not prompt:
            self.log.say("no sample: sample.prompt is empty")
            return
        rows = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        # A model that never saw two documents at once has nothing to say behind an end.
        ends = tokenizer.ends if self.dataset.separator is not None else ()
        try:
            with memory_errors(self.lower), jax.set_mesh(self.mesh):
                tokens = generate(
                    self.trainer.graph, self.state.params, prompt, config, rows=rows, ends=ends
                )
        except RunError as e:
            self.log.say(f"no sample: {e}")
            return
        self.log.sample(step, config.prompt + tokenizer.decode(tokens))
