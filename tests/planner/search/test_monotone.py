"""Faster or more devices and looser SLOs never carry less, beyond 2 %."""

from functools import cache

import msgspec
import pytest

from hydrainfer.config import Slo
from hydrainfer.core import Layout
from hydrainfer.planner.costs import read_hardware
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.search import Bounds, attempt, bracket, narrow, study_of
from hydrainfer.workload.sources import read_workload

pytestmark = pytest.mark.unit
TIGHT = Slo(ttft_s=0.25, tpot_s=0.04)
_LESS = 0.98


@cache
def requests():
    return tuple(trace_of(read_workload("textcaps"), prompts_of("llava-1.5-7b"), 150, 0))


@cache
def carried(layout, slo=TIGHT, flops=1.0, bandwidth=1.0):
    """The goodput on one trace, exact to half a per cent: the same requests for all."""
    device = read_hardware("h800")
    faster = {"flops_per_s": device.flops_per_s * flops, "bytes_per_s": device.bytes_per_s * bandwidth}
    study = study_of(shape_of("llava-1.5-7b"), msgspec.structs.replace(device, **faster), requests(), slo)
    parsed = Layout.parse(layout)
    bound = Bounds(study).of(parsed).rate

    def carries(rate):
        return attempt(study, parsed, rate).carried(study.target)

    return narrow(carries, *bracket(carries, 0.0, bound * 0.8, bound * 4, 1.2), 0.005)[0]


@pytest.mark.parametrize("layout", ["4EPD", "1ED3P", "1E3PD", "2EP2D", "1E1P2D"])
def test_faster_devices_carry_no_less(layout):
    rates = [carried(layout, flops=by) for by in (1.0, 2.0, 4.0)]
    assert rates[1] >= _LESS * rates[0] and rates[2] >= _LESS * rates[1], rates
    assert carried(layout, bandwidth=2.0) >= _LESS * rates[0]


@pytest.mark.parametrize("layout", ["4EPD", "1ED3P", "1E3PD"])
def test_looser_limits_carry_no_less(layout):
    tight = carried(layout)
    for slo in (Slo(ttft_s=0.5, tpot_s=0.04), Slo(ttft_s=0.25, tpot_s=0.06), Slo(ttft_s=1.0, tpot_s=0.08)):
        assert carried(layout, slo) >= _LESS * tight, slo


@pytest.mark.parametrize(
    ("fewer", "more"),
    [("3EPD", "4EPD"), ("1ED2P", "1ED3P"), ("1E1PD", "1E2PD"), ("1E2PD", "2E2PD"), ("1EP1D", "2EP1D")],
)
def test_more_devices_carry_no_less(fewer, more):
    assert carried(more) >= _LESS * carried(fewer)
