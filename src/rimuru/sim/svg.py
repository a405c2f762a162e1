"""Line charts as SVG text.

Room: the simulator's pen. Rule: standard library only; values in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#888888")
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 34  # around a panel's plot area


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


def label(value: float, highest: float) -> str:
    """A short label of an axis that goes up to `highest`."""
    return f"{value / 1000:g}k" if highest >= 10_000 and value else f"{value:g}"


def page(
    title: str, panels: Sequence[Panel], *, columns: int = 2, width: int = 520, height: int = 240
) -> str:
    """All panels in a grid with one legend, the x axis being seconds."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    seconds = max((x for panel in panels for line in panel.lines for x in line.x), default=0.0) or 1.0
    rows = -(-len(panels) // columns)
    head = 62
    total_w, total_h = columns * width, head + rows * height + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_w}" height="{total_h}">',
        '<g font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{total_w}" height="{total_h}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    x = 16.0
    for name in names:
        out.append(f'<rect x="{x:.0f}" y="38" width="18" height="4" fill="{colour[name]}"/>')
        out.append(f'<text x="{x + 24:.0f}" y="45">{escape(name)}</text>')
        x += 44 + 7.2 * len(name)
    for i, panel in enumerate(panels):
        left, top = i % columns * width, head + i // columns * height
        out.append(f'<g transform="translate({left},{top})">')
        out += _panel(panel, colour, seconds, width, height)
        out.append("</g>")
    out.append("</g></svg>")
    return "\n".join(out) + "\n"


def _panel(panel: Panel, colour: dict[str, str], x_high: float, width: int, height: int) -> list[str]:
    ys = [y for line in panel.lines for y in line.y if y > 0 or not panel.log]
    y_high = max(ys, default=1.0) or 1.0
    y_low = min(ys, default=1.0) if panel.log else 0.0
    y_high = max(y_high * (1.0 if panel.log else 1.06), y_low * 1.01)
    right, bottom = width - RIGHT, height - BOTTOM

    def px(x: float) -> float:
        return LEFT + x / x_high * (right - LEFT)

    def py(y: float) -> float:
        share = math.log(max(y, y_low) / y_low) / math.log(y_high / y_low) if panel.log else y / y_high
        return bottom - share * (bottom - TOP)

    out = [f'<text x="{LEFT}" y="{TOP - 12}" font-weight="bold">{escape(panel.title)}</text>']
    out.append(f'<text x="{right}" y="{TOP - 12}" text-anchor="end" fill="#666">{escape(panel.unit)}</text>')
    if panel.log:
        decades = range(math.floor(math.log10(y_low)), math.ceil(math.log10(y_high)) + 1)
        marks = [m * 10.0**d for d in decades for m in (1, 2, 5) if y_low <= m * 10.0**d <= y_high]
    else:
        marks = ticks(0, y_high, 5)
    for y in marks:
        at = py(y)
        out.append(f'<path d="M{LEFT} {at:.1f}H{right}" stroke="#ddd"/>')
        text = label(y, y_high)
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#444">{text}</text>')
    for x in ticks(0, x_high, 7):
        at = px(x)
        out.append(f'<path d="M{at:.1f} {bottom}v4" stroke="#888"/>')
        out.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle" fill="#444">{x:g} s</text>')
    out.append(f'<path d="M{LEFT} {bottom}H{right}" stroke="#888"/>')
    for line in panel.lines:
        points = [(px(x), py(y)) for x, y in zip(line.x, line.y, strict=True)]
        if not points:
            continue
        if line.dots:
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
            style = 'stroke-width="3" stroke-linecap="round" stroke-opacity="0.6"'
        elif line.steps:
            x, y = points[0]
            path = f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])
            style = 'stroke-width="1.3"'
        else:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            style = 'stroke-width="1.3"'
        out.append(f'<path d="{path}" fill="none" stroke="{colour[line.name]}" {style}/>')
    return out
