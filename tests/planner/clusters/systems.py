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
    home = Cluster(name="home", times=SLOW, instances=4, devices=2, price=1.0, decodes_per_s=1.0)
    far = Cluster(name="far", times=FAST, instances=2, devices=2, price=3.0)
    link = ClusterLink(source="far", target="home", bytes_per_s=1e10, price_per_gb=0.5)
    return Clusters(home=home, far=(far,), links=(link,), lengths=Lengths.of([1000, 100000]))


def with_home(clusters, **changes):
    return dataclasses.replace(clusters, home=msgspec.structs.replace(clusters.home, **changes))


def with_far(clusters, place=0, **changes):
    """The system with changes to the far cluster at a place of its list."""
    far = [msgspec.structs.replace(one, **changes) if i == place else one for i, one in enumerate(clusters.far)]
    return dataclasses.replace(clusters, far=tuple(far))


def with_link(clusters, place=0, **changes):
    """The system with changes to the link at a place of its list."""
    links = [msgspec.structs.replace(one, **changes) if i == place else one for i, one in enumerate(clusters.links)]
    return dataclasses.replace(clusters, links=tuple(links))


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
def systems(draw, most_far=1):
    """A home cluster, one to `most_far` far ones with a link each, and a sample of lengths."""
    home = Cluster(
        name="home",
        times=draw(tables()),
        instances=draw(st.integers(2, 9)),
        price=draw(st.floats(0.0, 5.0)),
        decodes_per_s=draw(st.floats(0.1, 3.0)),
    )
    clusters, links = [], []
    for i in range(draw(st.integers(1, most_far))):
        times, price = draw(tables()), draw(st.floats(0.0, 5.0))
        clusters.append(Cluster(name=f"far {i}", times=times, instances=draw(st.integers(1, 6)), price=price))
        links.append(
            ClusterLink(
                source=f"far {i}",
                target="home",
                bytes_per_s=draw(st.floats(1e7, 1e10)),
                price_per_gb=draw(st.floats(0.0, 0.01)),
                max_share=draw(st.floats(0.2, 1.0)),
            )
        )
    sample = draw(st.lists(st.floats(200.0, 200000.0), min_size=1, max_size=30))
    return Clusters(home=home, far=tuple(clusters), links=tuple(links), lengths=Lengths.of(sample))
