"""Cores and memory are those of the container, not of its host."""

from __future__ import annotations

import math

import pytest

from hydrainfer import control_group, machine
from hydrainfer.config import MachineShare

pytestmark = pytest.mark.cpu
GIB = 1 << 30


@pytest.fixture
def system(tmp_path):
    """A function that writes files below /proc and /sys of a system that it returns."""

    def write(groups: str, **files: str):
        for name, text in {"proc/self/cgroup": groups, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_no_limit(system, tmp_path):
    assert control_group.cpus(tmp_path) == math.inf == control_group.memory(tmp_path).free, "no Linux"
    root = system(
        "4:memory:/a\n3:cpu,cpuacct:/\n0::/a\n",
        **{
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "123\n",
        },
    )
    assert control_group.cpus(root) == math.inf
    assert control_group.memory(root).free > 2**60


def test_limits_of_version_2_and_of_the_groups_around(system):
    root = system(
        "0::/pod/container\n",
        **{
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{7 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/pod/container/cpu.max": "250000 100000\n",
        },
    )
    assert control_group.memory(root) == (6 * GIB, 3 * GIB), "pages of files can be dropped"
    assert control_group.cpus(root) == 2.5


def test_limits_of_version_1_where_the_group_is_not_to_be_seen(system):
    root = system(
        "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert control_group.memory(root) == (4 * GIB, 0)
    assert control_group.cpus(root) == 0.5


def test_the_machine_is_no_larger_than_its_limits(monkeypatch):
    monkeypatch.setattr(control_group, "cpus", lambda: 0.5)
    monkeypatch.setattr(control_group, "memory", lambda: control_group.Memory(GIB, 1000.0))
    assert machine.n_cores() == 1 and machine.memory_bytes() == GIB and machine.free_memory_bytes() == 1000
    monkeypatch.setattr(control_group, "memory", lambda: control_group.Memory(math.inf, math.inf))
    assert 0 < machine.free_memory_bytes() < machine.memory_bytes()


@pytest.mark.parametrize(
    ("share", "threads", "memory"),
    [
        ({}, 2, 1 / 3),
        ({"cpus": 8}, 8, 1.0),
        ({"cpus": 4.5}, 4, 4.5 / 8),
        ({"cpus": 0}, 2, 1 / 3),
        ({"cpus": 16, "cores": (0, 1, 2), "threads": 1}, 1, 1.0),
        ({"cores": (0, 1, 2)}, 3, 1 / 3),
    ],
)
def test_an_instance_has_its_share(share, threads, memory, monkeypatch):
    """An instance whose CPUs are known may be alone on its machine."""
    monkeypatch.setattr("hydrainfer.config.layout.n_cores", lambda: 8)
    one = MachineShare(**share)
    assert one.threads_of_one(3) == threads and one.of_memory(3) == pytest.approx(memory)
