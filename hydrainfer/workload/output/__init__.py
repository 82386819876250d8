"""The output of a benchmark for people: progress while it runs, tables, files, and a page that opens without a network.

Called by `hydrainfer bench`. Never measures and never judges: it shows what is in a `BenchResult`.
"""

from hydrainfer.workload.output.files import write_files
from hydrainfer.workload.output.following import say_next
from hydrainfer.workload.output.html import document, table
from hydrainfer.workload.output.page import page_of
from hydrainfer.workload.output.progress import Shown
from hydrainfer.workload.output.svg import COLOURS, Axis, PlotSeries, Point, legend, lines, words
from hydrainfer.workload.output.tables import conclusions, ms, percent, tables_of

__all__ = [
    "COLOURS",
    "Axis",
    "PlotSeries",
    "Point",
    "Shown",
    "conclusions",
    "document",
    "legend",
    "lines",
    "ms",
    "page_of",
    "percent",
    "say_next",
    "table",
    "tables_of",
    "words",
    "write_files",
]
