"""Kills one of two training processes at random moments, and resumes; for a machine with two GPUs.

    python tests/two_gpu_kills.py                 20 kills, about six minutes on two H100s
    JAX_PLATFORMS=cpu STEPS=40 python tests/two_gpu_kills.py --kills 3

Most kills come during a save.  Half of the pairs are two commands, as on two machines, which only
talk to each other; the others are one command with --processes 2.  The other process must end
within 60 s with a line that names the dead one.  Every loss must be the loss of a run without
kills, bit for bit.  Prints a line for each kill and a total; the exit status is 1 if one fails.
"""

import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "jaxllm"), str(HERE.parent)]

import process_runs  # noqa: E402
import scripts  # noqa: E402
from killed_runs import saving  # noqa: E402

STEPS = int(os.environ.get("STEPS", 120))
LIMIT = 60  # seconds for the other process
WORDS = f"""--mesh.fsdp 2 --train.steps {STEPS} --train.checkpoint_every 2 --train.eval_every 0
    --train.autotune false --sample.tokens 0""".split()


def start(config: Path, out_dir: Path, commands: int, life: int) -> list[process_runs.Command]:
    """Two processes that train in `out_dir`, started by one command or by two."""
    import train

    words = ["--resume"] if (out_dir / "config.yaml").exists() else ["--config", str(config)]
    words += [*WORDS, "--out_dir", str(out_dir), "--processes", "2"]
    if commands == 1:
        return [process_runs.Command(f"life_{life}", lambda: train.main(words))]
    with socket.create_server(("localhost", 0)) as free:
        words += ["--coordinator", f"localhost:{free.getsockname()[1]}"]
    body = lambda i: lambda: train.main([*words, "--process", str(i)])
    return [  # a command drives every GPU that it sees
        process_runs.Command(f"life_{life}_{i}", body(i), CUDA_VISIBLE_DEVICES=str(i))
        for i in range(2)
    ]


def wait_to_kill(rng: random.Random, out_dir: Path, log: Path) -> bool:
    """Waits for a random moment of training; returns whether it is in a save."""
    in_save, end = rng.random() < 0.75, time.monotonic() + 200
    while not (log.exists() and "step " in log.read_text()):
        assert time.monotonic() < end, f"no step in 200 s: {log.read_text()}"
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 2))
    while in_save and not saving(out_dir) and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.05) if in_save else 0)
    return saving(out_dir)


def kill(commands: list, rank: int) -> tuple[int, dict, float]:
    """Kills a process: (its pid, what the command with the other process left, seconds)."""
    trainers = [pid for command in commands for pid in command.trainers()]
    began = time.monotonic()
    os.kill(trainers[rank], signal.SIGKILL)
    # The other process is the other command's, or the one command has both.
    ended = [command.wait() for command in (commands[1 - rank :] + commands)[: len(commands)]]
    return trainers[rank], ended[0], time.monotonic() - began


def main() -> int:
    parser = scripts.Parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        scripts.needs_gpu(2)
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        process_runs.prepare(Path(folder))
        return run(Path(folder), arguments.kills, random.Random(arguments.seed))


def run(folder: Path, kills: int, rng: random.Random) -> int:
    from training_runs import losses, write_tiny

    config, straight = write_tiny(folder), folder / "straight"
    (command,) = start(config, straight, 1, 0)
    ended = command.wait()
    assert ended["status"] == 0, ended["output"]
    wanted, bad, in_saves, slowest, lives, runs = losses(straight), 0, 0, 0.0, 0, 1
    out_dir, done = folder / "run_1", 0
    while done < kills:
        lives, rank = lives + 1, rng.randrange(2)
        commands = start(config, out_dir, 1 + lives % 2, lives)
        in_save = wait_to_kill(rng, out_dir, commands[0].log)
        if (out_dir / "report.html").exists():  # it came to its end
            [command.wait() for command in commands]
            bad += losses(out_dir) != wanted
            runs, out_dir = runs + 1, folder / f"run_{runs + 1}"
            continue
        pid, ended, seconds = kill(commands, rank)
        done, in_saves, slowest = done + 1, in_saves + in_save, max(slowest, seconds)
        name = rf"process {rank} \(pid {pid} on {re.escape(socket.gethostname())}\)"
        last = (ended["output"].strip().splitlines() or [""])[-1]
        named = re.match(rf"error: {name} (was killed by SIGKILL|died or lost its con)", last)
        got = losses(out_dir) if (out_dir / "metrics.jsonl").exists() else {}
        equal = got == {step: loss for step, loss in wanted.items() if step <= max(got, default=0)}
        fine = named and seconds < LIMIT and equal and ended["status"] == 1
        bad += not fine
        print(
            f"kill {done}: process {rank} of {len(commands)} command{'s'[: len(commands) - 1]},"
            f" {'in a save' if in_save else 'between saves'}, after step {max(got, default=0)};"
            f" {'named' if named else f'NOT NAMED ({last})'} after {seconds:.1f} s;"
            f" losses {'equal' if equal else 'DIFFER'}",
            flush=True,
        )
    (command,) = start(config, out_dir, 1, lives + 1)
    ended = command.wait()
    if ended["status"] or losses(out_dir) != wanted:
        bad += 1
        print(f"the last run does not resume: {ended['output']}")
    print(
        f"{done} kills, {in_saves} in a save; the other process ended within {slowest:.1f} s;"
        f" {runs} runs of {STEPS} steps; {bad} failures"
    )
    return int(bad > 0)


if __name__ == "__main__":
    scripts.run(main)
