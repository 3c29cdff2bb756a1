"""Trains a model: python train.py --config llama3_small.yaml [--section.key VALUE ...]

Reads the configuration, builds data, model and the compiled step, loops, logs and saves.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jaxllm import cli
from jaxllm.config import Config
from jaxllm.errors import InputError, RunError
from jaxllm.metrics import RunLog, SilentLog, error_line, peak_flops


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        arguments = cli.read(sys.argv[1:] if argv is None else argv)
        set_xla_flags(arguments.config.train.deterministic)
        run = Run(*arguments)
        with StopSignals() as stop:
            return run.loop(stop)
    except InputError as e:
        error_line(str(e))
        return 2
    except RunError as e:
        error_line(str(e))
        return 1


def set_xla_flags(deterministic: bool) -> None:
    """XLA reads its flags when it first meets the GPU; of two values the later, yours, counts."""
    flags = [
        # Where Triton may not have the matmuls, cuBLASLt adds the biases in them: GPT-2 124M on an
        # H100 goes from 509 k to 529 k tokens/s.
        "--xla_gpu_enable_triton_gemm=false",
        # Merged matmuls of q, k and v have to be taken apart by copies.
        "--xla_gpu_dot_merger_threshold_mb=0",
    ]
    if deterministic:
        flags.append("--xla_gpu_deterministic_ops=true")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()


class StopSignals:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one stops at once."""

    def __enter__(self):
        self.received: int | None = None
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        self.received = number
        self.__exit__()

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)


