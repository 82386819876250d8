"""HTML documents, SVG figures and numbers, for both reports. Knows neither benchmarks nor plans."""

from hydrainfer.reports.drawing.html import answered, document, table
from hydrainfer.reports.drawing.numbers import ms, percent
from hydrainfer.reports.drawing.svg import COLOURS, Axis, Bar, PlotSeries, Point, legend, lines, stacked, words

__all__ = [
    "COLOURS",
    "Axis",
    "Bar",
    "PlotSeries",
    "Point",
    "answered",
    "document",
    "legend",
    "lines",
    "ms",
    "percent",
    "stacked",
    "table",
    "words",
]
