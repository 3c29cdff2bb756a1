"""Stores the figures of a GPU in docs/gpu, compares them with another run, and prints a table."""

import dataclasses
import json
import re
from pathlib import Path

TOLERANCE = 0.05
HIGHER_IS_BETTER = {"tokens/s"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured figure and the stored one."""

    name: str
    unit: str
    now: float | None  # None: not measured
    stored: float | None  # None: not stored yet

    @property
    def worse(self) -> float | None:
        """How much worse it is than stored, as a fraction; negative: better."""
        if self.now is None or self.stored is None:
            return None
        if self.unit in HIGHER_IS_BETTER:
            return self.stored / self.now - 1
        return self.now / self.stored - 1

    @property
    def bad(self) -> bool:
        return self.now is None or (self.worse or 0) > TOLERANCE


def path_of(folder: Path, device: str, jax_version: str) -> Path:
    """The file for the figures of a GPU and a JAX; PCIe and SXM boards count as different GPUs."""
    words = re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", ""))
    return folder / f"{'-'.join(words)}_jax{jax_version}.json"


def read(path: Path) -> dict:
    """Reads what `write` stored: device, versions, date, tests, figures; {} without a file."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, figures: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


def compare(now: dict, stored: dict, names: list[str], units: tuple[str, ...]) -> list[Row]:
    """Rows for everything that was measured, is stored, or should have been measured.

    names: what should be measured, in the order of the rows; a name may be the prefix of several
    rows (forward, backward).
    """
    rows = []
    for unit in units:
        mine, theirs = now.get(unit, {}), stored.get(unit, {})
        rows += [Row(name, unit, mine.get(name), theirs.get(name)) for name in mine | theirs]
    for name in names:
        if not any(belongs(row.name, name) for row in rows):
            rows.append(Row(name, "", None, None))
    place = lambda row: next((i for i, n in enumerate(names) if belongs(row.name, n)), len(names))
    return sorted(rows, key=place)


def belongs(row: str, name: str) -> bool:
    return f"{row} ".startswith(f"{name} ")


def merged(before: dict, about: dict, rows: list[Row], names: list[str]) -> dict:
    """The figures to store; parts that did not run and rows that failed keep their old figures.

    names: what should be measured; figures of other names are dropped.
    """
    ran = {row.unit for row in rows}
    figures = {u: dict(f) for u, f in before.get("figures", {}).items() if u not in ran}
    for row in rows:
        figure = row.stored if row.now is None else row.now
        if figure is not None and any(belongs(row.name, name) for name in names):
            figures.setdefault(row.unit, {})[row.name] = figure
    tests = about["tests"] or before.get("tests")
    return {**about, "tests": tests, "figures": figures}


def rows(kept: dict) -> list[Row]:
    """Rows of stored figures, without a comparison."""
    figures = kept["figures"].items()
    return [Row(name, unit, figure, None) for unit, f in figures for name, figure in f.items()]


def table(rows: list[Row]) -> str:
    """A Markdown table; bold rows are worse than stored beyond the tolerance, or not measured."""
    beside = any(row.stored is not None for row in rows)
    lines = (
        ["| | now | stored | change |", "|---|---|---|---|"] if beside else ["| | |", "|---|---|"]
    )
    for row in rows:
        cells = [row.name, _figure(row.now, row.unit)]
        if beside:
            change = "" if row.worse is None else f"{abs(row.worse):.1%}"
            change += " worse" if (row.worse or 0) > 0 else " better" if row.worse else ""
            cells += [_figure(row.stored, row.unit), change]
        lines.append("| " + " | ".join(f"**{c}**" if row.bad and c else c for c in cells) + " |")
    return "\n".join(lines)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def report(about: dict, rows: list[Row], failed: dict[str, str]) -> str:
    """The page to print and store: device, versions, tests, figures, failures and their reasons."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [f"# {about['device']}, JAX {about['versions'].get('JAX', '?')}"]
    parts.append(f"`.ci/gpu` of {about['date']}: {versions}.")
    if tests := about["tests"]:  # None: the tests did not run
        parts.append(
            f"Tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
            f" in {tests['seconds']:.0f} s."
        )
    if rows:
        parts.append(
            "GPU time per call (CUPTI), tokens/s and peak memory of training steps. Bold: worse"
            f" than stored by more than {TOLERANCE:.0%}, or not measured."
        )
        parts.append(table(rows))
    if failed:
        parts.append("Failed:")
        parts.append("\n".join(f"- `{name}` {why}".rstrip() for name, why in failed.items()))
    return "\n\n".join(parts) + "\n"


def status(rows: list[Row], failed: dict[str, str]) -> int:
    """1 if anything failed or is worse than stored."""
    return int(bool(failed) or any(row.bad for row in rows))
