"""Where the requests of a workload come from: drawn from a seed, read from published datasets, or recorded before.

Called by `hydrainfer bench` and `hydrainfer trace`. Reads local files only; never fetches anything.
"""

from hydrainfer.workload.sources.recorded import Recording, read_recording, write_recording
from hydrainfer.workload.sources.spec import SOURCES, Workload, read_workload
from hydrainfer.workload.sources.traces import Arrival, read_arrivals

__all__ = [
    "SOURCES",
    "Arrival",
    "Recording",
    "Workload",
    "read_arrivals",
    "read_recording",
    "read_workload",
    "write_recording",
]
