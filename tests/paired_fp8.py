"""Compares the losses of fp8 and bfloat16 in paired runs: the same weights, the same batches.

    python tests/paired_fp8.py llama3_small --seeds 0 4 --train.steps 200
    python tests/paired_fp8.py gpt2_124m --seeds 0 8 --train.steps 500 --train.grad_accum 1
    python tests/paired_fp8.py llama3_small --format e4m3 --train.steps 200
    python tests/paired_fp8.py llama3_small --mode all --train.steps 200
    python tests/paired_fp8.py llama3_124m --mode all --speed 1.13 --train.steps 2000
    python tests/paired_fp8.py llama3_small --gradients --train.steps 1500

Prints for each seed the training and validation losses of train.fp8=none and =matmuls (--mode), the
mean of the differences with its standard error, and by how much the validation loss changes if its
own forward pass is in fp8, too; it is in bfloat16 otherwise.  --format: of the blocks' gradients,
e5m2 unless given.  --speed: of a step in fp8, times bfloat16's; prints what is left of it for equal
losses, with its standard error: bfloat16 in half of the steps, too, tells how many tokens a
difference of losses is worth.  --gradients: after all steps in bfloat16 instead the errors of one
batch's gradients against float32, in bfloat16 and with both formats.  Further words override
settings of the configuration.
"""

import math
import statistics
import tempfile

from scripts import Parser, run

from jaxllm.config import load
from jaxllm.train.process import set_xla_flags

BATCHES = 64  # of the validation data
FORMATS = {"e5m2": "float8_e5m2", "e4m3": "float8_e4m3fn"}


def choose(name: str) -> None:
    """Makes gradients take this format in programs that are traced from here on."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.float8 import linear

    linear.BACKWARD = jnp.dtype(FORMATS[name])
    jax.clear_caches()


def dataset(config):
    from jaxllm.data import open_dataset

    return open_dataset(config)


def losses(config, programs: dict) -> tuple[float, float, float]:
    """(training loss, mean of the last tenth of the steps; two validation losses) of one run.

    The first validation loss is in bfloat16, the second in the training step's own forward pass.
    programs: by train.fp8 and train.steps, compiled once, because they do not depend on the seed.
    """
    import jax

    from jaxllm import sharding
    from jaxllm.train.step import Trainer

    trainer = Trainer(config, sharding.make_mesh(config.mesh))
    train, data = config.train, dataset(config)
    key = train.fp8, train.steps
    if key not in programs:
        programs[key] = (
            trainer.trace_train_step().lower().compile(),
            trainer.eval_step(),
            jax.jit(trainer._loss_sum),  # in fp8, as the train step computes it
        )
    (step, *both), state = programs[key], trainer.init()
    batches = data.train_batches(train.batch_size, *sharding.batch_part(trainer.mesh))
    found = []
    for _ in range(train.steps):
        state, metrics = step(state, trainer.put_batch(next(batches)))
        found.append(metrics["loss"])
    batches.close()
    validation = data.val_batches(train.batch_size, *sharding.batch_part(trainer.mesh), BATCHES)
    held_out = [trainer.put_batch(batch) for batch in validation]

    def mean_loss(evaluate):
        with jax.set_mesh(trainer.mesh):
            sums = [evaluate(state.params, batch) for batch in held_out]
        total, count = (sum(float(x) for x in xs) for xs in zip(*sums, strict=True))
        return total / count

    last = [float(x) for x in found[-max(1, train.steps // 10) :]]
    return statistics.mean(last), *map(mean_loss, both)


def compare_gradients(config) -> None:
    """Trains in bfloat16, and prints the errors of one more batch's gradients."""
    import jax
    import numpy as np

    from jaxllm import sharding
    from jaxllm.train.step import Trainer, step_model

    trainer = Trainer(config, sharding.make_mesh(config.mesh))
    step, state = trainer.trace_train_step().lower().compile(), trainer.init()
    batches = dataset(config).train_batches(
        config.train.batch_size, *sharding.batch_part(trainer.mesh)
    )
    for _ in range(config.train.steps):
        state, _ = step(state, trainer.put_batch(next(batches)))
    batch = trainer.put_batch(next(batches))
    batches.close()

    def gradients(mode, **dtypes):  # of the blocks' matrices
        train = config.train.model_copy(update={"fp8": mode})
        model = config.model.model_copy(update=dtypes)
        graph = step_model(config.model_copy(update={"train": train, "model": model}))[0]
        loss = lambda params, batch: trainer._loss_sum(params, batch, graph=graph)[0]
        with jax.set_mesh(trainer.mesh):
            found = jax.jit(jax.grad(loss))(state.params, batch)
        return [np.asarray(g) for g in jax.tree.leaves(found.blocks) if g.ndim == 2]

    def show(name, found):
        errors = [
            np.linalg.norm(g - t) / np.linalg.norm(t) for g, t in zip(found, truth, strict=True)
        ]
        dot = lambda a, b: sum(float(np.vdot(x, y)) for x, y in zip(a, b, strict=True))
        cosine = dot(found, truth) / (dot(found, found) * dot(truth, truth)) ** 0.5
        middle = f"median error {np.median(errors):.4f}, largest {max(errors):.4f}"
        print(f"{name}: {middle}, cosine {cosine:.4f}", flush=True)

    truth = gradients("none", compute_dtype="float32", residual_dtype="float32")
    show("bfloat16", gradients("none"))
    for name in FORMATS:
        choose(name)
        show(name, gradients("matmuls"))


