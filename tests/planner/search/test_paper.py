"""The shape of the paper's figures that holds on small traces (all of them: `python -m benchmarks.paper`)."""

import msgspec
import pytest

from benchmarks.paper import attainment, batching, intensity
from benchmarks.paper.lab import GPUS, SYSTEMS, Case, Lab, Sample, bound_of, study_for, table_3
from hydrainfer.config import Slo
from hydrainfer.core import Layout, Stage
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.reason import reason

pytestmark = pytest.mark.cpu  # pictures are counted by their processors
NEXT, TEXTCAPS = "llava-next-7b", "textcaps"


def case(system="stage-level", dataset=TEXTCAPS, setting="roofline"):
    return Case(NEXT, dataset, table_3(NEXT, dataset), setting, system)


@pytest.fixture(scope="module")
def lab():
    return Lab(120, folder=None)


def why(layout, rate, slo):
    study = msgspec.structs.replace(study_for(case()), slo=slo)
    return reason(study.shortened(150), Layout.parse(layout), rate)


def test_1ep7d_is_limited_by_ttft_before_prefill_and_7ep1d_by_decode():
    slo, rate = Slo(ttft_s=1.0, tpot_s=0.03), 8.0 * GPUS  # both bind within 150 requests
    few_ep, few_d = (why(layout, rate, slo) for layout in ("1EP7D", "7EP1D"))
    assert few_ep.evidence.limit == "TTFT" and few_ep.stage in (Stage.ENCODE, Stage.PREFILL)
    assert few_d.stage == Stage.DECODE
    assert Stage.DECODE not in _limits("1EP7D") and _limits("7EP1D") == (Stage.DECODE,)


def _limits(layout):
    return Bounds(study_for(case())).of(Layout.parse(layout)).stages


def test_stage_level_scheduling_carries_what_prefill_first_does_not(lab):
    rate = 10.0 * GPUS
    with_, without = (lab.run(case(system), "8EPD", rate, 120) for system in ("stage-level", "prefill-first"))
    slo = table_3(NEXT, TEXTCAPS)
    assert with_.attainment(slo) >= 0.95 > 0.8 > without.attainment(slo)


def test_mme_gains_little_from_stage_level_scheduling(lab):
    rate = 0.7 * bound_of(case(dataset="mme"), "8EPD")
    slo = table_3(NEXT, "mme")
    for system in ("stage-level", "decode-first"):
        assert lab.run(case(system, "mme"), "8EPD", rate, 120).attainment(slo) >= 0.9


def test_a_queue_that_grows_counts_for_as_long_as_the_run_should_have_been():
    slo = Slo(ttft_s=8.0, tpot_s=0.1)
    n, rate = 400, 100.0
    steady = Sample(rate, [0.5] * n, [0.05] * n, [0.05] * n)
    growing = steady._replace(ttft_s=[0.5 + 0.5 * i / rate for i in range(n)])  # half of what comes is not served
    assert steady.attainment(slo) == 1.0
    assert growing.attainment(slo) < 0.5 < growing.attainment(slo, spans=0.1) == 1.0


def test_pictures_raise_the_intensity_of_decode_and_lower_that_of_prefill():
    assert all(holds == "holds" for *_, holds in intensity.compare(intensity.simulate(None, True)))


def test_prefill_saturates_at_once_and_decode_far_beyond():
    found = batching.simulate(None, True)["roofline"]
    assert found["prefill"]["saturates_at"] == 1 and found["decode"]["saturates_at"] > 128


def test_the_lines_of_figure_10_are_systems():
    assert set(attainment.LINES.values()) <= SYSTEMS.keys()
