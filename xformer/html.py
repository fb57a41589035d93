"""HTML for notebooks: tables, trees, curves and heat maps, without scripts or external files.

Texts are escaped here. Colors follow the theme of the notebook.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

_CELL, _FONT = 18, 11  # pixels
_LEVELS = 64  # of a heat map
_DARK = (8, 48, 107)  # color of the value 1; 0 is white


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def markup(content: str) -> Markup:
    """Return a text as HTML: escaped, unless it is HTML already."""
    return content if isinstance(content, Markup) else Markup(escape(content))


def tag(name: str, *contents: str, **attributes: str | int | float) -> Markup:
    """Return an element. The trailing underscore of an attribute is dropped; other underscores become hyphens.

    Examples:
        >>> tag("td", "a < b", class_="left")
        '<td class="left">a &lt; b</td>'
    """
    names = {key: key.removesuffix("_").replace("_", "-") for key in attributes}
    text = "".join(f' {names[key]}="{escape(str(value))}"' for key, value in attributes.items())
    return Markup(f"<{name}{text}>{''.join(map(markup, contents))}</{name}>")


def join(contents: Iterable[str]) -> Markup:
    """Return several texts as one."""
    return Markup("".join(map(markup, contents)))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table."""
    head = [tag("tr", *(tag("th", cell) for cell in header))] if header else []
    return tag("table", *head, *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))


def details(summary: str, *contents: str, is_open: bool = False) -> Markup:
    """Return a block that a click opens and closes."""
    start = "<details open>" if is_open else "<details>"
    indented = tag("div", *contents, style="margin-left: 1.5em")
    return Markup(f"{start}{tag('summary', summary)}{indented}</details>")


def curve(x: Sequence[float], y: Sequence[float], label: str) -> Markup:
    """Return a curve as SVG, with the extremes of both axes; values that are not finite are left out."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not points:
        return Markup()
    width, height = 480, 160
    points = [*points[: -1 : math.ceil(len(points) / (2 * width))], points[-1]]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    margin, inner_width, inner_height = 60, width - 70, height - 40
    scaled = " ".join(
        f"{margin + inner_width * (a - left) / ((right - left) or 1):.1f},"
        f"{10 + inner_height * (high - b) / ((high - low) or 1):.1f}"
        for a, b in points
    )
    bottom = 10 + inner_height
    labels = [
        _text(margin - 6, 14, f"{high:.3g}", anchor="end"),
        _text(margin - 6, bottom, f"{low:.3g}", anchor="end"),
        _text(margin - 6, (14 + bottom) / 2, label, anchor="end"),
        _text(margin, bottom + 18, f"{left:g}"),
        _text(margin + inner_width, bottom + 18, f"step {right:g}", anchor="end"),
    ]
    axes = f"M{margin},10 V{bottom} H{margin + inner_width}"
    frame = tag("path", d=axes, fill="none", stroke="currentColor", stroke_opacity=0.4)
    line = tag("polyline", points=scaled, fill="none", stroke="#4477cc", stroke_width=1.5)
    return _svg(width, height, frame, line, *labels)


class HeatMap(NamedTuple):
    """One of several heat maps of the same shape.

    Attributes:
        values: Rows of numbers from 0 to 1.
        choices: Value of each choice that selects the map, e.g. ("1", "mean").
    """

    values: Sequence[Sequence[float]]
    choices: Sequence[str]


def heat_maps(
    maps: Sequence[HeatMap], rows: Sequence[str], columns: Sequence[str], choices: Mapping[str, Sequence[str]]
) -> Markup:
    """Return heat maps and lists of choices that select the visible one, by a style sheet without scripts.

    Args:
        maps: The heat maps.
        rows: Labels of the rows.
        columns: Labels of the columns.
        choices: Values of each choice by its name, the first one selected.
    """
    left = 12 + 0.62 * _FONT * max(map(len, rows), default=0)
    top = 12 + 0.62 * _FONT * max(map(len, columns), default=0)
    width, height = _CELL * len(columns), _CELL * len(rows)
    images = [
        tag(
            "image",
            class_=" ".join(f"{name}-{value}" for name, value in zip(choices, each.choices, strict=True)),
            href=f"data:image/png;base64,{base64.b64encode(png(each.values)).decode()}",
            x=left,
            y=top,
            width=width,
            height=height,
            preserveAspectRatio="none",
            style="image-rendering: pixelated",
        )
        for each in maps
    ]
    labels = [_text(left - 5, top + _CELL * (i + 0.7), row, anchor="end") for i, row in enumerate(rows)]
    labels += [
        _text(left + _CELL * (i + 0.7), top - 5, column, transform=f"rotate(-90 {left + _CELL * (i + 0.7)} {top - 5})")
        for i, column in enumerate(columns)
    ]
    hide = " ".join(
        f'.xformer-maps:has(.{name} option[value="{value}"]:checked) image:not(.{name}-{value}) {{ display: none }}'
        for name, values in choices.items()
        for value in values
    )
    selects = join(
        tag("label", f"{name} ", tag("select", *(tag("option", v, value=v) for v in values), class_=name), " ")
        for name, values in choices.items()
    )
    picture = _svg(left + width + 5, top + height + 5, *images, *labels)
    return tag("form", tag("style", Markup(hide)), selects, tag("div", picture), class_="xformer-maps")


def png(values: Sequence[Sequence[float]]) -> bytes:
    """Return numbers from 0 (white) to 1 (dark blue) as a PNG image with one pixel each."""
    rows = [bytes([round(min(max(value, 0.0), 1.0) * (_LEVELS - 1)) for value in row]) for row in values]
    palette = bytes(
        round(255 + (color - 255) * level / (_LEVELS - 1)) for level in range(_LEVELS) for color in _DARK
    )  # fmt: skip
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)  # 8 bits, a palette
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", pixels), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def _text(x: float, y: float, content: str, *, anchor: str = "start", **attributes: str | int | float) -> Markup:
    return tag("text", content, x=round(x, 1), y=round(y, 1), text_anchor=anchor, fill="currentColor", **attributes)


def _svg(width: float, height: float, *contents: str) -> Markup:
    style = f"font: {_FONT}px monospace; max-width: none"
    size = {"width": math.ceil(width), "height": math.ceil(height)}
    return tag("svg", *contents, xmlns="http://www.w3.org/2000/svg", style=style, **size)
