"""Small systems of two clusters, by hand and by hypothesis."""

import dataclasses
from itertools import accumulate

import msgspec
from hypothesis import strategies as st

from hydrainfer.planner.clusters import Cluster, ClusterLink, Clusters, Lengths, Times, TimesPoint

FAST = Times(points=(TimesPoint(1000, 1e8, 0.5), TimesPoint(10000, 4e8, 1.0), TimesPoint(100000, 2e9, 5.0)))
SLOW = Times(points=(TimesPoint(1000, 1e8, 0.5), TimesPoint(10000, 4e8, 2.0), TimesPoint(100000, 2e9, 20.0)))


def hand() -> Clusters:
    """Two lengths, half of the requests each, that are points of both tables."""
    home = Cluster(times=SLOW, instances=4, devices=2, price=1.0, decodes_per_s=1.0)
    far = Cluster(times=FAST, instances=2, devices=2, price=3.0)
    link = ClusterLink(bytes_per_s=1e10, price_per_gb=0.5)
    return Clusters(home=home, far=far, link=link, lengths=Lengths.of([1000, 100000]))


def with_home(clusters, **changes):
    return dataclasses.replace(clusters, home=msgspec.structs.replace(clusters.home, **changes))


def with_far(clusters, **changes):
    return dataclasses.replace(clusters, far=msgspec.structs.replace(clusters.far, **changes))


def with_link(clusters, **changes):
    return dataclasses.replace(clusters, link=msgspec.structs.replace(clusters.link, **changes))


@st.composite
def tables(draw):
    """Tables whose bytes and seconds grow with the tokens."""
    n = draw(st.integers(2, 4))
    growth = st.floats(1.1, 8.0)
    tokens = list(accumulate([500.0, *draw(st.lists(growth, min_size=n - 1, max_size=n - 1))], lambda a, b: a * b))
    kv_bytes = list(accumulate([1e8, *draw(st.lists(growth, min_size=n - 1, max_size=n - 1))], lambda a, b: a * b))
    first_s = draw(st.floats(0.05, 1.0))
    seconds = list(accumulate([first_s, *draw(st.lists(growth, min_size=n - 1, max_size=n - 1))], lambda a, b: a * b))
    return Times(points=tuple(TimesPoint(*point) for point in zip(tokens, kv_bytes, seconds, strict=True)))


@st.composite
def systems(draw):
    """A home cluster, a far one, a link, and a sample of lengths."""
    home = Cluster(
        times=draw(tables()),
        instances=draw(st.integers(2, 9)),
        price=draw(st.floats(0.0, 5.0)),
        decodes_per_s=draw(st.floats(0.1, 3.0)),
    )
    far = Cluster(times=draw(tables()), instances=draw(st.integers(1, 6)), price=draw(st.floats(0.0, 5.0)))
    link = ClusterLink(
        bytes_per_s=draw(st.floats(1e7, 1e10)),
        price_per_gb=draw(st.floats(0.0, 0.01)),
        max_share=draw(st.floats(0.2, 1.0)),
    )
    sample = draw(st.lists(st.floats(200.0, 200000.0), min_size=1, max_size=30))
    return Clusters(home=home, far=far, link=link, lengths=Lengths.of(sample))
