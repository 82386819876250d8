"""The answer to a question over clusters: the plan, beside other ways, and what it leaves out."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from hydrainfer.planner.clusters import (
    ALONE,
    CHOSEN,
    Choice,
    ClusterFacts,
    ClusterPlan,
    Clusters,
    Deployment,
    LinkFacts,
    Queued,
    Setup,
    choose,
    curves_of,
    deployments_of,
    simulate,
    trace_at,
    worth_of,
)
from hydrainfer.planner.search import OnProgress
from hydrainfer.profiling.cluster_question import OBJECTIVES, ClusterSetup
from hydrainfer.version import __version__

SIMULATED = 2000
"""The requests by which queues are judged, whose p90 is then known to a tenth."""
_LOAD = 0.8  # of a deployment's rate
_STEPS = 64  # of a simulated answer at most: each takes as long as several real ones


def answer_clusters(asked: ClusterSetup, *, on_progress: OnProgress, command: str) -> ClusterPlan:
    """The plan. Raises `ConfigError`."""
    begin_s = time.perf_counter()
    q, clusters, ttft = asked.question, asked.clusters, asked.ttft
    priced = asked.file.has_prices
    on_progress("choose far clusters", 0, 4)
    choice = choose(clusters, OBJECTIVES[q.objective], ttft, priced=priced)
    on_progress("break even", 1, 4)
    worth = worth_of(clusters, ttft) if priced and choice.met else ()
    on_progress("curves", 2, 4)
    deployments = deployments_of(clusters, choice, ttft, priced=priced)
    on_progress("simulate queues", 3, 4)
    deployments = tuple(_with_queues(asked, deployment, choice) for deployment in deployments)
    curves = curves_of(choice, ttft, worth)
    return ClusterPlan(
        model=asked.name,
        workload=asked.prompts.summary,
        slo=asked.slo,
        target=q.target,
        objective=q.objective,
        clusters=tuple(_facts(asked)),
        links=tuple(
            LinkFacts(
                source=link.source,
                target=link.to,
                gbps=link.gbps,
                latency_ms=link.latency_ms,
                price_per_gb=link.price_per_gb,
                max_share=link.max_share,
            )
            for link in asked.file.links
        ),
        deployments=deployments,
        met=choice.met,
        pays=choice.pays,
        worth=worth,
        curves=curves,
        unknown=tuple(_unknown(asked, deployments)),
        took_s=time.perf_counter() - begin_s,
        command=command,
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _with_queues(asked: ClusterSetup, deployment: Deployment, choice: Choice) -> Deployment:
    """The chosen deployment, and home alone, with what simulated requests saw there."""
    candidate = {CHOSEN: choice.chosen, ALONE: choice.alone}.get(deployment.name)
    home = asked.instances[asked.clusters.home.name]
    if candidate is None or not deployment.rate or home.batch is None:
        return deployment
    n_output = max(2, min(_STEPS, round(asked.prompts.n_output)))
    setup = Setup(batch=home.batch.sequences, n_output=n_output)
    rate = _LOAD * deployment.rate
    trace = trace_at(asked.clusters.lengths, n_output, rate, SIMULATED, asked.question.seed)
    run = simulate(candidate.clusters, candidate.answer.arrangement, setup, trace)
    longer_s = home.batch.step_s * (asked.prompts.n_output / n_output - 1.0)  # of a simulated step of decoding
    limit_s = asked.slo.ttft_s if asked.slo.ttft_s is not None else math.inf
    queued = Queued(
        load=_LOAD,
        rate=rate,
        requests=SIMULATED,
        ttft_mean=float(np.mean(run.ttft_s)),
        ttft_p90=float(np.quantile(run.ttft_s, 0.9)),
        ttft_met=float(np.mean(run.ttft_s <= limit_s)),
        second_p90=float(np.quantile(run.second_s, 0.9)) - max(0.0, longer_s),
    )
    return msgspec.structs.replace(deployment, queued=queued)


def _facts(asked: ClusterSetup) -> Iterator[ClusterFacts]:
    for name, entry in asked.file.clusters.items():
        _, batch, table = asked.instances[name]
        yield ClusterFacts(
            name=name,
            hardware=entry.hardware,
            instances=entry.instances,
            devices=entry.tensor_parallel,
            price=entry.price,
            measured=table is not None,
            source=table.source if table is not None else "assumed, from a roofline of the described device",
            batch=batch.sequences if batch is not None else None,
            step_s=batch.step_s if batch is not None else None,
        )


def _longest_wait_s(clusters: Clusters) -> float:
    """Seconds that the KV of the longest prompt takes over an idle link, the slowest of all."""
    longest = clusters.lengths.longest
    pairs = zip(clusters.far, clusters.links, strict=True)
    return max((float(far.times.kv_bytes(longest)) / link.bytes_per_s for far, link in pairs), default=0.0)


def _unknown(asked: ClusterSetup, deployments: Sequence[Deployment]) -> Iterator[str]:
    """What the figures leave out."""
    assumed = [name for name, instance in asked.instances.items() if instance.table is None]
    if assumed:
        yield (
            f"The times of {', '.join(assumed)} are ASSUMED, from a roofline of the described device. Beside a "
            "measurement, such times were 1.3 (128K tokens) to 19 times (1K) too short: measure tables before you buy."
        )
    for name, instance in asked.instances.items():
        if instance.table is not None and instance.table.assumed:
            yield f"Of {name}, {instance.table.assumed}."
    if guessed := max(deployment.guessed for deployment in deployments):
        share = f"{guessed * 100:.3g} %"
        yield f"Up to {share} of the requests are shorter than all that was measured; their times are guessed."
    if not asked.file.has_prices:
        yield "Prices are not in the file, so that it is not known whether a far cluster pays."
    unpriced = [link.source for link in asked.file.links if link.price_per_gb is None]
    if unpriced and asked.file.has_prices:
        names = ", ".join(unpriced)
        yield f"The link from {names} has no price_per_gb: costs are without what it sends, as if that were free."
    yield (
        "Queues: a rate is what the stages carry when never idle. How long requests wait was simulated for one rate "
        "only, with arrivals at random. Plan with a margin."
    )
    yield from asked.prompts.notes
    yield (
        "Batches: P prefill one prompt at a time, and D decode contexts of usual length. Far caches are taken to have "
        "room for what waits for a link."
    )
    if asked.clusters.far:
        yield (
            f"Second tokens wait until the KV has crossed: {_longest_wait_s(asked.clusters):.2g} s for the longest "
            "prompt on an idle link."
        )
    if len(asked.clusters.far) > 1:
        yield (
            "Several far clusters share long prompts whatever their lengths; more may be carried if the longest go to "
            "the fastest."
        )
    yield "HydraInfer does not serve two clusters yet: there is no layout.yaml."
