"""Counts the files to read for one step: `python tests/house_walks.py [CHECKOUT]`.

Traces the train step of llama3_124m (AdamW, one GPU) and the program of a further token of one row,
and notes which files' functions run, from the compiled function's first line down to the kernels'.
Not counted are jaxllm/config, which only holds values, and the files at the top of pallas_kernels
that all ops share.  It needs no GPU: ops decide as on an H100.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run

ROOT = Path(__file__).resolve().parents[1]
SHARED = ("ampere", "dispatch", "guard", "ids", "mosaic", "options", "packed", "pipeline", "totals")


def walks(root: Path = ROOT) -> dict[str, list[str]]:
    """{what runs: the files}, of a checkout, in a process that imports it."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--in", str(root)]
    ran = run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def files_of(root: Path, work: Callable) -> set[str]:
    """The files of our packages whose functions run in work()."""
    found = set()

    def note(frame, event, _):
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    inside = {Path(name).relative_to(root) for name in found if name.startswith(f"{root}/")}
    return {str(path) for path in inside if path.parts[0] in ("jaxllm", "pallas_kernels")}


def train_step(config) -> Callable:
    """Traces the train step."""
    import jax

    from jaxllm import sharding
    from jaxllm.train.step import Trainer

    trainer = Trainer(config, sharding.make_mesh(config.mesh, jax.devices()[:1]))
    return trainer.trace_train_step


def next_token(config) -> Callable:
    """Traces the program of further tokens, as a GPU generates them for one row."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxllm.infer import decode
    from jaxllm.models import create

    decode.by_rows = lambda: True
    graph, params = nnx.split(nnx.eval_shape(lambda: create(config.model)), nnx.Param)
    first, further = decode._programs(graph, 64, False, 1.0, 1.0, 0, 1.0)
    cast = lambda params: decode.in_compute_dtype(params, config.model.compute_dtype)
    matrices = jax.eval_shape(cast, params)
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    row = like(jnp.int32, 1), like(jnp.uint32, 1, 3)  # length and stream
    token, arrays = jax.eval_shape(first, params, matrices, like(jnp.int32, 1, 64), *row)
    return lambda: further.trace(params, matrices, token, arrays, jnp.int32(1), *row)


def here(root: Path) -> dict[str, list[str]]:
    """`walks` of the checkout that this process imports."""
    from jaxllm.config import load
    from pallas_kernels import dispatch

    config = load(str(root / "configs" / "llama3_124m.yaml"), {"model.n_layers": "1"})
    with dispatch.rehearsal():
        step, token = (files_of(root, f(config)) for f in (train_step, next_token))
    shared = {f"pallas_kernels/{name}.py" for name in SHARED}
    ours = lambda files: sorted(x for x in files if x.startswith("jaxllm/") and "/config/" not in x)
    return {
        "files of jaxllm that a training step runs": ours(step),
        "files of jaxllm that a generated token runs": ours(token),
        "files of pallas_kernels that a generated token runs": sorted(
            x for x in token - shared if x.startswith("pallas_kernels/")
        ),
    }


def checkout(doc: str) -> Path:
    """The checkout that the command line names, or this one."""
    from scripts import Parser

    parser = Parser(doc)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    root = parser.parse_args().checkout.resolve()
    if not (root / "jaxllm").is_dir():
        parser.error(f"{root} is no checkout: it has no folder jaxllm")
    return root


def main() -> None:
    for what, files in walks(checkout(__doc__)).items():
        print(f"{len(files):6} {what}: {', '.join(files)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        print(json.dumps(here(Path(sys.argv[2]))))
    else:
        import scripts  # here: it puts this checkout before the other one

        scripts.run(main)
