"""Checks pallas_kernels.torch on a GPU and measures it: one call, every case in its own process.

    python tests/torch_native.py checks     bits and errors beside JAX, streams, graphs, two GPUs
    python tests/torch_native.py vlstm      the vLSTM beside mlstm_kernels
    python tests/torch_native.py llama      50 steps of a Llama: eager, compiled, patched
    python tests/torch_native.py ops        GPU time of each op beside JAX's
    python tests/torch_native.py rest       time on the host, attention beside cuDNN, second start

Several groups or cases may follow each other (`jax:rope op:rope`).  Each group takes at most 150 s
with two GPUs: checks share both, and timed cases of one lane run one after the other on one GPU.
The checks of ops are in torch_native_ops.py, of calls in torch_native_checks.py, the timings in
torch_native_timings.py, what is printed of them in torch_native_tables.py.  --out FOLDER keeps all
that was found in torch_native.jsonl.
Needs H100s or H200s, PyTorch for CUDA 13 and JAX with its CUDA 13 plugin.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch_native_checks as checks
import torch_native_ops as ops
import torch_native_tables as tables
import torch_native_timings as timings
from scripts import Parser, needs_gpu, needs_packages, one_of, run

AT_ONCE = 14  # checks
CHECKS = [
    "two_gpus", *[f"jax:{','.join([*ops.OPS][i::5])}" for i in range(5)],
    *[f"op:{n}" for n in ops.OPS], "quantized", "packed", "strides", "autograd", "streams",
    "cuda_graph", "compile", "reduce_overhead",
    *[f"opcheck:{n}" for n in ("attention_128", "rms_norm", "encoder", "vlstm")],
]  # fmt: skip
LANES = {  # timed cases; each lane has a GPU of its own
    "vlstm": (["vlstm:7B", "vlstm:tests"], ["vlstm:124M", "vlstm:4x2048"]),
    "llama": (["llama:eager", "llama:patch"], ["llama:compile"]),
    "ops": tuple(
        [f"gpu_times:{how}:{','.join([*timings.TIMES][lane::2])}" for how in ("torch", "jax")]
        for lane in (0, 1)
    ),
    "rest": (["overhead", "time_attention"], ["probe", "start:first", "start:second"]),
}


def run_case(spec, folder):
    """The case `NAME` or `NAME:ARGUMENT` is the function case_NAME of one of the three files."""
    name, *rest = spec.split(":")
    if name == "jax":
        return ops.jax_reference(folder, rest[0].split(","))
    if name == "op":
        return ops.case_op(rest[0], folder)
    found = (getattr(file, f"case_{name}", None) for file in (ops, checks, timings))
    return next(filter(None, found))(*rest)


def gpus() -> list[str]:
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return ["0"]
    return list(map(str, range(max(found.count("GPU "), 1))))


def in_a_process(spec, gpu, limit, folder):
    """What a case found, or how it failed."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "4"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if not spec.startswith("jax:"):
        environment.pop("JAX_PLATFORMS", None)
    start = time.time()
    command = [sys.executable, __file__, "--case", spec, "--folder", folder]
    failed = {}
    try:
        ran = subprocess.run(command, capture_output=True, timeout=max(limit, 1), env=environment)
        out, err = ran.stdout, ran.stderr
    except subprocess.TimeoutExpired as error:
        out, err, failed = error.stdout or b"", error.stderr or b"", {"TIMEOUT": round(limit)}
    said = [x for x in out.decode(errors="replace").splitlines() if x.startswith("RESULT ")]
    found = json.loads(said[-1][7:]) if said else {}  # the last one that a case has printed
    if not failed and (not said or ran.returncode):
        failed = {"DIED": ran.returncode}
    found |= failed
    if failed or "FAILED" in found:
        found["stderr"] = err.decode(errors="replace")[-1500:]
    return found | {"wall_s": round(time.time() - start, 1)}


def wrong(found) -> list[str]:
    """Names of what is false or failed.  Bits need not be equal where cuBLAS takes part."""
    names = []
    for name, x in found.items():
        if name in ("FAILED", "DIED", "TIMEOUT"):
            names.append(name)
        elif name not in ("bits", "bits_equal"):
            inner = [y for y in (x if isinstance(x, list) else [x])]
            names += [name for y in inner if y is False]
            names += [f"{name}.{z}" for y in inner if isinstance(y, dict) for z in wrong(y)]
    return names


def brief(spec, found) -> str:
    """One line."""
    bad = wrong(found)
    if "FAILED" in found:
        bad = [found["FAILED"].strip().splitlines()[-1][:200]]
    plain = {k: v for k, v in found.items() if isinstance(v, bool | int | float)}
    text = " ".join(f"{k}={v}" for k, v in plain.items())
    return f"{'WRONG ' if bad else 'ok    '}{spec[:40]}: {' '.join(map(str, bad)) or text}"


def main():
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", help="groups or cases")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=float, default=145)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        try:
            found = run_case(arguments.case, arguments.folder)
        except BaseException:
            found = {"FAILED": traceback.format_exc()[-2500:]}
        print("\nRESULT " + json.dumps(found), flush=True)
        return 0
    if not arguments.names:
        parser.error(f"which of checks, {', '.join(LANES)}?")
    for name in arguments.names:
        if ":" not in name:
            one_of("group", name, ["checks", *LANES])
    needs_packages("torch")
    needs_gpu()
    folder, devices, begin = tempfile.mkdtemp(), gpus(), time.time()
    os.environ["PALLAS_KERNELS_CACHE"] = str(Path(folder) / "cache")
    path = Path(arguments.out) / "torch_native.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {}

    def lane(specs, gpu):
        for spec in specs:
            found = in_a_process(spec, gpu, begin + arguments.seconds - time.time(), folder)
            results[spec] = found
            with path.open("a") as lines:
                lines.write(json.dumps({spec: found}) + "\n")
            print(f"{time.time() - begin:4.0f} s  {brief(spec, found)}", flush=True)

    for name in arguments.names:
        lanes = LANES.get(name, [[name]])
        places = [devices[i % len(devices)] for i in range(len(lanes))]
        if name == "checks":
            # The first sees both GPUs.
            lanes = [[x] for x in CHECKS]
            places = [",".join(devices), *(devices[i % len(devices)] for i in range(len(lanes)))]
        at_once = AT_ONCE if name == "checks" else len(devices)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lane, lanes, places[: len(lanes)]))
        for line in tables.TABLES.get(name, lambda _: [])(results):
            print(line)
    bad = [spec for spec, found in results.items() if wrong(found)]
    print(f"{len(results)} cases, {len(bad)} wrong: {bad}; {time.time() - begin:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    run(main)
