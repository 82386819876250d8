"""A deployment on a virtual clock: the engines and schedulers of production around modelled devices and links.

Called by `search` and the benchmarks. Never loads a model. Costs and traces may come from anywhere.
"""

from hydrainfer.planner.simulation.simulator import InstanceModel, ServedRequest, Simulator
from hydrainfer.planner.simulation.stores import StoreModel
from hydrainfer.planner.simulation.trace import as_requests, at_rate

__all__ = [
    "InstanceModel",
    "ServedRequest",
    "Simulator",
    "StoreModel",
    "as_requests",
    "at_rate",
]
