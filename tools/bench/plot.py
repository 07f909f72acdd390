"""The scaling law as a picture: what each of many snapshots cost, in bytes and in milliseconds.

Owns: the drawing, out of the figures that `bench store --json` wrote.
Does not know: how they were measured.

Every point is one snapshot as measured; nothing is smoothed. Both axes begin at 0. The dashed line is the bound: 1.5
times the median of the first snapshots on local disk. Milliseconds above twice the bound are drawn at the upper edge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

PLACES = {"local": (31, 98, 181), "local, compacted": (214, 110, 20), "S3 (moto)": (84, 140, 60)}
BOUND = 1.5
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 380, 70, 46, 20, 52
_INK, _FAINT = (40, 40, 40), (222, 222, 222)


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity over the number of the snapshot."""

    title: str
    series: Mapping[str, Sequence[float]]
    bound: float

    @property
    def top(self) -> float:
        return 2 * self.bound


def plot(source: Path, target: Path) -> None:
    """Draw the figures in the JSON document `source` to the PNG file `target`."""
    cost = json.loads(source.read_text())["figures"]["cost"]
    panels = [_panel(cost, "bytes", "kB of snapshot k", 1e3), _panel(cost, "ms", "ms of snapshot k", 1e-3)]
    image = Image.new("RGB", (_WIDTH * len(panels), _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for number, panel in enumerate(panels):
        _draw(draw, panel, number * _WIDTH)
    image.quantize(32).save(target, optimize=True)


def _panel(cost: Mapping[str, Any], quantity: str, title: str, unit: float) -> Panel:
    """Snapshot 1 opens all calls and is left out, as in the bound."""
    series = {place: [value / unit for value in cost[f"{place}: {quantity}"]["all"][1:]] for place in PLACES}
    return Panel(title, series, BOUND * cost[f"local: {quantity}"]["first_window"]["median"] / unit)


def _draw(draw: ImageDraw.ImageDraw, panel: Panel, x0: int) -> None:
    font = ImageFont.load_default(13)
    n = max(map(len, panel.series.values()))
    left, right, top, bottom = x0 + _LEFT, x0 + _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM

    def x_of(k: float) -> float:
        return left + (right - left) * k / (n + 1)

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * min(value, panel.top) / panel.top

    for tick in range(5):
        value = panel.top * tick / 4
        draw.line([(left, y_of(value)), (right, y_of(value))], fill=_FAINT)
        draw.text((left - 8, y_of(value)), f"{value:,.0f}", font=font, fill=_INK, anchor="rm")
        k = (n + 1) * tick / 4
        draw.text((x_of(k), bottom + 8), f"{k:.0f}", font=font, fill=_INK, anchor="mt")
    draw.line([(left, top), (left, bottom), (right, bottom)], fill=_INK)
    draw.text((left, 14), panel.title, font=font, fill=_INK)
    draw.text((right, bottom + 28), "k", font=font, fill=_INK, anchor="rt")
    for dash in range(left, right, 10):
        draw.line([(dash, y_of(panel.bound)), (dash + 5, y_of(panel.bound))], fill=_INK)
    draw.text((right, y_of(panel.bound) - 4), f"bound: {BOUND} x the first", font=font, fill=_INK, anchor="rb")
    for row, (name, values) in enumerate(panel.series.items()):
        for k, value in enumerate(values, 2):
            x, y = x_of(k), y_of(value)
            draw.rectangle([x - 1, y - 1, x + 1, y + 1], fill=PLACES[name])
        x = left + 140 * row
        draw.rectangle([x, bottom + 31, x + 8, bottom + 39], fill=PLACES[name])
        draw.text((x + 13, bottom + 28), name, font=font, fill=_INK)
