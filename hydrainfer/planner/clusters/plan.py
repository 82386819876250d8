"""The answer of `hydrainfer profile --clusters`: what to send where, what it carries and costs, beside other ways."""

from __future__ import annotations

import msgspec

from hydrainfer.config import Slo
from hydrainfer.planner.clusters.model import FarUse, Stage

ALONE, ALL_FAR, CHOSEN = "home alone", "all prefill far", "far prefill"
FASTEST, CHEAPEST = "highest rate", "lowest cost"
"""Names of deployments."""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of the question. `devices`: of each instance; `price`: of a device for an hour; `measured`: whether its
    times were, or are assumed from a roofline; `source`: where they are from. Home decodes `batch` sequences in a step
    of `step_s`; both are None for a far cluster."""

    name: str
    hardware: str
    instances: int
    devices: int
    price: float | None
    measured: bool
    source: str
    batch: int | None = None
    step_s: float | None = None


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A link of the question. `price_per_gb`: None if not known."""

    source: str
    target: str
    gbps: float
    latency_ms: float
    price_per_gb: float | None
    max_share: float


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """What `requests` simulated requests saw that came at random at `rate` per second, the share `load` of what the
    deployment carries. In seconds from their arrival: the first token, and the p90 of the second one, which waits
    for the KV to cross a link. `ttft_met`: the share within the SLO's limit."""

    load: float
    rate: float
    requests: int
    ttft_mean: float
    ttft_p90: float
    ttft_met: float
    second_p90: float


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve the prompts. Prompts of more than `threshold` tokens go to the clusters `far`; None if none go
    there. `rate`: requests per second, of which `limit` allows no more; `far_share` of them go far. `egress_gbps`: over
    all links, `link_share` of the busiest; `request_gb`: 10⁹ bytes of the average request. `device_cost`, `link_cost`:
    of a thousand requests at that rate; None if prices are not known. `ttft_mean`, `ttft_p90`: seconds without queues,
    `ttft_met`: the share of the requests within the SLO's limit. `guessed`: the share of the requests that are shorter
    than all that was measured. `queued`: with queues, for the deployments that were simulated."""

    name: str
    far: tuple[str, ...]
    threshold: float | None
    n_prefill: int
    n_decode: int
    rate: float
    limit: Stage
    far_share: float
    egress_gbps: float
    link_share: float
    request_gb: float
    device_cost: float | None
    link_cost: float | None
    ttft_mean: float
    ttft_p90: float
    ttft_met: float
    guessed: float
    uses: tuple[FarUse, ...] = ()
    queued: Queued | msgspec.UnsetType = msgspec.UNSET

    @property
    def cost(self) -> float | None:
        """The cost of a thousand requests, with the links."""
        if self.device_cost is None or self.link_cost is None:
            return None
        return self.device_cost + self.link_cost


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a GB on the link of a far cluster from which doing without that cluster costs less, while other
    links keep theirs; None if it always does. `threshold`, `n_prefill`: of the arrangement that pays longest."""

    name: str
    price_per_gb: float | None
    threshold: float | None = None
    n_prefill: int | None = None


class ThresholdPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second that each stage allows with a threshold, and all; None if a stage has nothing to do."""

    threshold: float
    far_prefill: float | None
    link: float | None
    home_prefill: float | None
    decode: float
    rate: float


class SplitPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second with so many instances at home that prefill: with the planned threshold, and the best."""

    n_prefill: int
    rate: float
    best_rate: float


class LinkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second if the links have so much together: as planned, and with threshold and split chosen anew."""

    gbps: float
    rate: float
    best_rate: float
    threshold: float
    n_prefill: int


class PricePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest arrangement with far clusters up to a price of a GB. Costs are of a thousand requests."""

    price_per_gb: float
    threshold: float
    n_prefill: int
    n_decode: int
    rate: float
    device_cost: float
    thousand_gb: float


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """How the rate depends on each choice, around `of`, the name of a deployment. `prices`: by ascending price; () if
    prices are not known."""

    of: str
    thresholds: tuple[ThresholdPoint, ...]
    splits: tuple[SplitPoint, ...]
    links: tuple[LinkPoint, ...]
    prices: tuple[PricePoint, ...] = ()


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer and the question behind it. `deployments`: the one to choose first, if `met`, then others beside it;
    `met`: whether it meets the SLO. `pays`: whether a request costs less with a far cluster than on home alone, None if
    prices are not known. `worth`: of each far cluster; () without prices, or if nothing meets the SLO. `unknown`: what
    the figures leave out."""

    model: str
    workload: dict[str, str | float]
    slo: Slo
    target: float
    objective: str
    clusters: tuple[ClusterFacts, ...]
    links: tuple[LinkFacts, ...]
    deployments: tuple[Deployment, ...]
    met: bool
    pays: bool | None
    worth: tuple[Worth, ...] = ()
    curves: Curves | None = None
    unknown: tuple[str, ...] = ()
    took_s: float = 0.0
    command: str = ""
    version: str = ""
    date: str = ""

    @property
    def chosen(self) -> Deployment:
        return self.deployments[0]

    def named(self, name: str) -> Deployment | None:
        """The deployment of this name, if there is one beside the chosen one."""
        return next((deployment for deployment in self.deployments if deployment.name == name), None)
