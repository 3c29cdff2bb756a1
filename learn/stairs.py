"""Draws the stairs of a ladder as SVG: each rung's share of the roofline, counted and measured."""

from learn.ladder import Ladder, Sizes, idea, rungs

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1000, 300, 50, 50, 70
MEASURED, COUNTED, XLA = "#2a9d8f", "#9aa5b1", "#c8553d"


def text(sizes: Sizes) -> str:
    return " x ".join(map(str, sizes.values()))


def draw(ladder: Ladder, results: dict) -> str:
    """One panel for each of the ladder's sizes.

    results: what `measure` in __main__.py writes for this ladder; {} if no GPU has run it.
    """
    panels = [_panel(ladder, sizes, results, i * HEIGHT) for i, sizes in enumerate(ladder.sizes)]
    height = HEIGHT * len(panels)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' font-family="sans-serif" font-size="12">\n<rect width="{WIDTH}" height="{height}"'
        ' fill="white"/>'
    )
    return "\n".join([head, *panels, "</svg>"]) + "\n"


def _panel(ladder: Ladder, sizes: Sizes, results: dict, top: int) -> str:
    measured = results.get("times", {}).get(text(sizes), {})
    floor = results.get("floors", {}).get(text(sizes)) or ladder.floor(sizes)
    where = results.get("device", "H100: not measured yet")
    found = rungs(ladder)
    step = (WIDTH - LEFT - 20) / len(found)
    zero, one = top + HEIGHT - BOTTOM, top + TOP
    y = lambda share: zero - min(share, 1.1) * (zero - one)
    out = [
        f'<text x="10" y="{top + 20}" font-size="14">{ladder.name}, {text(sizes)}, {where}:'
        f" share of the roofline ({floor:.0f} us)</text>",
        _line(y(1), "black", "roofline"),
        f'<path d="M{LEFT} {zero}H{WIDTH - 20}" stroke="black"/>',
    ]
    if "xla" in measured:
        share = floor / measured["xla"]
        out.append(_line(y(share), XLA, f"XLA {share:.2f}"))
    for i, (rung, count) in enumerate(zip(found, ladder.counted, strict=True)):
        x, name = LEFT + i * step + 8, rung.__name__.rpartition(".")[2]
        wide, share = step - 16, ladder.floor(sizes) / count(sizes)
        out.append(
            f'<rect x="{x:.0f}" y="{y(share):.1f}" width="{wide:.0f}"'
            f' height="{zero - y(share):.1f}" fill="none" stroke="{COUNTED}"'
            f' stroke-dasharray="4 3"><title>{idea(rung)}</title></rect>'
        )
        words = f"counted {count(sizes):.0f} us"
        if name in measured:
            share = floor / measured[name]
            out.append(
                f'<rect x="{x + 6:.0f}" y="{y(share):.1f}" width="{wide - 12:.0f}"'
                f' height="{zero - y(share):.1f}" fill="{MEASURED}"/>'
            )
            out.append(_text(x + wide / 2, zero + 48, f"{measured[name]:.1f} us: {share:.2f}"))
        out.append(_text(x + wide / 2, zero + 16, name.removeprefix("rung").replace("_", " ")))
        out.append(_text(x + wide / 2, zero + 32, words))
    return "\n".join(out)


def _line(y: float, colour: str, label: str) -> str:
    return (
        f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" stroke="{colour}"/>'
        f'<text x="{WIDTH - 22}" y="{y - 4:.1f}" text-anchor="end" fill="{colour}">{label}</text>'
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" font-size="11">{words}</text>'
