"""Requests that are drawn from a seed, read from published datasets or recorded before, and the times of their arrival.

Called by `client`, `measuring` and the planner. Reads local files only; never fetches anything.
"""

from hydrainfer.workload.sources.arrivals import (
    Arrivals,
    Closed,
    Constant,
    Gamma,
    OpenLoop,
    Poisson,
    Replay,
    due_times_s,
    label,
)
from hydrainfer.workload.sources.chat import BodyOptions, ChatRequest, distinct_chats, encoded, encoded_aside
from hydrainfer.workload.sources.conversations import TOKENS_PER_WORD
from hydrainfer.workload.sources.dialogues import Dialogues, in_turn
from hydrainfer.workload.sources.pictures import DrawingStopped, DrawnPicture, EncodedPicture, FilePicture, draw_picture
from hydrainfer.workload.sources.recorded import Recording, read_recording, write_recording
from hydrainfer.workload.sources.spec import DEFAULT, TooFewRequests, Workload, read_workload
from hydrainfer.workload.sources.spread import Spread
from hydrainfer.workload.sources.traces import read_arrivals

__all__ = [
    "DEFAULT",
    "TOKENS_PER_WORD",
    "Arrivals",
    "BodyOptions",
    "ChatRequest",
    "Closed",
    "Constant",
    "Dialogues",
    "DrawingStopped",
    "DrawnPicture",
    "EncodedPicture",
    "FilePicture",
    "Gamma",
    "OpenLoop",
    "Poisson",
    "Recording",
    "Replay",
    "Spread",
    "TooFewRequests",
    "Workload",
    "distinct_chats",
    "draw_picture",
    "due_times_s",
    "encoded",
    "encoded_aside",
    "in_turn",
    "label",
    "read_arrivals",
    "read_recording",
    "read_workload",
    "write_recording",
]
