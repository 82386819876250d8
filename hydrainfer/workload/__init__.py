"""Load for a server and what came of it: arrivals, chat requests with pictures, a streaming client, reports.

Called by `benchmarks/` and, later, `hydrainfer bench`. Speaks HTTP only, so that it measures any OpenAI-style server;
never imports the engine, and never judges a server by anything but what arrived on the wire and when.
"""

from hydrainfer.workload.arrivals import Arrivals, Closed, Constant, Gamma, Poisson, Replay, due_times_s
from hydrainfer.workload.chat import BodyOptions, ChatRequest, distinct_chats, encoded
from hydrainfer.workload.client import ChatClient, Target
from hydrainfer.workload.failures import Failure, FailureKind, RequestFailed
from hydrainfer.workload.goodput import Goodput, Search, next_rate
from hydrainfer.workload.pictures import DrawnPicture, FilePicture, Picture, draw_picture
from hydrainfer.workload.record import RequestRecord
from hydrainfer.workload.report import Percentiles, Report, report_of
from hydrainfer.workload.run import LoadResult, Stop, run_load

__all__ = [
    "Arrivals",
    "BodyOptions",
    "ChatClient",
    "ChatRequest",
    "Closed",
    "Constant",
    "DrawnPicture",
    "Failure",
    "FailureKind",
    "FilePicture",
    "Gamma",
    "Goodput",
    "LoadResult",
    "Percentiles",
    "Picture",
    "Poisson",
    "Replay",
    "Report",
    "RequestFailed",
    "RequestRecord",
    "Search",
    "Stop",
    "Target",
    "distinct_chats",
    "draw_picture",
    "due_times_s",
    "encoded",
    "next_rate",
    "report_of",
    "run_load",
]
