"""What the console shows while a benchmark runs, and the command to run next.

Called by `benching` and `profiling`. Never measures and never judges.
"""

from hydrainfer.workload.output.following import next_line, say_next
from hydrainfer.workload.output.progress import Shown
from hydrainfer.workload.output.ticking import EVERY_S, Ticker

__all__ = ["EVERY_S", "Shown", "Ticker", "next_line", "say_next"]
