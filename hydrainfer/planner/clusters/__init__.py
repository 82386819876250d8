"""How many requests per second clusters serve if long prompts are prefilled in far ones, and what each costs.

The throughput model of Prefill-as-a-Service: a fluid model of measured prefill times, lengths, devices and links, and
the best threshold and split by it. Called by the benchmarks. Never simulates, never reads files.
"""

from hydrainfer.planner.clusters.lengths import Lengths, log_normal
from hydrainfer.planner.clusters.model import (
    Arrangement,
    FarUse,
    PrefillSeconds,
    Service,
    Stage,
    Throughput,
    decodes_per_s,
    egress_bytes_per_s,
    prefill_seconds,
    throughput,
)
from hydrainfer.planner.clusters.solve import Answer, BreakEven, Objective, TtftLimit, break_even, solve
from hydrainfer.planner.clusters.system import Cluster, ClusterLink, Clusters
from hydrainfer.planner.clusters.times import Times, TimesPoint

__all__ = [
    "Answer",
    "Arrangement",
    "BreakEven",
    "Cluster",
    "ClusterLink",
    "Clusters",
    "FarUse",
    "Lengths",
    "Objective",
    "PrefillSeconds",
    "Service",
    "Stage",
    "Throughput",
    "Times",
    "TimesPoint",
    "TtftLimit",
    "break_even",
    "decodes_per_s",
    "egress_bytes_per_s",
    "log_normal",
    "prefill_seconds",
    "solve",
    "throughput",
]
