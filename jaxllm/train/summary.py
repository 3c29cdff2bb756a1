"""The summary that a run prints at its end."""

import os
import shlex
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from statistics import mean

from jaxllm.errors import InputError
from jaxllm.train.metrics import seconds_of
from jaxllm.train.report import LoadedRun


def summarize_run(out_dir: Path, prompt: str, chat: bool = False) -> str:
    """The losses, speed and reports of the run in out_dir, and the command that generates text.

    prompt: for that command.  chat: whether the model answers messages.
    """
    lines = [f"done: {out_dir}"]
    try:
        run = LoadedRun(out_dir)
    except InputError as e:  # a full disk
        return f"{lines[0]} ({e})"
    if losses := run.points("loss"):
        (first, from_loss), (last, to_loss) = losses[0], losses[-1]
        line = f"loss     {from_loss:.4f} at step {first:,}, {to_loss:.4f} at step {last:,}"
        if validation := run.points("val_loss"):
            line += f", validation {validation[-1][1]:.4f}"
        lines.append(line)
        steps = max(row["step"] for row in run.rows)  # the last one may have no loss
        tokens = steps * run.about.get("tokens_per_step", 0)
        line = f"speed    {tokens:,} tokens in {timedelta(seconds=round(seconds_of(run.rows)))}"
        if times := [ms / 1e3 for _, ms in run.points("step_ms")]:
            spent = mean(times) * steps  # some steps may not be logged
            line += f", of which {spent:,.1f} s are steps: {tokens / spent:,.0f} tokens/s"
        lines.append(line)
    pages = [out_dir / name for name in ("loss.png", "report.html")]
    lines.append(f"look at  {', '.join(str(page) for page in pages if page.exists())}")
    if (out_dir / "tokenizer.json").exists():
        lines.append(f"try it   {generate_command(out_dir, prompt or 'The', chat)}")
    return "\n".join(lines)


def generate_command(out_dir: Path, prompt: str, chat: bool = False) -> str:
    """The command that generates text with this run, in the form that started this process."""
    uv, python = "UV" in os.environ, sys.executable  # under `uv run`, `python` may be another one
    if Path(sys.argv[0]).name == "jaxllm":  # the package's console command
        command = ["jaxllm", "generate"]
    else:
        known = uv or shutil.which("python") == python
        command = ["python" if known else python, "-m", "jaxllm", "generate"]
    before = ["uv", "run"] if uv else []
    text = [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
    options = ["--checkpoint", str(out_dir.absolute()), *["--chat"] * chat, *text]
    return shlex.join([*before, *command, *options])
