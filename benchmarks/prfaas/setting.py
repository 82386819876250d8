"""The paper's case study: Table 5, the lengths, the clusters, and what is inferred because it is not published."""

from __future__ import annotations

from functools import cache

import numpy as np

from hydrainfer.planner.clusters import (
    Arrangement,
    Cluster,
    ClusterLink,
    Clusters,
    Lengths,
    Times,
    TimesPoint,
    decodes_per_s,
    log_normal,
)

KI = 1024  # tokens, of Table 5 and of the longest prompt; thresholds are in thousands
MIB = 1 << 20
GBIT = 1e9 / 8
CENT = 0.01

TABLE_5 = ((1, 190.8, 0.44, 3.61), (8, 308.9, 0.72, 3.59), (32, 701.3, 1.84, 3.19), (128, 2316.3, 7.40, 2.62))
"""Length in 1,024 tokens, MiB of KV cache, seconds of prefill on 8 H200, Gbps of KV."""

THRESHOLD = 19_400
LINK_GBPS = 100.0
PER_INSTANCE = 8  # devices
H20_PRICE, H200_PRICE = 1.25, 2.50
"""Dollars for an hour of a device. The paper has no prices; its 15 % at equal cost fix that an H200 costs 2.0 H20."""

BATCH, TOKENS_PER_S, _N_OUTPUT = 20, 40.0, 1024
"""The SLO of 40 tokens/s and the answers are the paper's. The batch of a D is not: 6.25 req/s on 8 D are 20."""
_HOMOGENEOUS_P, _HOMOGENEOUS_PER_S = 9, 2.11
_HOME_P, _HOME_PER_S = 3, 1.64
_HOMOGENEOUS_P90_S = 9.73


@cache
def lengths() -> Lengths:
    """Lengths of prompts, section 4.1."""
    return log_normal(9.90, 1.00, 128, 128 * KI)


@cache
def h200_times() -> Times:
    """Table 5."""
    return Times(points=tuple(TimesPoint(n * KI, mib * MIB, seconds) for n, mib, seconds, _ in TABLE_5))


def h20_curve() -> tuple[float, float, float]:
    """Constant, linear and square part of the seconds of a prefill on 8 H20, by 1,024 tokens.

    Not published. Three cells of Table 6 fix them: 9 P that prefill 2.11 prompts of mean length per second, 3 P that
    prefill 1.64 of those up to the threshold, and the p90 of the TTFT of 9.73 s.
    """
    prompts = lengths()
    is_short = np.where(prompts.tokens <= THRESHOLD, 1.0, 0.0)
    short_tokens = prompts.mean(prompts.tokens * is_short) / prompts.mean(is_short)
    tokens = np.array([prompts.mean_tokens, short_tokens, prompts.quantile(0.9)])
    seconds = [_HOMOGENEOUS_P / _HOMOGENEOUS_PER_S, _HOME_P / _HOME_PER_S, _HOMOGENEOUS_P90_S]
    constant, linear, square = np.linalg.solve(np.vander(tokens / KI, 3, increasing=True), seconds)
    return float(constant), float(linear), float(square)


@cache
def h20_times() -> Times:
    """`h20_curve` as a table with a point per eighth of an octave. The KV cache has the same size as on H200."""
    constant, linear, square = h20_curve()
    kv_bytes = h200_times().kv_bytes
    return Times.sampled(
        [float(n) for n in np.geomspace(128, 128 * KI, 81)],
        lambda n: float(kv_bytes(n)),
        lambda n: constant + linear * n / KI + square * (n / KI) ** 2,
    )


def h20(n_devices: int) -> Cluster:
    """A cluster of H20 that prefills and decodes."""
    return Cluster(
        name="home",
        times=h20_times(),
        instances=n_devices // PER_INSTANCE,
        devices=PER_INSTANCE,
        price=H20_PRICE,
        decodes_per_s=decodes_per_s(BATCH, 1.0 / TOKENS_PER_S, _N_OUTPUT),
    )


def prfaas(gbps: float = LINK_GBPS, price_per_gb: float = 0.0, h200_price: float = H200_PRICE) -> Clusters:
    """64 H20 at home and 32 H200 far away."""
    far = Cluster(name="far", times=h200_times(), instances=32 // PER_INSTANCE, devices=PER_INSTANCE, price=h200_price)
    link = ClusterLink(source="far", target="home", bytes_per_s=gbps * GBIT, price_per_gb=price_per_gb)
    return Clusters(home=h20(64), far=(far,), links=(link,), lengths=lengths())


def homogeneous() -> Clusters:
    """96 H20."""
    return Clusters(home=h20(96), lengths=lengths())


ALL_FAR = Arrangement(threshold=0, n_prefill=0, n_decode=8)
"""The paper's naive heterogeneous deployment: H200 prefill everything, 64 H20 decode."""
PAPERS = Arrangement(threshold=THRESHOLD, n_prefill=3, n_decode=5)
"""The paper's optimum."""
