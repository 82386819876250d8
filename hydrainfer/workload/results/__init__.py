"""The figures of a load: percentiles, SLO attainment, goodput, and which part of the time made requests miss.

Called by `measuring`, `output` and `benchmarks/`. Pure: sends nothing, and prints nothing.
"""

from hydrainfer.workload.results.attribution import LIMITS, PARTS, Reference
from hydrainfer.workload.results.judged import series_of, verdict_of
from hydrainfer.workload.results.report import LoadReport, Percentiles, report_of
from hydrainfer.workload.results.result import (
    NOISY_CORES,
    PACKAGES,
    BenchResult,
    Run,
    Server,
    by_rate,
    hardware,
    now,
    run_of,
)

__all__ = [
    "LIMITS",
    "NOISY_CORES",
    "PACKAGES",
    "PARTS",
    "BenchResult",
    "LoadReport",
    "Percentiles",
    "Reference",
    "Run",
    "Server",
    "by_rate",
    "hardware",
    "now",
    "report_of",
    "run_of",
    "series_of",
    "verdict_of",
]
