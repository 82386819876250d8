"""How many requests per second clusters serve if long prompts are prefilled in far ones, and what each costs.

The throughput model of Prefill-as-a-Service: a fluid model of measured prefill times, lengths, devices and links, the
best threshold and split by it, the same on the virtual clock with queues, and the files that describe clusters. Called
by `profiling` and the benchmarks.
"""

from hydrainfer.planner.clusters.compare import (
    Candidate,
    Choice,
    all_far,
    choose,
    curves_of,
    deployment_of,
    deployments_of,
    worth_of,
)
from hydrainfer.planner.clusters.file import ClusterEntry, ClusterFile, LinkEntry, read_clusters
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
from hydrainfer.planner.clusters.plan import (
    ALL_FAR,
    ALONE,
    CHEAPEST,
    CHOSEN,
    FASTEST,
    ClusterFacts,
    ClusterPlan,
    Curves,
    Deployment,
    LinkFacts,
    LinkPoint,
    PricePoint,
    Queued,
    SplitPoint,
    ThresholdPoint,
    Worth,
)
from hydrainfer.planner.clusters.roofline import Roofline
from hydrainfer.planner.clusters.simulated import Run, Setup, simulate, trace_at
from hydrainfer.planner.clusters.solve import Answer, BreakEven, Objective, TtftLimit, break_even, solve
from hydrainfer.planner.clusters.system import Cluster, ClusterLink, Clusters
from hydrainfer.planner.clusters.tables import ClusterTable, DecodeBatch, read_table
from hydrainfer.planner.clusters.times import Times, TimesPoint

__all__ = [
    "ALL_FAR",
    "ALONE",
    "CHEAPEST",
    "CHOSEN",
    "FASTEST",
    "Answer",
    "Arrangement",
    "BreakEven",
    "Candidate",
    "Choice",
    "Cluster",
    "ClusterEntry",
    "ClusterFacts",
    "ClusterFile",
    "ClusterLink",
    "ClusterPlan",
    "ClusterTable",
    "Clusters",
    "Curves",
    "DecodeBatch",
    "Deployment",
    "FarUse",
    "Lengths",
    "LinkEntry",
    "LinkFacts",
    "LinkPoint",
    "Objective",
    "PrefillSeconds",
    "PricePoint",
    "Queued",
    "Roofline",
    "Run",
    "Service",
    "Setup",
    "SplitPoint",
    "Stage",
    "ThresholdPoint",
    "Throughput",
    "Times",
    "TimesPoint",
    "TtftLimit",
    "Worth",
    "all_far",
    "break_even",
    "choose",
    "curves_of",
    "decodes_per_s",
    "deployment_of",
    "deployments_of",
    "egress_bytes_per_s",
    "log_normal",
    "prefill_seconds",
    "read_clusters",
    "read_table",
    "simulate",
    "solve",
    "throughput",
    "trace_at",
    "worth_of",
]
