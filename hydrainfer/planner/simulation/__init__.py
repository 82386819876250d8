"""A deployment on a virtual clock: the engines and schedulers of production around modelled devices and links.

Called by `search` and the benchmarks. Never loads a model. Costs and traces may come from anywhere.
"""

from hydrainfer.planner.simulation.links import Link
from hydrainfer.planner.simulation.server import CoreTime, ServerCost
from hydrainfer.planner.simulation.simulator import InstanceModel, ServedRequest, Simulator
from hydrainfer.planner.simulation.trace import ANSWER, PromptPart, TraceRequest, as_requests, at_rate

__all__ = [
    "ANSWER",
    "CoreTime",
    "InstanceModel",
    "Link",
    "PromptPart",
    "ServedRequest",
    "ServerCost",
    "Simulator",
    "TraceRequest",
    "as_requests",
    "at_rate",
]
