"""What people see of a benchmark: progress while it runs, tables, files, and a page that opens without a network.

Called by `hydrainfer bench`. Never measures and never judges: it shows what `BenchResult` says.
"""

from hydrainfer.workload.output.files import write_files
from hydrainfer.workload.output.page import page_of
from hydrainfer.workload.output.progress import Quiet, Shown
from hydrainfer.workload.output.tables import conclusions, tables_of

__all__ = ["Quiet", "Shown", "conclusions", "page_of", "tables_of", "write_files"]
