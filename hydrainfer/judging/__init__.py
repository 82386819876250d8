"""Whether a deployment keeps its SLO: verdicts, shares with intervals, the steady state, goodput, and what is to blame.

Called by the bench and the planner, with measured or simulated latencies. Never sends load and never serves.
"""

from hydrainfer.judging.attainment import (
    FAILED,
    Proportion,
    Verdict,
    at_quantile,
    effective_n,
    judge,
    quantile_interval,
    wilson,
)
from hydrainfer.judging.blame import blamed, per_token
from hydrainfer.judging.search import Ask, Goodput, Search
from hydrainfer.judging.steady import Series, delay_limit_s, steady_state

__all__ = [
    "FAILED",
    "Ask",
    "Goodput",
    "Proportion",
    "Search",
    "Series",
    "Verdict",
    "at_quantile",
    "blamed",
    "delay_limit_s",
    "effective_n",
    "judge",
    "per_token",
    "quantile_interval",
    "steady_state",
    "wilson",
]
