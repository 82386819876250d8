"""Execution of step batches: a vision and a language runner, each on its own lane, input packing, sampling.

Called by the engine through its ports. Never schedules, owns no blocks, changes no sequence.
"""

from hydrainfer.runtime.draws import DRAWN_TOGETHER
from hydrainfer.runtime.emulated import EmulatedDevice, EmulatedRunner, spoken_ids
from hydrainfer.runtime.graphs import ROWS, capture_for, capture_passes_for, no_graphs, no_pass_graphs
from hydrainfer.runtime.guessing import CopyGuesser, DraftModel, Guesser
from hydrainfer.runtime.lane import LaneThread
from hydrainfer.runtime.language import LanguageRunner
from hydrainfer.runtime.threads import ThreadCount
from hydrainfer.runtime.vision import VisionRunner

__all__ = [
    "DRAWN_TOGETHER",
    "ROWS",
    "CopyGuesser",
    "DraftModel",
    "EmulatedDevice",
    "EmulatedRunner",
    "Guesser",
    "LaneThread",
    "LanguageRunner",
    "ThreadCount",
    "VisionRunner",
    "capture_for",
    "capture_passes_for",
    "no_graphs",
    "no_pass_graphs",
    "spoken_ids",
]
