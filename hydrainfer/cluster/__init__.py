"""Several instances as one: the hub in the server, a node around each engine, and the choice of an instance.

Called by assemble; the server sees the hub as an `EngineHandle`, engines see a placer as their `Placement` and a node
as their `PeerLink`. Knows an engine only by its handle and `step`; never schedules and never touches caches or tensors.
"""

from hydrainfer.cluster.folder import RunFolder
from hydrainfer.cluster.hub import Hub
from hydrainfer.cluster.instance import Pulse
from hydrainfer.cluster.launch import Facts, InProcess, Launcher
from hydrainfer.cluster.mesh import Keys, Mesh
from hydrainfer.cluster.node import Node, NodePlan, run_node
from hydrainfer.cluster.pixels import PixelClient
from hydrainfer.cluster.placing import Placer
from hydrainfer.cluster.restarts import Restarts
from hydrainfer.cluster.roster import Roster
from hydrainfer.cluster.server_side import ServerSide

__all__ = [
    "Facts",
    "Hub",
    "InProcess",
    "Keys",
    "Launcher",
    "Mesh",
    "Node",
    "NodePlan",
    "PixelClient",
    "Placer",
    "Pulse",
    "Restarts",
    "Roster",
    "RunFolder",
    "ServerSide",
    "run_node",
]
