"""Plot of a pass over time: memory against the budget, and the copies."""

from __future__ import annotations

from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _ROW = 900, 360, 70, 40, 26
_COLORS = {"rest": "#b8bcc2", "kept": "#4c78a8", "away": "#f2b36b", "out": "#e45756", "in": "#54a24b"}


def svg(site: dict[str, Any]) -> str:
    """Returns the plot of a site's plan as SVG."""
    course, budget = site["plan"]["course"], site["budget"]
    times = course["us"]
    if times[-1] <= 0:
        # Without times each step is as long as any.
        times = list(range(len(times)))
    cells = len(times) - 1
    kept, away = _curves(course["items"], cells)
    held, rest = course["held_bytes"], course["rest_bytes"][:cells]
    most = max([*held, budget or 0, 1]) * 1.05
    long = float(times[-1] or 1)

    def x(time: float) -> float:
        return float(_LEFT + time / long * (_WIDTH - _LEFT - 20))

    def y(amount: float) -> float:
        return float(_TOP + _HEIGHT - amount / most * _HEIGHT)

    def area(low: list[float], high: list[float], color: str) -> str:
        there = [f"{x(times[at]):.1f},{y(high[at]):.1f} {x(times[at + 1]):.1f},{y(high[at]):.1f}" for at in range(cells)]
        back = [f"{x(times[at + 1]):.1f},{y(low[at]):.1f} {x(times[at]):.1f},{y(low[at]):.1f}" for at in reversed(range(cells))]
        return f'<polygon points="{" ".join(there + back)}" fill="{color}"/>'

    nothing = [0.0] * cells
    first = [float(amount) for amount in rest]
    second = [low + more for low, more in zip(first, kept)]
    third = [low + more for low, more in zip(second, away)]
    parts = [area(nothing, first, _COLORS["rest"]), area(first, second, _COLORS["kept"]), area(second, third, _COLORS["away"])]
    line = " ".join(f"{x(times[at]):.1f},{y(held[at]):.1f} {x(times[at + 1]):.1f},{y(held[at]):.1f}" for at in range(cells))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#222"/>')
    if budget is not None:
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(budget):.1f}" y2="{y(budget):.1f}" stroke="#c00" stroke-dasharray="6 4"/>')
    for row, (name, label) in enumerate((("out", "copies out"), ("in", "copies in"))):
        top = _TOP + _HEIGHT + 12 + row * _ROW
        parts.append(f'<text x="4" y="{top + 14}">{label}</text>')
        for begin, end in _copies(course["items"], times, name, site):
            begin, end = x(min(begin, long)), x(min(end, long))
            parts.append(f'<rect x="{begin:.1f}" y="{top}" width="{max(end - begin, 0.5):.1f}" height="18" fill="{_COLORS[name]}" stroke="#fff" stroke-width=".3"/>')
    for tick in range(5):
        amount = most * tick / 4
        parts.append(f'<text x="4" y="{y(amount) + 4:.1f}">{amount / (1 << 30):.2f} GiB</text>')
    bottom = _TOP + _HEIGHT + 2 * _ROW + 32
    unit = f"{long / 1e3:.1f} ms" if course["us"][-1] > 0 else f"{cells} steps, not timed"
    parts.append(f'<text x="{_WIDTH - 20}" y="{bottom}" text-anchor="end">{unit}</text>')
    legend = ("rest", "the rest"), ("kept", "kept"), ("away", "offloaded or recomputed, while there")
    for at, (name, label) in enumerate(legend):
        parts.append(f'<rect x="{_LEFT + at * 170}" y="12" width="12" height="12" fill="{_COLORS[name]}"/>')
        parts.append(f'<text x="{_LEFT + at * 170 + 18}" y="22">{label}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 12}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _curves(items: list[list[Any]], cells: int) -> tuple[list[float], list[float]]:
    """Returns two curves over the cells: kept bytes, and resident bytes of offloaded items."""
    changes = [[0.0] * (cells + 1), [0.0] * (cells + 1)]

    def add(which: int, amount: float, begin: int, end: int) -> None:
        changes[which][min(begin, cells)] += amount
        changes[which][min(max(end, begin), cells)] -= amount

    for size, _link, verdict, packed, reload, needed, dropped in items:
        if verdict == 0:
            add(0, size, packed, dropped)
            continue
        add(1, size, packed, packed + 1)
        again = reload if reload is not None else needed
        if again is not None and needed is not None:
            add(1, size, again, needed + 1)
    curves: list[list[float]] = []
    for change in changes:
        total, curve = 0.0, []
        for amount in change[:cells]:
            total += amount
            curve.append(total)
        curves.append(curve)
    return curves[0], curves[1]


def _copies(items: list[list[Any]], times: list[float], way: str, site: dict[str, Any]) -> list[tuple[float, float]]:
    """Returns the intervals of the copies, one after the other at the rate of the plan."""
    rate = site["out_gb_s" if way == "out" else "in_gb_s"] * 1e3
    place = 3 if way == "out" else 4
    begun = sorted((item[place], item[5] or 0, item[1]) for item in items if item[2] == 1 and item[place] is not None)
    copies, free = [], 0.0
    for at, _needed, size in begun:
        begin = max(times[min(at, len(times) - 1)], free)
        free = begin + size / rate
        copies.append((begin, free))
    return copies
