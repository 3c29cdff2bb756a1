"""What a run says at its end: how it went, and what to do with it."""

import os
import shlex
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

from jaxllm.errors import InputError
from jaxllm.train.metrics import seconds_of
from jaxllm.train.report import Loaded


def closing(out_dir: Path, prompt: str) -> str:
    """Losses, tokens and time of the run in out_dir, its pages, and the command that writes text.

    prompt: what the text goes on from.
    """
    lines = [f"done: {out_dir}"]
    try:
        run = Loaded(out_dir)
    except InputError as e:  # a full disk
        return f"{lines[0]} ({e})"
    if losses := run.points("loss"):
        (first, from_loss), (last, to_loss) = losses[0], losses[-1]
        line = f"loss     {from_loss:.4f} at step {first:,}, {to_loss:.4f} at step {last:,}"
        if validation := run.points("val_loss"):
            line += f", validation {validation[-1][1]:.4f}"
        lines.append(line)
        tokens = last * run.about.get("tokens_per_step", 0)
        line = f"speed    {tokens:,} tokens in {timedelta(seconds=round(seconds_of(run.rows)))}"
        if speeds := [speed for _, speed in run.points("tokens_per_second")]:
            line += f", {median(speeds):,.0f} tokens/s in the median step"
        lines.append(line)
    pages = [out_dir / name for name in ("loss.png", "report.html")]
    lines.append(f"look at  {', '.join(str(page) for page in pages if page.exists())}")
    if (out_dir / "tokenizer.json").exists():
        lines.append(f"try it   {generate_command(out_dir, prompt or 'The')}")
    return "\n".join(lines)


def generate_command(out_dir: Path, prompt: str) -> str:
    """The command that writes text by this run, in the way in which this process was started."""
    uv, python = "UV" in os.environ, sys.executable  # `uv run`: the shell may know no such Python
    if Path(sys.argv[0]).name == "jaxllm":  # the console command of the package
        command = ["jaxllm", "generate"]
    else:
        known = uv or shutil.which("python") == python
        command = ["python" if known else python, "-m", "jaxllm.generate"]
    before = ["uv", "run"] if uv else []
    return shlex.join([*before, *command, "--checkpoint", str(out_dir), "--prompt", prompt])
