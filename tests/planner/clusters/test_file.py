"""Files of clusters: what is read of them, and that a fault is one line with file and field."""

from pathlib import Path

import pytest
import yaml

from hydrainfer.config import read_yaml
from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import read_clusters

pytestmark = pytest.mark.unit
SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "clusters").glob("*.yaml"))
HOME = {"hardware": "h20", "devices": 64, "tensor_parallel": 8, "price": 1.25}
FAR = {"hardware": "h200", "devices": 32, "tensor_parallel": 8, "price": 2.5, "roles": ["P"]}
LINK = {"from": "far", "to": "home", "gbps": 100, "latency_ms": 10, "price_per_gb": 0.004}


def written(folder, home=HOME, far=FAR, links=(LINK,), **more):
    """The path of a file with a home cluster, a far one unless it is None, and links."""
    clusters = {"home": home} | ({} if far is None else {"far": far})
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"clusters": clusters, "links": list(links)} | more, sort_keys=False))
    return path


def test_a_file_says_what_there_is(tmp_path):
    path, file = read_clusters(str(written(tmp_path)))
    assert path.name == "own.yaml" and (file.home, file.far, file.has_prices) == ("home", ["far"], True)
    assert (file.clusters["home"].instances, file.clusters["far"].instances) == (8, 4)
    link = file.links[0].link
    assert (link.bytes_per_s, link.latency_s, link.price_per_gb) == pytest.approx((12.5e9, 0.01, 0.004))


def test_the_cluster_that_decodes_is_the_home_whatever_its_name(tmp_path):
    _, file = read_clusters(str(written(tmp_path, home=FAR, far=HOME, links=[LINK | {"from": "home", "to": "far"}])))
    assert file.home == "far" and file.far == ["home"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_clusters_are_found_by_name_with_their_tables(path):
    where, file = read_clusters(path.stem)
    assert all((where.parent / entry.times).is_file() for entry in file.clusters.values() if entry.times)
    assert read_yaml(where) == read_yaml(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"home": HOME | {"price": -1.0}}, "clusters.home.price: -1 is no price"),
        ({"home": HOME | {"price": float("nan")}}, "clusters.home.price: nan is no price"),
        ({"far": FAR | {"price": 250_000.0}}, "clusters.far.price: 250000 is 200,000 times that of another device"),
        ({"far": {k: v for k, v in FAR.items() if k != "price"}}, "clusters.far.price: missing, while home has one"),
        ({"links": [LINK | {"price_per_gb": -0.1}]}, r"links\[0\].price_per_gb: -0.1 is no price of a GB"),
        ({"links": [LINK | {"price_per_gb": 4.0}]}, r"links\[0\].price_per_gb: 4 for a GB is more than a device"),
        ({"links": [LINK | {"from": "nowhere"}]}, r"links\[0\].from: no cluster nowhere; there are home, far"),
        ({"links": [LINK | {"to": "nowhere"}]}, r"links\[0\].to: no cluster nowhere"),
        ({"links": [LINK | {"to": "far"}]}, r"links\[0\].to: far only prefills"),
        ({"links": [LINK | {"from": "home"}]}, r"links\[0\].from: home decodes"),
        ({"links": [LINK, LINK]}, r"links\[1\].from: a second link from far"),
        ({"links": []}, "links: none from far to home"),
        ({"links": [LINK | {"gbps": 0}]}, r"links\[0\].gbps: 0 is not between"),
        ({"links": [LINK | {"latency_ms": -1}]}, r"links\[0\].latency_ms: -1 is not between"),
        ({"links": [LINK | {"max_share": 1.5}]}, r"links\[0\].max_share: 1.5 is no share"),
        ({"links": [LINK | {"speed": 3}]}, "unknown field `speed`"),
        ({"home": HOME | {"roles": ["D"]}}, "clusters.home.roles: nobody prefills there"),
        ({"home": HOME | {"roles": ["P"]}}, "clusters: nobody decodes"),
        ({"far": FAR | {"roles": ["P", "D"]}}, "clusters: home and far decode, but a plan has one home"),
        ({"far": FAR | {"roles": ["E"]}}, "roles"),
        ({"far": FAR | {"devices": 30}}, "clusters.far.devices: 30 devices are no groups of 8"),
        ({"home": HOME | {"devices": 8}}, "clusters.home.devices: one instance; home needs two"),
        ({"far": FAR | {"devices": "many"}}, "expected `int`, got `str`"),
        ({"far": FAR | {"gpus": 8}}, "unknown field `gpus`"),
        ({"nodes": 3}, "unknown option 'nodes'"),
    ],
)
def test_a_fault_is_told_with_file_and_field(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as fault:
        read_clusters(str(written(tmp_path, **changes)))
    assert "own.yaml" in fault.value.message and "\n" not in fault.value.message


def test_more_far_clusters_than_can_be_tried_are_refused(tmp_path):
    clusters = {"home": HOME} | {f"far{i}": FAR for i in range(7)}
    links = [LINK | {"from": f"far{i}"} for i in range(7)]
    with pytest.raises(ConfigError, match="clusters: 7 far ones; at most 6 are planned for"):
        read_clusters(str(written(tmp_path, clusters=clusters, links=links)))


def test_the_price_of_a_gb_needs_that_of_devices(tmp_path):
    home, far = ({k: v for k, v in one.items() if k != "price"} for one in (HOME, FAR))
    with pytest.raises(ConfigError, match=r"links\[0\].price_per_gb: says nothing without"):
        read_clusters(str(written(tmp_path, home=home, far=far)))
    assert not read_clusters(str(written(tmp_path, home=home, far=None, links=())))[1].has_prices


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "own.yaml").write_text("clusters: [")
    for name, message in ((tmp_path / "own.yaml", "not valid YAML"), (tmp_path / "none.yaml", "cannot read")):
        with pytest.raises(ConfigError, match=message):
            read_clusters(str(name))
    with pytest.raises(ConfigError, match="prfaas-paper"):
        read_clusters("nothing-like-that")
