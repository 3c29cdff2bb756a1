"""The limits that keep the code readable: lines of a function, depth of its nesting."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES, MOST_DEPTH = 80, 3
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While, ast.If, ast.With, ast.Try)
# mlstm is left out until its kernels are phases of at most this size, too.
FILES = [
    "mosaic.py",
    "embedding.py",
    "rotary.py",
    *(f"{family}/*.py" for family in ("norms", "losses", "activations", "flash_attention")),
]


def depth(node: ast.AST) -> int:
    """How deep blocks (functions among them) stand in each other below `node`; elif adds none."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        children = [x for x in (value if isinstance(value, list) else [value])]
        for child in (x for x in children if isinstance(x, ast.AST)):
            elif_ = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
            deepest = max(deepest, isinstance(child, BLOCKS) * (not elif_) + depth(child))
    return deepest


def functions(source: str) -> list[tuple[str, int, int]]:
    """(name, lines, depth) of every function and method that stands in no other function."""
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    found = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    return [(f.name, f.end_lineno - f.lineno + 1, depth(f)) for f in found]


@pytest.mark.parametrize("pattern", FILES)
def test_functions_are_short_and_flat(pattern):
    paths = sorted((ROOT / "pallas_kernels").glob(pattern))
    assert paths, pattern
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
