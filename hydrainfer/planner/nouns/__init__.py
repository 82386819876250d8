"""What all parts of the planner speak of: requests of a trace, links between instances, the time of the server.

Imported by the other four parts, by `profiling` and the benchmarks. Never simulates and never searches.
"""

from hydrainfer.planner.nouns.link import Link, Route
from hydrainfer.planner.nouns.server import CoreTime, ServerCost
from hydrainfer.planner.nouns.trace import ANSWER, PromptPart, TraceRequest

__all__ = ["ANSWER", "CoreTime", "Link", "PromptPart", "Route", "ServerCost", "TraceRequest"]
