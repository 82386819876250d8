"""The HTTP client of the load generator: single requests, a load of requests, and what a server runs and accepts.

Called by `measuring`, `deployments` and `benchmarks/`. Records what happened to each request and when; never judges it.
"""

from hydrainfer.workload.client.client import ChatClient, Endpoint
from hydrainfer.workload.client.failures import Failure, FailureKind, RequestFailed
from hydrainfer.workload.client.probe import ServerFacts, probe
from hydrainfer.workload.client.record import RequestRecord
from hydrainfer.workload.client.run import LoadResult, Stop, run_load
from hydrainfer.workload.client.sse import EventSplitter, parse_chunk

__all__ = [
    "ChatClient",
    "Endpoint",
    "EventSplitter",
    "Failure",
    "FailureKind",
    "LoadResult",
    "RequestFailed",
    "RequestRecord",
    "ServerFacts",
    "Stop",
    "parse_chunk",
    "probe",
    "run_load",
]
