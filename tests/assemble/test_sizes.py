"""Budgets of an instance, from options."""

import pytest

from hydrainfer.assemble.sizes import budgets_of, check_between_processes
from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError
from hydrainfer.storage import check_within

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("slo", "gap_s", "wait_s"),
    [
        (None, 0.0, 0.0),
        ("a-file.yaml", 0.0, 0.0),
        ("ttft=1.0", 0.0, 0.0),
        ("tpot=0.02", 0.02, 0.4),
        ("ttft=3.0,tpot=0.02", 0.02, 0.4),
        ("ttft=0.6,tpot=0.02", 0.02, 0.2),
    ],
)
def test_slices_follow_the_limits_of_an_slo_if_it_has_any(slo, gap_s, wait_s):
    config = ServeConfig(model="", token_budget=64, image_budget=2, slo=slo)
    budgets = budgets_of(config, "slice")
    assert (budgets.gap_s, budgets.wait_s) == (gap_s, pytest.approx(wait_s))
    assert budgets_of(config, "off").gap_s is None


def test_a_transport_between_other_processes_is_refused():
    for check, wrong in ((check_between_processes, ("local",)), (check_within, ("nccl", "cuda-ipc"))):
        for transport in ("auto", "local", "shared-memory", "gloo", "nccl", "cuda-ipc", "tcp"):
            if transport in wrong:
                with pytest.raises(ConfigError, match=f"transport {transport} is for .* use .*auto"):
                    check(transport)
            else:
                check(transport)


def test_nccl_between_instances_that_share_a_gpu_is_refused():
    """NCCL says "Duplicate GPU detected" only at the first pull."""
    check_between_processes("nccl", [1.0, 1.0])
    check_between_processes("cuda-ipc", [0.5, 0.5])
    with pytest.raises(ConfigError, match=r"nccl cannot copy .* share a GPU.* use cuda-ipc or auto"):
        check_between_processes("nccl", [1.0, 0.5])
