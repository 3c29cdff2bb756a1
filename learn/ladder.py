"""What a ladder is, and how one of its rungs runs and is checked."""

import importlib
import importlib.util
import math
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernel_checks
import numpy as np

HERE = Path(__file__).parent
COPY, MATMUL = 2.95e6, 800e6  # bytes and operations a microsecond that an H100 reaches
CYCLES = 1755  # a microsecond
SMS = 132
Sizes = dict[str, int]


class Ladder(NamedTuple):
    """One op, from the first rung to the kernel that ships.

    Every rung is a module of the ladder's folder, rung1_... to rungN_..., with a function of the
    ladder's name.  It may have `prepare(*inputs)`, which makes the function's arguments and is not
    timed, SMALL, other sizes for the interpreter, and BLOCKS, how many
    persistent blocks there are at most; the interpreter sets it to 2.
    """

    name: str
    reference: Callable  # the formula in jnp: what XLA runs, and in float64 the truth
    inputs: Callable[[Sizes], tuple]
    sizes: tuple[Sizes, ...]  # at which a GPU times it
    small: Sizes  # at which a CPU interprets it
    again: Sizes  # at which it tests a reader's answer, too, which may fit `small` alone
    bytes: Callable[[Sizes], float]  # that must move
    flops: Callable[[Sizes], float]  # of the tensor core
    counted: tuple[Callable[[Sizes], float], ...]  # microseconds of each rung, as its docstring
    properties: dict[int, Callable]  # what the test of an exercise wants beyond right numbers
    bandwidth: float = 22  # bytes a nanosecond of an SM in pictures: its share of COPY
    formulas: dict[int, Callable] = {}  # of rungs that compute only a part of the reference
    beside: tuple[str, ...] = ()  # modules that a GPU runs after the rungs, if not why_not()

    def floor(self, sizes: Sizes) -> float:
        """Microseconds that no kernel on an H100 beats."""
        return max(self.bytes(sizes) / COPY, self.flops(sizes) / MATMUL)


def names() -> list[str]:
    """The ladders: the folders with a page."""
    order = (HERE / "README.md").read_text()
    found = [path.parent.name for path in HERE.glob("*/README.md")]
    return sorted(found, key=lambda name: order.find(f"({name}/README.md)"))


def find(name: str) -> Ladder:
    return importlib.import_module(f"learn.{name}").LADDER


def rungs(ladder: Ladder) -> list[ModuleType]:
    """The modules of the rungs, in their order."""
    folder = HERE / ladder.name
    found = sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if m.name.startswith("rung"))
    return [importlib.import_module(f"learn.{ladder.name}.{name}") for name in found]


def beside(ladder: Ladder) -> list[ModuleType]:
    """The modules that are no rungs: kernels in another language, with `why_not` like an op's."""
    return [importlib.import_module(f"learn.{ladder.name}.{name}") for name in ladder.beside]


def load(path: Path, number: int) -> ModuleType:
    """The module in a file of the reader's, which stands for a rung."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise SystemExit(f"error: {path} {what}: name a Python file of yours")
    spec = importlib.util.spec_from_file_location(f"learn.rung{number}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"error: {path} is not a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        raise SystemExit(f"error: {e.filename}, line {e.lineno}: {e.msg}") from e
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == spec.origin][-1]
        raise SystemExit(f"error: {path}, line {line}: {type(e).__name__}: {e}") from e
    return module


def idea(rung: ModuleType) -> str:
    """The first line of a rung's docstring."""
    return (rung.__doc__ or "").partition("\n")[0].rstrip(".")


def call(ladder: Ladder, rung: ModuleType, inputs: tuple) -> tuple[Callable, tuple]:
    """The function of a rung and its arguments."""
    if jax.default_backend() != "gpu" and hasattr(rung, "BLOCKS"):
        rung.BLOCKS = 2  # so that a block has a few tiles at small sizes
    prepare = getattr(rung, "prepare", None)
    return getattr(rung, ladder.name), inputs if prepare is None else prepare(*inputs)


def whole(ladder: Ladder, number: int) -> Callable:
    """A rung with its `prepare`, as a function of the ladder's inputs."""
    rung = rungs(ladder)[number - 1]
    prepare = getattr(rung, "prepare", lambda *inputs: inputs)
    return lambda *inputs: getattr(rung, ladder.name)(*prepare(*inputs))


def number(rung: ModuleType) -> int:
    """5 for learn.layer_norm.rung5_ring; 0 for a module beside the rungs."""
    _, found, rest = rung.__name__.rpartition(".rung")
    return int(rest.partition("_")[0]) if found else 0


def small(ladder: Ladder, rung: ModuleType) -> Sizes:
    """The sizes at which a CPU interprets a rung."""
    return ladder.small | getattr(rung, "SMALL", {})


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Normal numbers, which repeat after a million."""
    values = np.random.default_rng(seed).standard_normal(2**20)
    return jnp.asarray(np.resize(values.astype(np.float32), shape), dtype)


def like(array) -> tuple[int, str]:
    """Elements and dtype, which tell a kernel's arrays apart whatever their names and shapes."""
    return math.prod(array.shape), str(jnp.dtype(array.dtype))


class Example(NamedTuple):
    """Inputs at small sizes, and results to compare a rung's with."""

    inputs: tuple
    truth: Any  # in float64
    expected: Any  # of XLA, in the inputs' dtypes


_examples: dict[tuple, Example] = {}


def example(ladder: Ladder, rung: ModuleType, sizes: Sizes | None = None) -> Example:
    """The inputs for a rung, and the results; rungs of the same sizes share them."""
    sizes = small(ladder, rung) if sizes is None else sizes
    formula = ladder.formulas.get(number(rung), ladder.reference)
    key = ladder.name, formula, *sizes.items()
    if key not in _examples:
        inputs = ladder.inputs(sizes)
        with jax.enable_x64(True):
            wide = [np.asarray(a) for a in inputs]
            floating = [jnp.issubdtype(a.dtype, jnp.floating) for a in wide]
            wide = [a.astype(np.float64) if f else a for a, f in zip(wide, floating, strict=True)]
            truth = jax.tree.map(np.asarray, jax.jit(formula)(*wide))
        _examples[key] = Example(inputs, truth, jax.jit(formula)(*inputs))
    return _examples[key]


def check(ladder: Ladder, rung: ModuleType, run: Callable, sizes: Sizes | None = None) -> Any:
    """Asserts that a rung's results are as near to float64 as XLA's; returns them.

    run(function, arguments): runs the rung.  sizes: instead of the rung's `small`.
    """
    inputs, truth, expected = example(ladder, rung, sizes)
    actual = run(*call(ladder, rung, inputs))
    check_types(ladder, actual, expected)
    leaves = [jax.tree.leaves(x) for x in (actual, expected, truth)]
    for i, (a, e, t) in enumerate(zip(*leaves, strict=True)):
        kernel_checks.assert_error_ratio(a, e, t, f"result {i}")
    return actual


def check_types(ladder: Ladder, actual: Any, expected: Any) -> None:
    """Asserts that there are as many results as there must be, of the right shapes and dtypes."""
    results, wanted = (jax.tree.leaves(x, is_leaf=lambda x: x is None) for x in (actual, expected))
    assert len(results) == len(wanted), (
        f"{ladder.name} returns {len(results)} results, not {len(wanted)}"
    )
    kind = lambda a: "None" if a is None else f"{a.dtype}{a.shape}"
    for i, (a, e) in enumerate(zip(results, wanted, strict=True)):
        assert kind(a) == kind(e), f"result {i} is {kind(a)}, not {kind(e)}"
