"""Scaling laws as a picture: the points of each as measured, a panel each.

Owns: the drawing, out of the laws in a document that `--json` wrote.
Does not know: what is measured.

Nothing is smoothed. A linear panel begins at 0 and ends at twice its bound, or above its largest point if it has none
or misses it by much; what lies higher is drawn at the upper edge. The dashed line is the bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from bench.report import Law

_COLOURS = ((31, 98, 181), (214, 110, 20), (84, 140, 60), (150, 60, 140), (120, 120, 120), (190, 30, 45))
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 400, 76, 46, 24, 72
_INK, _FAINT = (40, 40, 40), (222, 222, 222)
_PER_ROW = 3
"""Names below a panel."""


def plot(source: Path, target: Path) -> None:
    """Draw the laws in the JSON document `source` to the PNG file `target`. Raises ValueError if it has none."""
    laws = [Law(**law) for law in json.loads(source.read_text())["laws"]]
    if not laws:
        raise ValueError(f"{source} has no scaling law to draw")
    image = Image.new("RGB", (_WIDTH * len(laws), _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for number, law in enumerate(laws):
        _Panel(draw, law, number * _WIDTH).draw()
    image.quantize(32).save(target, optimize=True)


class _Axis:
    """From values to pixels."""

    def __init__(self, low: float, high: float, first: int, last: int, *, log: bool) -> None:
        self._log = log
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        value = math.log10(value) if self._log else value
        share = (value - self._low) / ((self._high - self._low) or 1)
        return self._first + (self._last - self._first) * min(max(share, 0), 1)

    def ticks(self) -> Sequence[float]:
        if self._log:
            return [10.0**power for power in range(math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9) + 1)]
        return [self._low + (self._high - self._low) * tick / 4 for tick in range(5)]


class _Panel:
    """One law."""

    def __init__(self, draw: ImageDraw.ImageDraw, law: Law, x0: int) -> None:
        self._draw, self._law, self._font = draw, law, ImageFont.load_default(13)
        points = [point for series in law.series.values() for point in series]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self._left, self._right, self._top, self._bottom = x0 + _LEFT, x0 + _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
        bounds = [] if law.bound is None else [law.bound]
        if law.log:
            x, y = (
                (min(xs), max(xs)),
                (10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys + bounds)))),
            )
        else:
            high = 2 * law.bound if law.bound is not None and max(ys) < 4 * law.bound else 1.1 * max(ys)
            x, y = (0, max(xs)), (0, high or 1)
        self._x = _Axis(*x, self._left, self._right, log=law.log)
        self._y = _Axis(*y, self._bottom, self._top, log=law.log)

    def draw(self) -> None:
        draw, font, law = self._draw, self._font, self._law
        for value in self._y.ticks():
            draw.line([(self._left, self._y.at(value)), (self._right, self._y.at(value))], fill=_FAINT)
            draw.text((self._left - 8, self._y.at(value)), _number(value), font=font, fill=_INK, anchor="rm")
        for value in self._x.ticks():
            draw.text((self._x.at(value), self._bottom + 8), _number(value), font=font, fill=_INK, anchor="mt")
        draw.line([(self._left, self._top), (self._left, self._bottom), (self._right, self._bottom)], fill=_INK)
        draw.text((self._left, 14), law.title, font=font, fill=_INK)
        draw.text((self._right, 14), law.x, font=font, fill=_INK, anchor="ra")
        if law.bound is not None:
            y = self._y.at(law.bound)
            for dash in range(self._left, self._right, 10):
                draw.line([(dash, y), (dash + 5, y)], fill=_INK)
            draw.text((self._right, y - 4), f"bound: {law.bound:,.4g}", font=font, fill=_INK, anchor="rb")
        for number, (name, series) in enumerate(law.series.items()):
            self._series(number, name, series)

    def _series(self, number: int, name: str, series: Sequence[tuple[float, float]]) -> None:
        draw, colour = self._draw, _COLOURS[number % len(_COLOURS)]
        places = [(self._x.at(x), self._y.at(y)) for x, y in series]
        if self._law.log:
            draw.line(places, fill=colour)
        size = 1 if len(places) > 50 else 2
        for x, y in places:
            draw.rectangle([x - size, y - size, x + size, y + size], fill=colour)
        x = self._left + 160 * (number % _PER_ROW)
        y = self._bottom + 30 + 18 * (number // _PER_ROW)
        draw.rectangle([x, y + 3, x + 8, y + 11], fill=colour)
        draw.text((x + 13, y), name, font=self._font, fill=_INK)


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value:.0e}".replace("e+0", "e")
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.3g}"
