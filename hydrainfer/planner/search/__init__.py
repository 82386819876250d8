"""The search for the best layout: candidates, simulated attempts at a rate, goodput, other objectives, and the plan.

Called by `profiling` and the benchmarks. Never reads a checkpoint and never measures: it gets both as numbers.
"""

from hydrainfer.planner.search.bound import Bounds, uncached_tokens
from hydrainfer.planner.search.deployment import PLANNED, DeviceKind, candidates_of, layout_file, study_of
from hydrainfer.planner.search.goodput import (
    COARSE,
    EXACT,
    TOLERANCE,
    Finding,
    OnProgress,
    SearchEffort,
    bracket,
    measured,
    narrow,
    search,
)
from hydrainfer.planner.search.grid import grid_of
from hydrainfer.planner.search.layouts import layout_of, layouts, method_of, placed_layouts
from hydrainfer.planner.search.objectives import Objective, least_devices, ranked_at, why_impossible
from hydrainfer.planner.search.plan import Cell, DevicePrice, LayoutPlan, Live, Ratio, Row, rows_of
from hydrainfer.planner.search.ratios import rate_for_ratios, ratios_of
from hydrainfer.planner.search.study import Attempt, Study, attempt, mean_interval_s, observe, served_at
from hydrainfer.planner.search.tiers import TierGain, tier_gains
from hydrainfer.planner.search.usage import CacheUse, RoleUse, use_of

__all__ = [
    "COARSE",
    "EXACT",
    "PLANNED",
    "TOLERANCE",
    "Attempt",
    "Bounds",
    "CacheUse",
    "Cell",
    "DeviceKind",
    "DevicePrice",
    "Finding",
    "LayoutPlan",
    "Live",
    "Objective",
    "OnProgress",
    "Ratio",
    "RoleUse",
    "Row",
    "SearchEffort",
    "Study",
    "TierGain",
    "attempt",
    "bracket",
    "candidates_of",
    "grid_of",
    "layout_file",
    "layout_of",
    "layouts",
    "least_devices",
    "mean_interval_s",
    "measured",
    "method_of",
    "narrow",
    "observe",
    "placed_layouts",
    "ranked_at",
    "rate_for_ratios",
    "ratios_of",
    "rows_of",
    "search",
    "served_at",
    "study_of",
    "tier_gains",
    "uncached_tokens",
    "use_of",
    "why_impossible",
]
