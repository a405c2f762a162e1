"""Line charts as SVG text.

Room: the simulator's pen. Rule: standard library only; values in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

# Told apart by the colour-blind too (after Okabe and Ito), on white and on black: light, dark.
COLOURS = (
    ("#0072b2", "#4fa8e8"), ("#d55e00", "#ff8a3d"), ("#009e73", "#2fd0a0"), ("#b0578d", "#e79ac8"),
    ("#7a6a00", "#e6d34a"), ("#56b4e9", "#9adcff"), ("#000000", "#ffffff"), ("#888888", "#888888"),
)  # fmt: skip
LIGHT = {"bg": "#ffffff", "ink": "#1a1a1a", "dim": "#5c5c5c", "grid": "#dddddd"}
DARK = {"bg": "#14161a", "ink": "#e8e8e8", "dim": "#a8a8a8", "grid": "#33373d"}
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 34  # around a panel's plot area
WIDEST, THINNER = 2.8, 0.6  # the first curve's stroke; later ones are thinner, so that equal curves show


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. `dots` draws its points instead of joining them, `steps` holds each value."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart; curves of the same name have the same colour in every panel of a page."""

    title: str
    unit: str
    lines: Sequence[Line]
    log: bool = False


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1 of them."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    step = 10 ** math.floor(math.log10(span / most))
    step = next(step * m for m in (1, 2, 5, 10) if span / (step * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_marks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from just below `low` to just above `high`, the powers alone if many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for leading in ((1, 2, 5), (1,)):
        marks = [float(f"{m}e{d}") for d in decades for m in leading]
        first = max(i for i, mark in enumerate(marks) if mark <= low)
        last = next((i for i, mark in enumerate(marks) if mark >= high and i > first), len(marks) - 1)
        if last - first < 10:
            break
    return marks[first : last + 1]


def label(value: float, highest: float) -> str:
    """A short label of an axis that goes up to `highest`."""
    if highest >= 10_000 and value:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def page(
    title: str, panels: Sequence[Panel], *, columns: int = 2, width: int = 520, height: int = 240
) -> str:
    """All panels in a grid with one legend, the x axis being seconds."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    order = {name: i for i, name in enumerate(names)}
    seconds = max((x for panel in panels for line in panel.lines for x in line.x), default=0.0) or 1.0
    rows = -(-len(panels) // columns)
    head = 62
    total_w, total_h = columns * width, head + rows * height + 8
    size = f'width="{total_w}" height="{total_h}" viewBox="0 0 {total_w} {total_h}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_rules(LIGHT, 0)}@media (prefers-color-scheme: dark){{{_rules(DARK, 1)}}}</style>",
        '<g font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect class="bg" width="{total_w}" height="{total_h}"/>',
        f'<text class="ink" x="16" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    x = 16.0
    for name, i in order.items():
        colour = f"c{i % len(COLOURS)}"
        out.append(f'<path class="{colour}" d="M{x:.0f} 41h18" stroke-width="4"/>')
        out.append(f'<text class="ink" x="{x + 24:.0f}" y="45">{escape(name)}</text>')
        x += 44 + 7.2 * len(name)
    for i, panel in enumerate(panels):
        left, top = i % columns * width, head + i // columns * height
        out.append(f'<g transform="translate({left},{top})">')
        out += _panel(panel, order, seconds, width, height)
        out.append("</g>")
    out.append("</g></svg>")
    return "\n".join(out) + "\n"


def _rules(theme: dict[str, str], column: int) -> str:
    rules = [f".bg{{fill:{theme['bg']}}}", f".ink{{fill:{theme['ink']}}}", f".dim{{fill:{theme['dim']}}}"]
    rules += [f".grid{{stroke:{theme['grid']}}}", f".axis{{stroke:{theme['dim']}}}"]
    rules += [f".c{i}{{stroke:{pair[column]}}}" for i, pair in enumerate(COLOURS)]
    return "".join(rules)


def _panel(panel: Panel, order: dict[str, int], x_high: float, width: int, height: int) -> list[str]:
    ys = [y for line in panel.lines for y in line.y if y > 0 or not panel.log]
    high = max(ys, default=1.0) or 1.0
    marks = log_marks(min(ys, default=1.0), high) if panel.log else ticks(0, high * 1.06, 5)
    y_low, y_high = (marks[0], marks[-1]) if panel.log else (0.0, high * 1.06)
    right, bottom = width - RIGHT, height - BOTTOM

    def px(x: float) -> float:
        return LEFT + x / x_high * (right - LEFT)

    def py(y: float) -> float:
        share = math.log(max(y, y_low) / y_low) / math.log(y_high / y_low) if panel.log else y / y_high
        return bottom - share * (bottom - TOP)

    unit = escape(panel.unit + (", log scale" if panel.log else ""))
    unit = f'<tspan class="dim" font-weight="normal" dx="8">{unit}</tspan>'
    title = f"{escape(panel.title)}{unit}"
    out = [f'<text class="ink" x="{LEFT}" y="{TOP - 12}" font-weight="bold">{title}</text>']
    for y in marks:
        at = py(y)
        out.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
        text = label(y, y_high)
        out.append(f'<text class="dim" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for x in ticks(0, x_high, 7):
        at = px(x)
        out.append(f'<path class="axis" d="M{at:.1f} {bottom}v4"/>')
        out.append(f'<text class="dim" x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{x:g} s</text>')
    out.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    for line in panel.lines:
        points = [(px(x), py(y)) for x, y in zip(line.x, line.y, strict=True)]
        if not points:
            continue
        style = f'stroke-width="{max(1.2, WIDEST - THINNER * order[line.name]):.1f}" stroke-linejoin="round"'
        if line.dots:
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
            style = 'stroke-width="3.2" stroke-linecap="round" stroke-opacity="0.6"'
        elif line.steps:
            changes = [points[0], *(b for a, b in pairwise(points) if b[1] != a[1])]
            x, y = changes[0]
            path = f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in changes[1:])
            path += f"H{points[-1][0]:.1f}"
        else:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        out.append(f'<path class="c{order[line.name] % len(COLOURS)}" d="{path}" fill="none" {style}/>')
    return out