def mean_and_error(differences: list[float]) -> tuple[float, float]:
    error = statistics.stdev(differences) / len(differences) ** 0.5 if differences[1:] else 0.0
    return statistics.mean(differences), error


def text(mean: float, error: float) -> str:
    return f"{mean:+.4f} +- {error:.4f}"


def equal_losses(speed: float, differences: list[float], gains: list[float]) -> str:
    """speed x the share of fp8's tokens that bfloat16 needs for its loss, with the standard error.

    gains: bfloat16's loss after half of the tokens minus the loss after all.  So close to the end
    a loss falls in proportion to the logarithm of the tokens, by gain for each doubling.
    """
    (worse, error), (gain, error_of_gain) = mean_and_error(differences), mean_and_error(gains)
    left = speed * 2 ** (-worse / gain)
    relative = math.log(2) * math.hypot(error / gain, worse * error_of_gain / gain**2)
    return (
        f"{left:.3f} +- {left * relative:.3f} (a doubling of tokens: {text(-gain, error_of_gain)})"
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 3), metavar=("FIRST", "END"))
    parser.add_argument("--mode", choices=("matmuls", "all"), default="matmuls")
    parser.add_argument("--format", choices=FORMATS, default="e5m2")
    parser.add_argument("--speed", type=float)
    parser.add_argument("--gradients", action="store_true")
    arguments, rest = parser.parse_known_args()
    set_xla_flags(deterministic=True)
    overrides = parser.overrides(rest)
    differences, gains, programs = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        overrides.setdefault("data.cache_dir", folder)
        if arguments.gradients:
            return compare_gradients(load(arguments.config, overrides))
        choose(arguments.format)
        for seed in range(*arguments.seeds):
            runs = {}
            for fp8 in ("none", arguments.mode):
                chosen = {"train.seed": str(seed), "train.fp8": fp8}
                runs[fp8] = losses(load(arguments.config, overrides | chosen), programs)
            (t0, v0, _), (t, v, own) = runs.values()
            differences.append([t - t0, v - v0, own - v])
            if arguments.speed:
                config = load(arguments.config, overrides | {"train.seed": str(seed)})
                half = {"steps": config.train.steps // 2}
                short = config.model_copy(update={"train": config.train.model_copy(update=half)})
                runs["half"] = losses(short, programs)
                gains.append([runs["half"][0] - t0, runs["half"][1] - v0])
            shown = ", ".join(f"{k} {t:.4f} {v:.4f}" for k, (t, v, _) in runs.items())
            print(f"seed {seed}, training and validation loss: {shown}; {own - v:+.5f}", flush=True)
    columns = [list(column) for column in zip(*differences, strict=True)]
    training, validation, own = (text(*mean_and_error(column)) for column in columns)
    print(
        f"{arguments.config}: {arguments.mode} - none: training {training}, validation {validation}"
    )
    print(f"the validation loss in fp8 - in bfloat16, with the weights of {arguments.mode}: {own}")
    for i, name in enumerate(("training", "validation") if gains else ()):
        left = equal_losses(arguments.speed, columns[i], [gain[i] for gain in gains])
        print(f"speed-up for an equal {name} loss: {left}")


if __name__ == "__main__":
    run(main)
