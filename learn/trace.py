"""Draws what each warpgroup, buffer and barrier of one block does, and when, from a recorded run.

A CPU knows the order of events but not their times.  So the events get the times of a simple model
of one SM of an H100, whose numbers are the constants below: what starts when, what waits for what,
and which copies overlap are exact, the lengths of the bars are the model's.  It is no measurement.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from learn.record import Event

# Nanoseconds, and bytes or multiply-adds a nanosecond, of one SM.
LATENCY = 600  # of a load from global memory, and of a TMA copy
SHARED = 225  # bytes: 128 a cycle at 1.755 GHz
ISSUE = 5  # to start a load or a copy
ARITHMETIC = 25  # elements: about ten instructions for each
TENSOR = 3750  # multiply-adds of bfloat16

COLOURS = {
    "wait": "#d9d9d9",
    "load": "#f4a261",
    "compute": "#2a9d8f",
    "wgmma": "#8e5bb5",
    "copy in": "#4f86c6",
    "ready": "#dbe7f5",
    "copy out": "#c8553d",
}
MEANING = {
    "wait": "waits",
    "load": "waits for its loads from global memory",
    "compute": "computes, reads or writes shared memory, stores",
    "wgmma": "tensor core multiplies",
    "copy in": "copy arriving",
    "ready": "data in the buffer",
    "copy out": "TMA reads the buffer, to copy it out",
}


class Bar(NamedTuple):
    lane: str
    kind: str
    start: float
    stop: float
    label: str = ""


class _Sm:
    """The state of the modelled SM: clocks of its units, and of its barriers."""

    def __init__(self, arrivals: dict[str, int], bandwidth: float):
        self.arrivals, self.bandwidth = arrivals, bandwidth
        self.memory = 0.0  # when the queue of copies and loads is empty
        self.tensor = 0.0  # when the tensor core is free
        self.done: dict[str, list[float]] = {}  # times of arrivals, for each barrier
        self.bars: list[Bar] = []
        self.full: dict[str, float] = {}  # since when a buffer holds data

    def phase(self, barrier: str, number: int) -> float | None:
        """When the barrier was complete for the `number`-th time, or None if not yet."""
        need = self.arrivals.get(barrier, 1) * (number + 1)
        times = sorted(self.done.get(barrier, []))
        return times[need - 1] if len(times) >= need else None

    def move(self, start: float, size: int) -> float:
        """Moves bytes between global memory and the SM; returns when they are there."""
        self.memory = max(self.memory, start) + size / self.bandwidth
        return self.memory + LATENCY


class _Warpgroup:
    """One warpgroup's place in its list of events."""

    def __init__(self, sm: _Sm, name: str, events: list[Event]):
        self.sm, self.name, self.events = sm, name, events
        self.at, self.now = 0, 0.0
        self.waits: dict[tuple, int] = {}  # how often it, or a warp of it, waited for a barrier
        self.loads: list[tuple[int, float]] = []  # under way: instruction and arrival
        self.groups = [0.0]  # of copies in without a barrier: arrival; the last one is open
        self.stores: list[dict[str, float]] = []  # copies out: when they are "read" and "done"
        self.wgmmas: list[float] = []

    def add(self, kind: str, stop: float, label: str = "", lane: str | None = None, start=None):
        start = self.now if start is None else start
        if stop > start:
            self.sm.bars.append(Bar(lane or self.name, kind, start, stop, label))
        if lane is None:
            self.now = max(self.now, stop)

    def settle(self):
        """Waits for the loads that are under way, because their values are needed."""
        if self.loads:
            self.add("load", max(t for _, t in self.loads))
            self.loads = []

    def step(self) -> bool:
        """Does the next event; False if it has to wait for another warpgroup."""
        e = self.events[self.at]
        again = any(where == e.where for where, _ in self.loads)
        if e.kind != "load" or e.space == "shared" or again:
            self.settle()
        if not getattr(self, "_" + e.kind.replace(" ", "_"))(e):
            return False
        self.at += 1
        return True

    def _load(self, e: Event) -> bool:
        if e.space == "global":
            self.loads.append((e.where, self.sm.move(self.now, e.bytes)))
            self.add("compute", self.now + ISSUE)
        else:
            self.add("compute", self.now + e.bytes / SHARED + e.bytes / 2 / ARITHMETIC)
        return True

    def _store(self, e: Event) -> bool:
        self.add("compute", self.now + ISSUE + e.bytes / SHARED)
        if e.space == "global":
            self.sm.move(self.now, e.bytes)
        return True

    def _copy_in(self, e: Event) -> bool:
        if e.buffer in self.sm.full:
            self.add("ready", self.now, "", e.buffer, self.sm.full.pop(e.buffer))
        arrives = self.sm.move(self.now, e.bytes)
        if e.barrier:
            self.sm.done.setdefault(e.barrier, []).append(arrives)
        else:
            self.groups[-1] = max(self.groups[-1], arrives)
            self.groups += [0.0] * e.count
        self.add("copy in", arrives, "", e.buffer, self.now)
        self.sm.full[e.buffer] = arrives
        self.add("compute", self.now + ISSUE)
        return True

    def _copy_out(self, e: Event) -> bool:
        if e.buffer in self.sm.full:
            self.add("ready", self.now, "", e.buffer, self.sm.full.pop(e.buffer))
        done = self.sm.move(self.now, e.bytes)
        self.stores.append({"read": done - LATENCY, "done": done})
        self.add("copy out", done - LATENCY, "", e.buffer, self.now)
        self.add("compute", self.now + ISSUE)
        return True

    def _wait(self, e: Event) -> bool:
        waiter = e.buffer, e.warp
        time = self.sm.phase(e.buffer, self.waits.get(waiter, 0))
        if time is None:
            return False
        self.waits[waiter] = self.waits.get(waiter, 0) + 1
        self.add("wait", time, e.buffer)
        return True

    def _arrive(self, e: Event) -> bool:
        self.sm.done.setdefault(e.buffer, []).append(self.now)
        self.add("compute", self.now + ISSUE)
        return True

    def _wait_copies(self, e: Event) -> bool:
        left = len(self.stores) - e.count
        if left > 0:
            self.add("wait", self.stores[left - 1][e.buffer], "copies out")
            self.stores = self.stores[left:] if e.buffer == "done" else self.stores
        return True

    def _wait_copies_in(self, e: Event) -> bool:
        while len(self.groups) - 1 > e.count:
            self.add("wait", self.groups.pop(0), "copies in")
        return True

    def _wgmma(self, e: Event) -> bool:
        start = max(self.sm.tensor, self.now)
        self.sm.tensor = start + e.count / TENSOR
        self.wgmmas.append(self.sm.tensor)
        self.add("wgmma", self.sm.tensor, self.name, "tensor core", start)
        self.add("compute", self.now + ISSUE)
        return True

    def _wait_wgmma(self, e: Event) -> bool:
        left = len(self.wgmmas) - e.count
        if left > 0:
            self.add("wait", self.wgmmas[left - 1], "wgmma")
            self.wgmmas = self.wgmmas[left:]
        return True


