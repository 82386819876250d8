"""Servers that are started to be measured, each on its part of the machine, and the load of other processes meanwhile.

Called by `measuring` and `benchmarks/`. Leaves no process behind; sends requests only to see whether a server is
healthy.
"""

from hydrainfer.workload.deployments.deploy import Deployment, HardwareSlice, command_of, running
from hydrainfer.workload.deployments.noise import Noise
from hydrainfer.workload.deployments.processes import ServerFailed, ServerProcess, all_stats, free_port

__all__ = [
    "Deployment",
    "HardwareSlice",
    "Noise",
    "ServerFailed",
    "ServerProcess",
    "all_stats",
    "command_of",
    "free_port",
    "running",
]
