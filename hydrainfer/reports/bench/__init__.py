"""The report of a benchmark: conclusions, tables for the console, files and the page. Called by `benching`."""

from hydrainfer.reports.bench.files import write_files
from hydrainfer.reports.bench.page import page_of
from hydrainfer.reports.bench.tables import conclusions, tables_of
from hydrainfer.reports.bench.verdict import answer

__all__ = ["answer", "conclusions", "page_of", "tables_of", "write_files"]
