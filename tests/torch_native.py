"""Checks pallas_kernels.torch on a GPU and measures it: one call, every case in its own process.

    python tests/torch_native.py --out FOLDER [--only CASE ...]

The checks of ops are in torch_native_ops.py, of calls in torch_native_checks.py, the timings in
torch_native_timings.py.
FOLDER/torch_native.jsonl gets a line for each case as it ends: what it found, or its traceback.
Needs an H100 or H200, PyTorch for CUDA 13 and JAX with its CUDA 13 plugin.  With two GPUs the timed
cases run on the first one and the checks on the second at the same time: about 8 minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch_native_checks as checks
import torch_native_ops as ops
import torch_native_timings as timings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def run_case(spec, folder):
    """The case `NAME` or `NAME:ARGUMENT` is the function case_NAME of one of the three files."""
    name, *rest = spec.split(":")
    if name == "jax":
        return ops.jax_reference(folder, rest[0].split(","))
    if name == "op":
        return ops.case_op(rest[0], folder)
    found = (getattr(file, f"case_{name}", None) for file in (ops, checks, timings))
    return next(filter(None, found))(*rest)


def gpus() -> int:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    return found.count("GPU ")


TIMED = [  # one after the other, with seconds that each may take
    ("probe", 60), ("overhead", 60), ("time_attention", 90), ("time_vlstm", 120),
    ("start:first", 60), ("start:second", 60), ("llama:patch", 120), ("llama:eager", 120),
    ("llama:compile", 200), ("llama:patch_compile", 200), ("jax_times", 120),
]  # fmt: skip
CHECKS = [
    "quantized", *[f"op:{n}" for n in ops.OPS], "strides", "autograd", "streams", "cuda_graph",
    "compile", "reduce_overhead",
    *[f"opcheck:{n}" for n in ("attention_128", "rms_norm", "encoder", "vlstm")],
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--case")
    parser.add_argument("--folder")
    parser.add_argument("--only", nargs="*", help="names of cases, whole or up to the colon")
    parser.add_argument("--seconds", type=float, default=540)
    arguments = parser.parse_args()
    if arguments.case:
        try:
            found = run_case(arguments.case, arguments.folder)
        except BaseException:
            found = {"FAILED": traceback.format_exc()[-2500:]}
        print("\nRESULT " + json.dumps(found), flush=True)
        return 0
    folder = tempfile.mkdtemp()
    results, begin = {}, time.time()
    os.environ["PALLAS_KERNELS_CACHE"] = str(Path(folder) / "cache")
    path = Path(arguments.out) / "torch_native.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.open("w", buffering=1)

    def one(spec, limit, gpu, cores):
        limit = min(limit, begin + arguments.seconds - time.time())
        if limit < 5:
            found = {"SKIPPED": "no time left"}
        else:
            found = measured(spec, limit, gpu, cores)
        results[spec] = found
        lines.write(json.dumps({spec: found}) + "\n")
        print(f"{time.time() - begin:.0f} s", spec, json.dumps(found)[:300], flush=True)

    def measured(spec, limit, gpu, cores):
        command = [sys.executable, __file__, "--case", spec, "--folder", folder]
        if cores and shutil.which("taskset"):
            command = ["taskset", "-c", cores, *command]
        environment = dict(os.environ) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        environment["OMP_NUM_THREADS"] = "4"
        if not spec.startswith("jax"):
            environment.pop("JAX_PLATFORMS", None)
        start = time.time()
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environment
            )
            said = [x for x in ran.stdout.splitlines() if x.startswith("RESULT ")]
            found = json.loads(said[-1][7:]) if said else {"DIED": ran.returncode}
            if not said or "FAILED" in found:
                found["stderr"] = ran.stderr[-1500:]
        except subprocess.TimeoutExpired as error:
            found = {k: (getattr(error, k) or b"").decode(errors="replace")[-800:]
                     for k in ("stdout", "stderr")} | {"TIMEOUT": limit}  # fmt: skip
        return found | {"wall_s": round(time.time() - start, 1)}

    def chosen(specs):
        only = arguments.only
        return [s for s in specs if not only or s in only or s.split(":")[0] in only]

    count, cores = gpus(), os.cpu_count() or 1
    # Timed cases on the first GPU, checks on the second at the same time, unless one is chosen.
    aside = count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    mine = f"0-{max(cores // 3, 1) - 1}" if aside else ""
    rest = f"{cores // 3}-{cores - 1}" if aside else ""
    names = [s[3:] for s in chosen(CHECKS) if s.startswith("op:")]
    references = [f"jax:{','.join(names[i::5])}" for i in range(min(5, len(names)))]

    def timed():
        for spec, limit in TIMED:
            if chosen([spec]):
                one(spec, limit, "0" if aside else None, mine)

    def checked():
        with ThreadPoolExecutor(12) as pool:
            for spec in (*references, *chosen(CHECKS)):
                pool.submit(one, spec, 240, "1" if aside else None, rest)

    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(timed)]
        if not aside:
            runs[0].result()
        runs.append(both.submit(checked))
        for run in runs:
            run.result()
    if chosen(["two_gpus"]):
        one("two_gpus", 60, None, "")
    bad = [k for k, v in results.items() if {"FAILED", "DIED", "TIMEOUT", "SKIPPED"} & set(v)]
    print(f"{len(results)} cases, {len(bad)} failed: {bad}; {time.time() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