def schedule(events: Iterable[Event], arrivals: dict[str, int], bandwidth: float = 22) -> list[Bar]:
    """The bars of one block of one kernel; raises RuntimeError where it would wait for ever.

    arrivals: that complete each barrier.
    bandwidth: bytes a nanosecond that an SM gets; its share of memory's 2.95 TB/s is 22.
    """
    sm = _Sm(arrivals, bandwidth)
    by_wg = itertools.groupby(sorted(events, key=lambda e: e.wg), key=lambda e: e.wg)
    wgs = [_Warpgroup(sm, f"warpgroup {wg}", list(own)) for wg, own in by_wg]
    while True:
        waiting = [w for w in wgs if w.at < len(w.events)]
        if not waiting:
            break
        # The one whose clock is the earliest goes on, so that shared units are asked in order.
        if not any(w.step() for w in sorted(waiting, key=lambda w: w.now)):
            first = waiting[0]
            raise RuntimeError(f"{first.name} waits for ever: {first.events[first.at]}")
    for w in wgs:
        w.settle()
    end = max((bar.stop for bar in sm.bars), default=0.0)
    for buffer, since in sm.full.items():
        sm.bars.append(Bar(buffer, "ready", since, end))
    return sm.bars


WIDTH, LEFT, HEIGHT = 1000, 150, 26


def draw(bars: list[Bar], title: str) -> str:
    """The picture as SVG: a lane for each warpgroup, buffer and unit; time runs to the right."""
    end = max(bar.stop for bar in bars)
    order = lambda lane: (not lane.startswith("warpgroup"), lane != "tensor core", lane)
    lanes = sorted({bar.lane for bar in bars}, key=order)
    x = lambda time: LEFT + time / end * (WIDTH - LEFT - 20)
    bottom = 40 + HEIGHT * len(lanes)
    used = [kind for kind in COLOURS if any(bar.kind == kind for bar in bars)]
    height = bottom + 40 + 18 * ((len(used) + 1) // 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{_safe(title)}</text>',
    ]
    for i, lane in enumerate(lanes):
        y = 40 + HEIGHT * i
        out.append(f'<text x="10" y="{y + 15}">{_safe(lane)}</text>')
        out.append(f'<path d="M{LEFT} {y + 21}H{WIDTH - 20}" stroke="#eeeeee"/>')
        for bar in (bar for bar in bars if bar.lane == lane):
            wide = max(x(bar.stop) - x(bar.start), 0.5)
            out.append(
                f'<rect x="{x(bar.start):.1f}" y="{y + 2}" width="{wide:.1f}" height="17"'
                f' fill="{COLOURS[bar.kind]}"><title>{_safe(bar.label or bar.kind)}:'
                f" {bar.start:.0f} to {bar.stop:.0f} ns</title></rect>"
            )
            if bar.kind == "wait" and wide > 6 * len(bar.label) + 4:
                out.append(
                    f'<text x="{x(bar.start) + 3:.1f}" y="{y + 15}">{_safe(bar.label)}</text>'
                )
    for i in range(6):
        time = end * i / 5
        anchor = "end" if i == 5 else "middle"
        out.append(
            f'<text x="{x(time):.1f}" y="{bottom + 14}" text-anchor="{anchor}">{time:.0f} ns</text>'
        )
    for i, kind in enumerate(used):
        left, y = LEFT + i % 2 * 400, bottom + 28 + i // 2 * 18
        out.append(f'<rect x="{left}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{left + 18}" y="{y + 11}">{MEANING[kind]}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _safe(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
