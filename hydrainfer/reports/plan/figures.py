"""The figures of a plan as SVG: goodput of the layouts, latency by ratio, the best method by SLO."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from hydrainfer.config import Slo
from hydrainfer.planner.search import Cell, LayoutPlan, Ratio, Row
from hydrainfer.reports.drawing import COLOURS, Axis, PlotSeries, Point, legend, lines, ms, words
from hydrainfer.reports.plan.tables import interval, regret, said

HUES = {
    "EPD": "#6b727b",
    "EP+D": "#2f6db3",
    "ED+P": "#d9822b",
    "E+PD": "#4a9a5d",
    "E+P+D": "#8a5aa8",
    "EP+D + EPD": "#9dbfe2",
    "ED+P + EPD": "#f0c08d",
    "E+PD + EPD": "#a3d0ae",
    "E+P+D + EPD": "#cbb2da",
}
"""The colour of each method; lighter if some instances beside it are EPD."""
_OTHER = "#1f9aa3"
_DARK = "#1c2024"
_ON_WHITE = ("EPD", "EP+D", "E+P+D")  # these colours have a contrast of 4.5 with white, the others with dark ink
_BARS, _CURVES = 10, 5
_LEAST_S, _REACH = 1e-3, 20.0  # latencies are drawn from 1 ms to 20 times their SLO


def colour_of(method: str) -> str:
    return HUES.get(method, _OTHER)


def methods_of(things: Sequence[Row | Ratio | Cell]) -> list[str]:
    """The methods that occur in `things`, in the order of `HUES`."""
    methods = {thing.method for thing in things}
    return [m for m in HUES if m in methods] + sorted(methods - set(HUES))


def legend_of(methods: Sequence[str]) -> str:
    return legend(methods, [colour_of(m) for m in methods])


def shown_rows(plan: LayoutPlan) -> list[Row]:
    """The rows that get a bar, in the order of the plan: the ten best measured ones and EPD only; if none was measured,
    the first ten."""
    measured = [row for row in plan.layouts if row.goodput]
    return [row for i, row in enumerate(measured) if i < _BARS or row.method == "EPD"] or list(plan.layouts[:_BARS])


def bars(rows: Sequence[Row], epd: Row | None = None, width: int = 960) -> str:
    """A figure with a bar for each row's goodput, its interval, with an arrow where that goes on, and how much less it
    is than the first. If only an upper limit of the goodput is known, there is a pale bar up to it. Dashed: the goodput
    of `epd`."""
    narrow = width < 600
    left = 104 if narrow else 150
    right = 112 if narrow else 230
    step = 23
    top = 8
    most = max([*(row.goodput or 0.0 for row in rows), *(_reach(row) for row in rows)], default=0.0) or 1.0
    height = top + step * len(rows) + 42
    scale = (width - left - right) / most
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="goodput of the layouts">']
    axis = Axis("requests per second", 0.0, most)
    for tick in axis.ticks()[:: 2 if narrow else 1]:
        x = left + tick * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 38}"/>')
        out.append(words(x, height - 23, axis.said(tick)))
    if epd is not None and epd.goodput:
        x = left + epd.goodput * scale
        out.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{height - 38}"/>')
    for i, row in enumerate(rows):
        out += _bar(row, rows[0], left, top + i * step, step, scale, narrow)
    out.append(words(left + most * scale / 2, height - 6, axis.label))
    return "".join([*out, "</svg>"])


def _reach(row: Row) -> float:
    """The length of a row's bar with its interval; long intervals are cut off."""
    if row.goodput:
        return min(row.goodput_high or row.goodput, row.goodput * 1.25)
    return row.goodput_high or row.bound


