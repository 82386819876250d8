"""Measures what batches and copies cost on this device, for the planner: a cost model from a grid of real batches.

Called by `hydrainfer profile` and by benchmarks. Uses the lanes and stores that `assemble` makes, without a scheduler;
serves nobody. Imports torch, so it is imported where it is used.
"""

from hydrainfer.costing.copies import measure_copies
from hydrainfer.costing.grid import Grid
from hydrainfer.costing.measure import measure_model
from hydrainfer.costing.rig import Rig

__all__ = ["Grid", "Rig", "measure_copies", "measure_model"]
