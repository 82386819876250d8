"""The work of `bench`, `bench compare` and `trace`: sessions with a server, the search for goodput, comparisons.

Called by those verbs and `hydrainfer profile --validate`. Returns results; reports progress only to a `Watcher`.
"""

from hydrainfer.workload.measuring.compare import Comparison, ComparisonPlan, read_plan
from hydrainfer.workload.measuring.session import Effort
from hydrainfer.workload.measuring.single import Asked, LoadPlan, bench, command_line
from hydrainfer.workload.measuring.tracing import FirstPass, first_pass

__all__ = [
    "Asked",
    "Comparison",
    "ComparisonPlan",
    "Effort",
    "FirstPass",
    "LoadPlan",
    "bench",
    "command_line",
    "first_pass",
    "read_plan",
]
