"""Pictures of a pool: what lies where, as text for a terminal and as SVG for a page.

Room: the pool. Rule: drawn from the books of a real allocator, never from an idea of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .allocator import Allocator, Span
from .geometry import Kind

_LETTER = {Kind.KV: "k", Kind.STATE: "s", Kind.CONV: "c", Kind.EXPERT: "E", Kind.EXPERT_PACKED: "P"}
_COLOUR = {
    Kind.KV: "#2f7ed8", Kind.STATE: "#8e5bc0", Kind.CONV: "#c78bd8",
    Kind.EXPERT: "#d9822b", Kind.EXPERT_PACKED: "#e8b04a",
}  # fmt: skip
_LEGEND = {
    Kind.KV: "KV", Kind.STATE: "state", Kind.CONV: "conv", Kind.EXPERT: "expert",
    Kind.EXPERT_PACKED: "packed expert",
}  # fmt: skip


def text_map(allocator: Allocator, width: int = 64, rows: int = 48) -> str:
    """One line a root page (the first `rows`), `width` characters for its bytes, and a legend.

    A letter is a used page's kind, `.` is free, `-` is the end of a parent that no page fits. A mark
    `|` begins every page that is at least three characters wide. Further root pages are summed up.
    """
    roots = _by_root(allocator)
    stride = allocator.geometry.page_grains(0)
    lines = []
    for index, spans in enumerate(roots[:rows]):
        row = ["."] * width
        for span in spans:
            first = (span.start - index * stride) * width // stride
            last = max(first + 1, (span.start - index * stride + span.grains) * width // stride)
            row[first:last] = _glyph(allocator, span) * (last - first)
            if last - first >= 3:
                row[first] = "|"
        lines.append(f"{index * stride:>10}  {''.join(row[:width])}")
    if len(roots) > rows:
        lines.append(f"{'':>10}  ... and {len(roots) - rows} more huge pages")
    legend = ", ".join(f"{_LETTER[k]} {_LEGEND[k]}" for k in Kind if allocator.geometry.classes_of(k))
    lines.append(f"{'grain':>10}  {legend}, . free, - end of a parent that no page fits")
    return "\n".join(lines)


def svg_map(allocator: Allocator, width: int = 720, height: int = 16, rows: int = 24) -> str:
    """The same picture as SVG: a bar a root page, a rectangle a page; free pages are hollow."""
    roots = _by_root(allocator)[:rows]
    stride = allocator.geometry.page_grains(0)
    kinds = [k for k in Kind if allocator.geometry.classes_of(k)]
    total = (len(roots) + 1) * (height + 4) + 8
    size = f'width="{width + 8}" height="{total}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    for index, spans in enumerate(roots):
        y = 4 + index * (height + 4)
        for span in spans:
            x = 4 + (span.start - index * stride) * width / stride
            kind = allocator.geometry.classes[span.cls].kind
            fill = {"used": _COLOUR.get(kind, "#888"), "free": "#fff", "lost": "#ddd"}[span.state]  # type: ignore[arg-type]
            out.append(
                f'<rect x="{x:.2f}" y="{y}" width="{span.grains * width / stride:.2f}" height="{height}" '
                f'fill="{fill}" stroke="#555" stroke-width="0.5"/>'
            )
    x, y = 4, 4 + len(roots) * (height + 4)
    for label, colour in [*((_LEGEND[k], _COLOUR[k]) for k in kinds), ("free", "#fff"), ("lost", "#ddd")]:
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}" stroke="#555"/>')
        out.append(f'<text x="{x + 16}" y="{y + 10}">{label}</text>')
        x += 28 + 7 * len(label)
    return "\n".join([*out, "</svg>"])


def _by_root(allocator: Allocator) -> Sequence[list[Span]]:
    roots: list[list[Span]] = [[] for _ in range(allocator.roots)]
    stride = allocator.geometry.page_grains(0)
    for span in allocator.spans():
        roots[span.start // stride].append(span)
    return roots


def _glyph(allocator: Allocator, span: Span) -> str:
    if span.state != "used":
        return "." if span.state == "free" else "-"
    kind = allocator.geometry.classes[span.cls].kind
    return "#" if kind is None else _LETTER[kind]
