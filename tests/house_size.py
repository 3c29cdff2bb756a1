"""Counts the size of the code: `python tests/house_size.py [CHECKOUT]`; test_house.py limits it.

The files that a training step and a generated token run are counted in house_walks.py.
"""

import ast
from pathlib import Path

from scripts import run

ROOT = Path(__file__).resolve().parents[1]


def lines(paths) -> int:
    """Lines of all files, with comments and empty lines."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def public_names(root: Path) -> dict[str, Path]:
    """The file of each public name of pallas_kernels."""
    tree = ast.parse((root / "pallas_kernels" / "public.py").read_text())
    return {
        alias.asname or alias.name: (root / node.module.replace(".", "/")).with_suffix(".py")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def to_follow(start: Path) -> set[Path]:
    """A file and what it imports from its folder, at any depth; not the general form."""
    found, left = set(), [start]
    while left:
        path = left.pop()
        if path in found or not path.is_file() or path.name.startswith("general"):
            continue
        found.add(path)
        for x in ast.walk(ast.parse(path.read_text())):
            if isinstance(x, ast.ImportFrom) and x.module:
                names = [x.module, *(f"{x.module}.{y.name}" for y in x.names)]
                parts = [name.split(".") for name in names]
                left += [
                    path.parent / f"{p[-1]}.py" for p in parts if p[-2:-1] == [path.parent.name]
                ]
    return found


def shared_class_names(root: Path) -> list[str]:
    """Names that two or more classes of pallas_kernels have."""
    texts = (path.read_text() for path in (root / "pallas_kernels").rglob("*.py"))
    names = [x.name for t in texts for x in ast.parse(t).body if isinstance(x, ast.ClassDef)]
    return sorted({name for name in names if names.count(name) > 1})


def counts(root: Path = ROOT) -> dict[str, int]:
    """The table of docs/architecture.md."""
    kernels = [
        path
        for path in (root / "pallas_kernels").rglob("*.py")
        if path.parent.name not in ("bench", "torch") and path.name != "explain.py"
    ]
    names = public_names(root)
    quantized = names["quantized_linear"]
    return {
        "lines of pallas_kernels without bench, explain and torch": lines(kernels),
        "lines of pallas_kernels/torch": lines((root / "pallas_kernels" / "torch").rglob("*.py")),
        "lines of jaxllm": lines((root / "jaxllm").rglob("*.py")),
        "public names of pallas_kernels": len(names),
        "class names that pallas_kernels has twice": len(shared_class_names(root)),
        "files to follow rms_norm": len(to_follow(names["rms_norm"])),
        "files to follow attention on Hopper": len(to_follow(names["attention"])),
        "files to follow a kernel of quantized_linear, at most": max(
            len({quantized} | to_follow(path)) for path in to_follow(quantized) - {quantized}
        ),
    }


def main() -> None:
    from house_walks import checkout, walks

    root = checkout(__doc__)
    for name, count in counts(root).items():
        print(f"{count:6} {name}")
    for name, files in walks(root).items():
        print(f"{len(files):6} {name}")


if __name__ == "__main__":
    run(main)