class Run:
    """One run of training: built, checked and compiled by the constructor, driven by `loop`."""

    def __init__(self, config: Config, out_dir: Path, resume: bool):
        # JAX takes seconds to import: a wrong command line is told before that.
        import jax

        from jaxllm import sharding
        from jaxllm.checkpoint import Checkpoints
        from jaxllm.data import open_dataset
        from jaxllm.training import Trainer

        self.config, self.out_dir = config, out_dir
        if config.mesh.distributed:
            jax.distributed.initialize()  # finds the others in the cluster's environment
        self.world, self.rank = jax.process_count(), jax.process_index()
        self.say = print if self.rank == 0 else lambda *_, **__: None
        self.mesh = sharding.make_mesh(config.mesh)
        sharding.check_model(config.model, self.mesh)
        sharding.check_batch(config.train, self.mesh)
        check_kernels(config)
        weights = None
        if config.model.init_from and not resume:
            from jaxllm.pretrained import check_weights, open_weights

            weights = open_weights(config.model.init_from)
            check_weights(weights, config)
        self.dataset = open_dataset(
            config.data,
            seq_len=config.train.seq_len,
            seed=config.train.seed,
            vocab_size=config.model.vocab_size,
        )
        self.checkpoints = Checkpoints(out_dir / "checkpoints", config.train.keep_checkpoints)
        self.trainer = Trainer(config, self.mesh)
        self.start, self.samples = self._position() if resume else (0, 0)
        self.tokens = config.train.batch_size * config.train.seq_len
        self._introduce()
        if resume:
            self.state = self.checkpoints.restore(self.start, self.trainer.abstract_state())
        elif weights:
            from jaxllm.pretrained import load_params

            with memory_errors(config):
                params = load_params(weights, self.trainer.abstract_state().params)
                self.state = self.trainer.init(params)
        else:
            self.state = self.trainer.init()
        self._compile()
        self.log = self._open_log()

    def loop(self, stop: StopSignals) -> int:
        """Trains to the last step; returns the exit status."""
        from jaxllm.profiling import StepTrace

        train = self.config.train
        batches = self.dataset.train_batches(
            train.batch_size, self.rank, self.world, start_sample=self.samples
        )
        try:
            waiting = None  # the step before is logged while the devices work on the next
            trace = StepTrace(self.config.profile.steps, self.out_dir / "profile")
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
                received = stop.received  # read once: a signal from here on is seen a step later
                evaluating = self._due(step, train.eval_every)
                saving = self._due(step, train.checkpoint_every) or received
                if evaluating or saving or trace.ends(step):
                    self._note(*waiting, clock)
                    waiting = None
                    if trace.ends(step):
                        self.log.say(trace.stop())
                    val_loss = self._validate(step) if evaluating and not received else None
                    if saving:
                        self._save(step, val_loss)
                    clock = time.perf_counter()
                if received is not None:
                    self.checkpoints.close()
                    self.log.draw()
                    self.log.say(
                        f"stopped by {signal.Signals(received).name} after step {step}, saved:"
                        f" go on with --resume --out_dir {self.out_dir}"
                    )
                    return 128 + received
            self.checkpoints.close()
            self.log.draw()
            sample = self._sample() if self.config.sample.tokens else None
            if sample:
                self.log.say(sample)
            self._report(sample)
            self.log.say(f"done: {self.out_dir}")
            return 0
        finally:
            batches.close()
            self.log.close()

    def _position(self) -> tuple[int, int]:
        """Step and number of samples of the newest checkpoint; checks that it fits this run."""
        step = self.checkpoints.newest()
        if step is None:
            raise InputError(f"{self.out_dir} holds no complete checkpoint to resume from")
        saved = self.checkpoints.about(step)
        if "converted_from" in saved:
            raise InputError(
                f"{self.out_dir} holds weights of jaxllm.convert, not a run to resume; start one"
                f" with --model.init_from {self.out_dir} and another --out_dir"
            )
        if saved["data_fingerprint"] != self.dataset.fingerprint:
            raise InputError(
                f"the data changed since the checkpoint (fingerprint {self.dataset.fingerprint},"
                f" was {saved['data_fingerprint']}): another corpus, tokenizer or Python version"
            )
        if step >= self.config.train.steps:
            raise InputError(
                f"{self.out_dir} is at step {step} of train.steps={self.config.train.steps}; raise"
                " --train.steps to go on"
            )
        return step, saved["samples"]

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

        from pallas_kernels import backend

        if jax.default_backend() == "gpu":
            # A resumed process has to run the very program of the first: XLA picks its matmuls by
            # timing them, so another compilation may pick others and differ in the last bit.
            jax.config.update("jax_compilation_cache_dir", str(self.out_dir.resolve() / "compiled"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        clock = time.perf_counter()
        try:
            traced = self.trainer.trace_train_step()
        except NotImplementedError as e:  # only kernels=mosaic insists
            raise InputError(f"model.kernels=mosaic cannot run: {e}; use auto or xla") from e
        self.say("kernels  " + backend.explain().replace("\n", "\n         "))
        with memory_errors(self.config):
            self.step_program = traced.lower().compile()
        seconds = time.perf_counter() - clock
        self.say(f"compiled in {seconds:.1f} s, writing to {self.out_dir}", flush=True)
        self.evaluate = self.trainer.eval_step()

    def _open_log(self) -> RunLog | SilentLog:
        if self.rank != 0:
            return SilentLog()
        self.out_dir.mkdir(parents=True, exist_ok=True)
        if self.dataset.tokenizer is not None:  # whoever has the directory can read its tokens
            path, tokenizer = self.out_dir / "tokenizer.json", self.dataset.tokenizer.path
            if path.exists() and path.read_bytes() != tokenizer.read_bytes():
                raise InputError(
                    f"{path} is another tokenizer than the data's; name another out_dir"
                )
            path.write_bytes(tokenizer.read_bytes())
        (self.out_dir / "config.yaml").write_text(self.config.to_yaml(), encoding="utf-8")
        steps = self.config.train.steps
        return RunLog(self.out_dir, steps, self.start, self.tokens, self.flops, self.peak)

    def _report(self, sample: str | None) -> None:
        """Leaves run.json, what the run was made on, and report.html."""
        if self.rank != 0:
            return
        from jaxllm import report
        from pallas_kernels import backend

        report.describe(self.out_dir, ops=backend.decisions(), sample=sample)
        report.write([self.out_dir], self.out_dir / "report.html")

    def _due(self, step: int, every: int) -> bool:
        return step == self.config.train.steps or (every > 0 and step % every == 0)

    def _note(self, step: int, metrics: dict, began: float) -> float:
        """Waits for a step, logs it, and returns the time when it was done."""
        with memory_errors(self.config):
            values = {k: float(v) for k, v in metrics.items()}
        now = time.perf_counter()
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            self.log.train(step, values["loss"], values["lr"], values["grad_norm"], now - began)
        if skips := int(values["skips"]):
            self.log.say(
                f"step {step}: loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}:"
                f" update skipped ({skips} in a row)"
            )
            if skips >= self.config.train.max_skips:
                raise RunError(self._why_skipped(step, skips))
        return now

    def _why_skipped(self, step: int, skips: int) -> str:
        """One line on the step, its data and the first layer that is not finite."""
        import jax

        from jaxllm.guard import first_not_finite

        sample, size = self._samples_at(step - 1), self.config.train.batch_size
        batches = self.dataset.train_batches(size, self.rank, self.world, start_sample=sample)
        batch = self.trainer.put_batch(next(batches))
        batches.close()
        with jax.set_mesh(self.mesh):
            layer = first_not_finite(self.trainer.graph, self.state.params, **batch)
        return (
            f"{skips} updates in a row were skipped (train.max_skips), up to step {step} on the"
            f" samples {sample} to {sample + size - 1}; first not finite: {layer}; lower"
            " optimizer.learning_rate, or resume from an older checkpoint"
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
        if problem := self.checkpoints.save(step, self.state, about, val_loss):
            self.log.say(problem)

    def _sample(self) -> str:
        """A sample of text from the trained model, behind its prompt."""
        import jax

        from jaxllm.sample import generate

        config, tokenizer = self.config, self.dataset.tokenizer
        if tokenizer is None:
            return "no sample: the data came without a tokenizer (data.tokenizer)"
        prompt = tokenizer.encode(config.sample.prompt)
        if not prompt:
            return "no sample: sample.prompt is empty"
        with jax.set_mesh(self.mesh):
            tokens = generate(
                self.trainer.graph,
                self.state.params,
                prompt,
                config.sample,
                rows=self.mesh.shape["data"] * self.mesh.shape["fsdp"],
            )
        return f"sample:\n{config.sample.prompt}{tokenizer.decode(tokens)}"


def check_kernels(config: Config) -> None:
    """Raises InputError if kernels=mosaic was asked for where they cannot run."""
    from pallas_kernels import backend

    if config.model.kernels == "mosaic" and (lack := backend.device_lacks("sm_90a")):
        raise InputError(f"model.kernels=mosaic cannot run here: {lack}; use auto or xla")


@contextlib.contextmanager
def memory_errors(config: Config) -> Iterator[None]:
    """Turns a device that is out of memory into a RunError that says what helps."""
    try:
        yield
    except Exception as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise RunError(
            f"the device is out of memory; lower train.batch_size={config.train.batch_size}, raise"
            " train.grad_accum, or set model.remat=block"
        ) from e


if __name__ == "__main__":
    sys.exit(main())
