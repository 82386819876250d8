"""SVG figures, drawn by hand: a page with them needs no library to make and no network to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#2f6db3", "#d9822b", "#4a9a5d", "#8a5aa8", "#b5484f", "#6b6f76", "#1f9aa3", "#a3841f", "#c65d9c")
WIDTH, HEIGHT = 470, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 14, 16, 46
MAX_NAMES = 12  # most labels below an axis with names


class Point(NamedTuple):
    """A point of a series. `low`, `high`: its interval; equal to `y` if there is none. `name`: shown instead of x on
    hover."""

    x: float
    y: float
    low: float
    high: float
    name: str = ""


class PlotSeries(NamedTuple):
    """A line through points. `marks`: with a dot and its interval for each point; else a bare line."""

    name: str
    colour: str
    points: Sequence[Point]
    marks: bool = True


class Axis(NamedTuple):
    """An axis from `least` to `most`; `limit`: draw a dashed line there. `names`: labels of the values 1, 2, …, if they
    have any."""

    label: str
    least: float
    most: float
    log: bool = False
    limit: float | None = None
    percent: bool = False
    names: Sequence[str] = ()

    def place(self, value: float) -> float:
        """The position of a value on the axis, 0 to 1."""
        if self.log:
            value = max(value, self.least)
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)

    def ticks(self) -> list[float]:
        if self.names:
            return [float(i) for i in range(1, len(self.names) + 1, math.ceil(len(self.names) / MAX_NAMES))]
        if self.log:
            decades = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            ticks = [m * 10.0**d for d in decades for m in (1, 2, 5) if self.least <= m * 10.0**d <= self.most * 1.0001]
            if len(ticks) <= 7:
                return ticks
            return [t for t in ticks if f"{t:e}".startswith("1.")] or ticks
        step = nice((self.most - self.least) / 5)
        first = math.ceil(self.least / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.most / step + 1e-9) + 1)]

    def said(self, value: float) -> str:
        if self.names:
            return self.names[round(value) - 1]
        if self.percent:
            return f"{value * 100:.0f} %"
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def nice(step: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `step`."""
    power = 1.0
    if step > 0:
        power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * 0.999)


def words(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _frame(title: str, x: Axis, y: Axis) -> list[str]:
    """The axes, grid and limits of a figure."""
    right = WIDTH - RIGHT
    bottom = HEIGHT - BOTTOM
    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in y.ticks():
        at = bottom - y.place(tick) * (bottom - TOP)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(words(LEFT - 6, at + 4, y.said(tick), "end"))
    for tick in x.ticks():
        at = LEFT + x.place(tick) * (right - LEFT)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(words(at, bottom + 16, x.said(tick)))
    out.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    out.append(words((LEFT + right) / 2, HEIGHT - 8, x.label))
    middle = (TOP + bottom) / 2
    out.append(words(13, middle, y.label, more=f'transform="rotate(-90 13 {middle})"'))
    if y.limit is not None and y.least <= y.limit <= y.most:
        at = bottom - y.place(y.limit) * (bottom - TOP)
        out.append(f'<line class="limit" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
    if x.limit is not None and x.least <= x.limit <= x.most:
        at = LEFT + x.place(x.limit) * (right - LEFT)
        out.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(words(at + 4, TOP + 10, "SLO", "start", 'class="note"'))
    return out


def lines(title: str, x: Axis, y: Axis, series: Sequence[PlotSeries]) -> str:
    """A figure with one line per series."""
    out = _frame(title, x, y)
    bottom = HEIGHT - BOTTOM

    def at(value_x: float, value_y: float) -> tuple[float, float]:
        return (
            LEFT + min(max(x.place(value_x), 0.0), 1.0) * (WIDTH - RIGHT - LEFT),
            bottom - min(max(y.place(value_y), 0.0), 1.0) * (bottom - TOP),
        )

    for one in series:
        places = [at(p.x, p.y) for p in one.points]
        if len(places) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            out.append(f'<polyline fill="none" stroke="{one.colour}" stroke-width="2" points="{path}"/>')
        for p, (px, py) in zip(one.points, places, strict=True) if one.marks else ():
            if p.high > p.low:
                (_, low), (_, high) = at(p.x, p.low), at(p.x, p.high)
                out.append(
                    f'<path stroke="{one.colour}" stroke-width="1.6" opacity=".6" d="M{px:.1f} {low:.1f}V{high:.1f}"/>'
                )
            tooltip = f"<title>{escape(one.name)}: {escape(p.name or x.said(p.x))}, {y.said(p.y)}</title>"
            out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{one.colour}">{tooltip}</circle>')
    return "".join([*out, "</svg>"])


class Bar(NamedTuple):
    """A stacked bar. `parts[i]` has the i-th name and colour."""

    label: str
    parts: Sequence[float]


def stacked(title: str, label: str, bars: Sequence[Bar], names: Sequence[str], colours: Sequence[str]) -> str:
    """A figure of horizontal stacked bars; `names`: of the parts, in their order."""
    left = 190
    width = 960
    row = 24
    top = 6
    longest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    height = top + row * len(bars) + 40
    scale = (width - left - 70) / longest
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    axis = Axis(label, 0.0, longest)
    for tick in axis.ticks():
        x = left + tick * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 36}"/>')
        out.append(words(x, height - 22, axis.said(tick)))
    for i, bar in enumerate(bars):
        y = top + i * row
        x = float(left)
        out.append(words(left - 8, y + 15, bar.label, "end"))
        for k, amount in enumerate(bar.parts):
            tooltip = f"<title>{escape(names[k])}: {amount:.4g} {escape(label)}</title>"
            size = f'width="{amount * scale:.2f}" height="{row - 6}"'
            out.append(f'<rect x="{x:.2f}" y="{y + 1}" {size} fill="{colours[k]}">{tooltip}</rect>')
            x += amount * scale
        out.append(words(x + 6, y + 15, f"{sum(bar.parts):.4g}", "start"))
    out.append(words((left + width) / 2, height - 5, label))
    return "".join([*out, "</svg>"])


def legend(names: Sequence[str], colours: Sequence[str] = COLOURS) -> str:
    items = (
        f'<span><i style="background:{colours[i % len(colours)]}"></i>{escape(n)}</span>' for i, n in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'
