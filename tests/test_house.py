"""Checks that the code stays readable: short flat functions, one-way imports, valid links."""

import ast
import re
import sys
from pathlib import Path
from subprocess import run

import pytest
from house_size import counts, public_names
from house_walks import walks

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 80
MOST_DEPTH = 3
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While, ast.If, ast.With, ast.Try)


def depth(node: ast.AST) -> int:
    """Depth of nested blocks (functions included) below `node`; elif adds none."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        children = [x for x in (value if isinstance(value, list) else [value])]
        for child in (x for x in children if isinstance(x, ast.AST)):
            elif_ = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
            deepest = max(deepest, isinstance(child, BLOCKS) * (not elif_) + depth(child))
    return deepest


def functions(source: str) -> list[tuple[str, int, int]]:
    """(name, lines, depth) of every function and method that is not inside another function."""
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    found = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    return [(f.name, f.end_lineno - f.lineno + 1, depth(f)) for f in found]


@pytest.mark.parametrize("package", ["pallas_kernels", "jaxllm"])
def test_functions_are_short_and_flat(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 40
    for path in paths:
        for name, lines, deep in functions(path.read_text()):
            where = f"{path.relative_to(ROOT)}: {name}"
            assert lines <= MOST_LINES, f"{where} has {lines} lines, more than {MOST_LINES}"
            assert deep <= MOST_DEPTH, f"{where} nests {deep} deep, more than {MOST_DEPTH}"


def test_lines_and_depth_are_counted():
    source = """
class A:
    def f(x):
        if x:
            pass
        elif x:
            for y in x:
                def g():
                    pass

def h(): pass
"""
    assert functions(source) == [("h", 1, 0), ("f", 7, 3)]


# A room imports only from rooms of a lower number (docs/architecture.md).
ROOMS = {
    "errors": 0, "files": 1, "terminal": 1, "config": 2, "sharding": 3, "text": 3, "data": 4,
    "layers": 4, "models": 5, "weights": 6, "infer": 7, "train": 8, "commands": 9,
}  # fmt: skip
ENTRIES = {"__init__", "__main__"}  # of python -m


def imported(path: Path) -> set[str]:
    """Names of the modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= set(names) if "." not in node.module else {node.module}
    return {name for name in found if name.split(".")[0] in ("jaxllm", "pallas_kernels")}


def test_imports_run_in_one_direction():
    seen = set()
    for path in sorted((ROOT / "jaxllm").rglob("*.py")):
        room = path.relative_to(ROOT / "jaxllm").parts[0].removesuffix(".py")
        if room in ENTRIES:
            continue
        seen.add(room)
        for name in imported(path):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == "jaxllm" and other not in (room, "__version__"):
                assert ROOMS[other] < ROOMS[room], f"{path.relative_to(ROOT)} imports {name}"
    assert seen == set(ROOMS)


# Lower a limit when its count falls; a change that must raise one says why.
MOST = {
    "lines of pallas_kernels without bench, explain and torch": 11_500,
    "lines of pallas_kernels/torch": 1_303,
    "lines of jaxllm": 13_814,
    "public names of pallas_kernels": 20,
    "class names that pallas_kernels has twice": 0,
    "files to follow rms_norm": 3,
    "files to follow attention on Hopper": 7,
    "files to follow a kernel of quantized_linear, at most": 4,
    "files of jaxllm that a training step runs": 9,
    "files of jaxllm that a generated token runs": 8,
    "files of pallas_kernels that a generated token runs": 10,
}


@pytest.mark.parametrize(("what", "count"), counts().items())
def test_the_house_does_not_grow(what, count):
    assert count <= MOST[what], f"{what}: {count}, more than {MOST[what]} (tests/house_size.py)"


def test_no_more_files_run_for_a_step():
    for what, files in walks().items():
        assert len(files) <= MOST[what], f"{what}: {files}, more than {MOST[what]}"
        assert any("language_model" in x or "decode" in x for x in files), what


def test_kernels_do_not_know_the_models():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        assert not any(name.startswith("jaxllm") for name in imported(path)), path


@pytest.mark.parametrize("package", ["pallas_kernels", "jaxllm"])
def test_no_public_name_hides_a_module(package):
    """`import pallas_kernels.a.b as b` takes attribute b of a, which must be the module."""
    inits = list((ROOT / package).rglob("__init__.py"))
    assert len(inits) > 5
    for init in [*inits, *(ROOT / package).glob("public.py")]:
        here = ".".join(init.parent.relative_to(ROOT).parts)
        nodes = [x for x in ast.walk(ast.parse(init.read_text())) if isinstance(x, ast.ImportFrom)]
        names = {alias.asname or alias.name for x in nodes if x.module != here for alias in x.names}
        hidden = names & {path.stem for path in init.parent.iterdir()}
        assert not hidden, f"{here}: {hidden}"


def test_every_op_is_exported():
    """The names under which ops ask how they run."""
    exported = set(public_names(ROOT))
    seen = set()
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and ast.unparse(node.func)
            if called in ("dispatch.run", "dispatch.use_kernel", "dispatch.choose"):
                if isinstance(node.args[0], ast.Constant):
                    seen.add(node.args[0].value)
    assert len(seen) > 10
    assert seen <= exported, f"pallas_kernels/public.py lacks {seen - exported}"


def test_only_a_look_at_an_op_imports_jax():
    code = """
import sys
import pallas_kernels as k
from pallas_kernels import norms
assert not hasattr(k, "__wrapped__") and "jax" not in sys.modules
assert k.attention is k.attention and not hasattr(k, "atention") and "jax" in sys.modules
assert dir(k) == k.__all__
from pallas_kernels import *
print(*sorted(k.__all__), attention is k.attention)
"""
    ran = run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [*sorted(public_names(ROOT)), "True"]


def test_the_readme_lists_every_op():
    ops = public_names(ROOT)
    table = (ROOT / "README.md").read_text().partition("## The ops")[2].partition("\n## ")[0]
    missing = {op for op in ops if f"`{op}`" not in table}
    assert missing <= {"Packed", "RopeScaling"}  # not ops


TOP = {
    *("pyproject.toml", "train.py", "README.md", "CONTRIBUTING.md", "LICENSE"),
    *("jaxllm", "pallas_kernels", "configs", "tests", "docs", "learn"),
}


def test_nothing_else_is_committed_at_the_top():
    listed = run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    top = {name.split("/")[0] for name in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "learn").rglob("*.md")),
]


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    prose = "".join(page.read_text().split("```")[::2])
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    prose = "".join(page.read_text().split("```")[::2])
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if not re.match(r"https?:", target):
            name, _, heading = target.partition("#")
            other = page.parent / name if name else page
            assert other.exists(), target
            assert not heading or heading in headings(other), target
