"""Measures what train.verify_every costs: the time of steps that are computed twice.

    python tests/verify_cost.py gpt2_124m 32
    python tests/verify_cost.py llama3_1b 4 --train.fp8 all

Trains on random tokens as a run does, verifies every tenth step, and prints the median times of
both kinds of steps and what verifying every 200th step costs.  Neither program has train.autotune's
choices, so both compile once, at the same time.  Further words override settings of the
configuration.  About 90 s for llama3_1b on an H100.
"""

from concurrent.futures import ThreadPoolExecutor
from statistics import median

from scripts import Parser, run

EVERY, STEPS, FIRST = 10, 150, 50  # the steps before FIRST warm up
ASKED = 200


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("config")
    parser.add_argument("batch")
    arguments, words = parser.parse_known_args()
    overrides = {"train.batch_size": arguments.batch, "train.grad_accum": "1"}
    overrides |= parser.overrides(words)

    from jaxllm.train.process import no_long_pauses, set_xla_flags

    set_xla_flags(deterministic=True)
    import numpy as np

    from jaxllm.config import load
    from jaxllm.sharding import make_mesh
    from jaxllm.train.profiling import StepClock
    from jaxllm.train.programs import compile_autotuned
    from jaxllm.train.step import Trainer
    from jaxllm.train.verify import Canary

    config = load(arguments.config, overrides)
    trainer = Trainer(config, make_mesh(config.mesh))
    with ThreadPoolExecutor() as pool:
        traces = trainer.trace_train_step, trainer.trace_verified_step
        compiled = [pool.submit(compile_autotuned, trace().lower, None) for trace in traces]
        state = trainer.init()
        program, verified = (running.result() for running in compiled)
    canary, times = Canary(trainer, verified), {}
    rows, width = config.train.batch_size, config.train.seq_len
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.model.vocab_size, (2, rows, width + 1), dtype=np.int32)

    def record(step: int, values: dict[str, float], seconds: float) -> None:
        canary.check(step)
        times[step] = seconds * 1e3

    clock = StepClock(record)
    with no_long_pauses():
        for step in range(1, STEPS + 1):
            some = tokens[step % 2]
            batch = trainer.put_batch({"tokens": some[:, :-1], "labels": some[:, 1:]})
            if step % EVERY:
                state, metrics = program(state, batch)
            else:
                state, metrics = canary.take(step, state, batch)
            clock.started(step, metrics)
        with clock.stopped():
            pass
    timed = [step for step in times if step > FIRST]
    once = median(times[step] for step in timed if step % EVERY)
    twice = median(times[step] for step in timed if not step % EVERY)
    print(
        f"{arguments.config}, batch {rows}: {once:.2f} ms a step, {twice:.2f} ms a verified one;"
        f" every {ASKED} steps costs {(twice - once) / once / ASKED:.2%}"
    )


if __name__ == "__main__":
    run(main)