def _bar(row: Row, best: Row, left: int, y: int, step: int, scale: float, narrow: bool) -> list[str]:
    colour = colour_of(row.method)
    high = _reach(row)
    told = f"<title>{escape(row.layout)} ({escape(row.method)}): {escape(row.limited_by)}</title>"
    size = f'y="{y + 2}" height="{step - 6}"'
    middle = y + step / 2 - 1
    out = [words(left - 8, y + 15, row.layout, "end")]
    if row.goodput is None or not row.goodput:
        out.append(
            f'<rect x="{left}" {size} width="{high * scale:.1f}" fill="{colour}" fill-opacity=".18" stroke="{colour}" '
            f'stroke-opacity=".8" stroke-dasharray="3 3">{told}</rect>'
        )
        out.append(words(left + high * scale + 8, y + 15, f"less than {said(high)}", "start", 'class="faint halo"'))
        return out
    out.append(f'<rect x="{left}" {size} width="{row.goodput * scale:.1f}" fill="{colour}">{told}</rect>')
    low = row.goodput_low or row.goodput
    end = "m0 -4v8"
    if (row.goodput_high or row.goodput) > high:
        end = "m-5 -4l5 4l-5 4"
    out.append(
        f'<path class="ink" stroke-width="1.4" d="M{left + low * scale:.1f} {middle}'
        f'H{left + high * scale:.1f}{end}M{left + low * scale:.1f} {middle - 4}v8"/>'
    )
    less = ""
    if row is not best:
        less = f"  {regret(row, best)}"
    told = f"{said(row.goodput)}{less}" if narrow else f"{said(row.goodput)} ({interval(row)}){less}"
    out.append(words(left + high * scale + 8, y + 15, told, "start", 'class="halo"'))
    return out


def attainment(plan: LayoutPlan) -> str:
    """A figure of SLO attainment against the rate for the best layouts; "" if no rate was simulated."""
    rows = [row for row in plan.layouts if row.goodput and row.attempts][:_CURVES]
    series = []
    for row, colour in zip(rows, COLOURS):
        longest = {a.rate: a for a in sorted(row.attempts, key=lambda a: a.n) if a.n}
        points = []
        for rate, a in sorted(longest.items()):
            share = a.n_met / a.n
            points.append(Point(rate, share, share, share, f"{said(rate)}/s"))
        series.append(PlotSeries(row.layout, colour, points))
    rates = [p.x for one in series for p in one.points]
    shares = [p.y for one in series for p in one.points]
    if not rates:
        return ""
    x = Axis("requests per second", min(rates) * 0.95, max(rates) * 1.02)
    y = Axis("within the SLO", min(0.5, *shares), 1.0, limit=plan.target, percent=True)
    names = [one.name for one in series]
    return legend(names, COLOURS) + lines("attainment against the rate", x, y, series)


class Curve(NamedTuple):
    """The p90 latency of one method by ratio: `layouts[i]` has the i-th ratio and latency, in ms."""

    method: str
    layouts: list[str]
    latencies_ms: list[float | None]


def curves(ratios: Sequence[Ratio], name: str) -> list[Curve]:
    """The curves of all methods. `name`: "ttft" or "tpot"."""
    curves_ = []
    for method, group in groupby(ratios, key=lambda r: r.method):
        each = list(group)
        seconds = [getattr(r, f"{name}_p90") for r in each]
        curves_.append(Curve(method, [r.layout for r in each], [s * 1e3 if s is not None else None for s in seconds]))
    return curves_


def latency_axis(found: Sequence[Curve], name: str, slo: Slo) -> Axis:
    """The latency axis of `found`: logarithmic if latencies differ much, and cut off far beyond the SLO, where
    differences do not matter."""
    limit_s: float | None = getattr(slo, f"{name}_s")
    each = [max(ms_, _LEAST_S * 1e3) for curve in found for ms_ in curve.latencies_ms if ms_ is not None]
    least = min(each, default=1.0)
    most = max(each, default=1.0)
    limit = None
    if limit_s is not None:
        limit = limit_s * 1e3
    if limit is not None:
        least = min(least, limit)
        most = max(min(most, limit * _REACH), limit)
    log = most > 5 * least
    span = (least / 1.3, most * 1.3) if log else (0.0, most * 1.1)
    return Axis(f"{name.upper()} p90, ms", *span, log=log, limit=limit)


