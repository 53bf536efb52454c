"""Draws bars as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape

import harness

_COLOURS = ("#1f6f8b", "#e07a5f", "#81b29a", "#f2cc8f", "#8d6a9f", "#5f6caf", "#b56576", "#777777")
_LEFT, _WIDTH, _RIGHT = 190, 480, 110
_BAR, _GAP, _TOP = 18, 30, 56


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG document with a group of bars for each name of `groups`, each group with a scale of its own."""
    colours: dict[str, str] = {}
    for name in (name for values in groups.values() for name in values):
        colours.setdefault(name, _COLOURS[len(colours) % len(_COLOURS)])
    parts, top = [_text(16, 24, title, 'font-size="15" font-weight="bold"')], _TOP
    for heading, values in groups.items():
        parts.append(_text(16, top, f"{heading} ({unit})", 'font-weight="bold"'))
        parts += _group(top + 8, values, colours)
        top += 8 + _BAR * len(values) + _GAP
    width, height = _LEFT + _WIDTH + _RIGHT, top - _GAP + 16
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _group(top: int, values: Mapping[str, float], colours: Mapping[str, str]) -> Iterable[str]:
    longest = max(values.values(), default=0.0) or 1.0
    for at, (name, value) in enumerate(values.items()):
        y, length = top + at * _BAR, max(1.0, _WIDTH * value / longest)
        yield _text(_LEFT - 8, y + 13, name, 'text-anchor="end"')
        yield f'<rect x="{_LEFT}" y="{y + 2}" width="{length:.1f}" height="{_BAR - 4}" fill="{colours[name]}"/>'
        yield _text(_LEFT + length + 6, y + 13, harness.figure(value))


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
