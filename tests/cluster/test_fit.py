"""What a cluster lacks for a layout is said in one line."""

import pytest

from hydrainfer.cluster.fit import cpus_each, needs, shortfall
from hydrainfer.config import MachineShare

pytestmark = pytest.mark.unit
TWO = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0, "vision": 1.0}]
FREE = {"CPU": 6.0, "GPU": 1.0, "vision": 1.0}


@pytest.mark.parametrize(
    ("shares", "free", "line"),
    [
        ({"A": MachineShare(cpus=1, gpus=1), "B": MachineShare(cpus=2, resources={"vision": 1})}, FREE, None),
        ({"A": MachineShare(gpus=0.5), "B": MachineShare(gpus=0.5)}, FREE, None),
        ({"A": MachineShare(gpus=1), "B": MachineShare(gpus=1)}, FREE, "layout needs 2 GPUs, the cluster has 1"),
        ({"A": MachineShare(cpus=7)}, FREE, "layout needs 7 CPUs, the cluster has 6"),
        ({"A": MachineShare(cpus=5)}, FREE, "no single node has 5 CPUs for A"),
        ({"A": MachineShare(resources={"audio": 1})}, FREE, "no node has resource 'audio', which A needs"),
        (
            {"A": MachineShare(cpus=1, gpus=1, resources={"vision": 1})},
            FREE,
            "no single node has 1 CPU, 1 GPU, 1 of resource 'vision' for A",
        ),
        (
            {"A": MachineShare(gpus=1)},
            {"CPU": 6.0, "GPU": 0.5},
            "layout needs 1 GPU, the cluster has 1, of which 0.5 free",
        ),
    ],
)
def test_the_first_thing_missing(shares, free, line):
    assert shortfall({name: needs(s) for name, s in shares.items()}, TWO, free) == line


@pytest.mark.parametrize(
    ("n", "cpus", "each"), [(2, [2], 1), (3, [2], 0.5), (3, [1, 1], 0.5), (5, [2], 0.3333), (3, [], 0), (9, [1, 64], 1)]
)
def test_cpus_are_shared_out_so_that_all_fit(n, cpus, each):
    nodes = [{"CPU": float(c)} for c in cpus]
    assert cpus_each(n, nodes) == each
    assert not each or sum(int(c / each + 1e-9) for c in cpus) >= n