def ratio_names(ratios: Sequence[Ratio]) -> list[str]:
    """The ratios as text, such as "1:7": devices of the first role to those of the second."""
    n = max(len(c.layouts) for c in curves(ratios, "ttft")) + 1
    return [f"{i}:{n - i}" for i in range(1, n)]


def by_ratio(plan: LayoutPlan, name: str) -> str:
    """A figure of latency by ratio with one line per method. EPD only is a level line, as it has no ratio."""
    method_curves = curves(plan.ratios, name)
    names = ratio_names(plan.ratios)
    series = []
    for curve in method_curves:
        if curve.method == "EPD":
            at = curve.latencies_ms[0]
            ends = (0.7, len(names) + 0.3)
            points = [Point(x, at, at, at) for x in ends] if at is not None else []
            series.append(PlotSeries(curve.layouts[0], colour_of("EPD"), points, marks=False))
            continue
        pairs = enumerate(zip(curve.layouts, curve.latencies_ms, strict=True), 1)
        points = [Point(float(i), at, at, at, layout) for i, (layout, at) in pairs if at is not None]
        series.append(PlotSeries(curve.method, colour_of(curve.method), points))
    x = Axis("devices of the first role : of the second", 0.7, len(names) + 0.3, names=names)
    return lines(f"{name.upper()} p90 by ratio", x, latency_axis(method_curves, name, plan.slo), series)


def grid(cells: Sequence[Cell]) -> str:
    """A figure of the best layout in each cell: TPOT to the right, TTFT upwards, both from tight to loose."""
    ttfts = sorted({c.ttft_s for c in cells})
    tpots = sorted({c.tpot_s for c in cells})
    at = {(c.ttft_s, c.tpot_s): c for c in cells}
    left = 112
    bottom = 46
    high = 66
    wide = min(190, 840 // len(tpots))
    width = left + wide * len(tpots) + 10
    height = high * len(ttfts) + bottom + 6
    out = [
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px;min-width:{min(width, 620)}px" role="img" '
        'aria-label="best by SLO">'
    ]
    for row, ttft_s in enumerate(reversed(ttfts)):
        y = 4 + row * high
        out.append(words(left - 10, y + high / 2 + 4, f"{ms(ttft_s)} ms", "end"))
        for column, tpot_s in enumerate(tpots):
            if (cell := at.get((ttft_s, tpot_s))) is not None:
                out += _cell(cell, left + column * wide, y, wide - 4, high - 4)
    for column, tpot_s in enumerate(tpots):
        out.append(words(left + (column + 0.5) * wide, height - bottom + 16, f"{ms(tpot_s)} ms"))
    out.append(words(left + wide * len(tpots) / 2, height - 8, "TPOT SLO"))
    middle = high * len(ttfts) / 2
    out.append(words(14, middle, "TTFT SLO", more=f'transform="rotate(-90 14 {middle:.0f})"'))
    return "".join([*out, "</svg>"])


def _cell(cell: Cell, x: int, y: int, wide: int, high: int) -> list[str]:
    if not cell.goodput:
        box = f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="3" class="empty"/>'
        return [box, words(x + wide / 2, y + high / 2 + 4, "nothing meets it", more='class="faint"')]
    ink = _DARK
    if cell.method in _ON_WHITE:
        ink = "#fff"
    box = f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="3" fill="{colour_of(cell.method)}"/>'
    texts = [(cell.layout, 'font-weight="600"'), (f"{said(cell.goodput)} requests/s", ""), (gain_of(cell), "")]
    return [
        box,
        *(
            words(x + wide / 2, y + 20 + 16 * i, text, more=f'fill="{ink}" {more}')
            for i, (text, more) in enumerate(texts)
        ),
    ]


def gain_of(cell: Cell) -> str:
    if cell.method == "EPD":
        return "do not split"
    if not cell.goodput_epd:
        return "EPD only: nothing"
    ratio = cell.goodput / cell.goodput_epd
    if ratio < 3:
        return f"+{(ratio - 1) * 100:.0f} % over EPD"
    return f"{ratio:.1f} x EPD"
