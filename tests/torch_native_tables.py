"""Tables of what the timed cases of pallas_kernels.torch found (torch_native_timings.py).

Each is a function of {case: what it found} that yields lines; torch_native.py prints them.
"""

from torch_native_timings import TIMES, VLSTMS


def _ops_table(results):
    """PyTorch's GPU time relative to JAX's; the goal is at most 1.03."""
    by = {"torch": {}, "jax": {}}
    for spec, found in results.items():
        if spec.startswith("gpu_times:"):
            by[spec.split(":")[1]] |= found.get("times", {})
    heads = [f"{f'torch {k}':>9} {f'jax {k}':>9} {'ratio':>6}" for k in ("f", "fb")]
    yield f"{'ms of the GPU':22} {' '.join(heads)}"
    for name in TIMES:
        t, j = (by[how].get(name, {"FAILED": "no result"}) for how in ("torch", "jax"))
        if "FAILED" in t | j:
            yield f"{name:22} torch {t}, jax {j}"
            continue
        cells = [f"{t[k]:9.4f} {j[k]:9.4f} {t[k] / j[k]:6.3f}" for k in ("f", "fb")]
        yield f"{name:22} {' '.join(cells)}"


def _llama_table(results):
    """Losses side by side, and the largest difference from eager mode's."""
    runs = {k.split(":")[1]: v for k, v in results.items() if k.startswith("llama:") and "ms" in v}
    yield f"{'loss at step':14}" + "".join(f"{how:>10}" for how in runs)
    for step in (0, 1, 2, 5, 10, 20, 30, 40, 49):
        yield f"{step:14}" + "".join(f"{run['losses'][step]:10.5f}" for run in runs.values())
    for how, run in runs.items():
        eager = runs.get("eager", run)["losses"]
        apart = [abs(a - b) for a, b in zip(run["losses"], eager, strict=True)]
        yield (
            f"{how}: {run['ms']} ms a step, {run['GiB']} GiB, first step {run['first_s']} s,"
            f" largest difference from eager {max(apart):.5f} at step {apart.index(max(apart))}"
        )


def _vlstm_table(results):
    """Milliseconds, and how many times as fast ours is."""
    for spec, found in results.items():
        if not spec.startswith("vlstm:") or "fb" not in found:
            continue
        ours = {k: found[k] for k in ("f", "fb", "fb_graph")}
        yield f"{spec} {VLSTMS[spec[6:]]}: {ours}"
        for chunk in (128, 256):
            own = {k[len(f"xl{chunk}_") :]: v for k, v in found.items() if f"xl{chunk}" in k}
            if "fb" in own:
                ratios = [round(own[k] / found[k], 2) for k in ("f", "fb")]
                yield f"    mlstm_kernels xl, chunk {chunk}: {own}; ours is {ratios} times as fast"
        yield from (
            f"    {k}: {found[k]}" for k in ("mlstm_kernels", "xl128", "xl256") if k in found
        )


TABLES = {"ops": _ops_table, "llama": _llama_table, "vlstm": _vlstm_table}
