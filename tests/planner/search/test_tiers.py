"""A study with host memory and a store: what they contribute, and the layout's file."""

import msgspec
import pytest
import yaml

from hydrainfer.config import Slo
from hydrainfer.core import ConfigError, Layout
from hydrainfer.planner.costs import read_hardware
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.search import layout_file, observe, study_of, tier_gains
from hydrainfer.planner.simulation import StoreModel
from hydrainfer.workload.sources import Dialogues, Workload

pytestmark = pytest.mark.cpu
MODEL, RATE, GIB = "llama-3.1-8b", 4.0, 1 << 30
TALKS = Workload(dataset="talks", n_pictures=0, words=300, dialogues=Dialogues(turns=4, apart_s=20))
FAST = StoreModel(read_bytes_per_s=10e9, write_bytes_per_s=10e9)


def study(host_gib=0.0, store=None, model=MODEL):
    """A study of devices with room for a few conversations."""
    device = msgspec.structs.replace(read_hardware("h800"), memory_bytes=20.8e9)
    trace = trace_of(TALKS, prompts_of(model), 300, seed=1)
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    made = study_of(shape_of(model), device, trace, slo, host_bytes=int(host_gib * GIB))
    return msgspec.structs.replace(made, store=store)


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D"])
def test_each_tier_adds_to_what_is_found_and_makes_first_tokens_sooner(layout):
    gains = tier_gains(study(8.0, FAST), Layout.parse(layout), RATE)
    assert [(gain.host_memory, gain.store) for gain in gains] == [(False, False), (True, False), (True, True)]
    device, host, both = gains
    assert device.found + 0.05 < host.found < both.found <= 1.0
    assert both.ttft_p50 < device.ttft_p50 and both.ttft_p90 < device.ttft_p90
    assert {gain.rate for gain in gains} == {RATE}


def test_one_tier_alone_is_compared_with_none():
    layout = Layout.parse("1EPD")
    assert [gain.store for gain in tier_gains(study(store=FAST), layout, RATE)] == [False, True]
    assert [gain.host_memory for gain in tier_gains(study(2.0), layout, RATE)] == [False, True]
    assert tier_gains(study(), layout, RATE) == ()


def test_a_store_that_is_slower_than_computing_changes_nothing():
    slow = StoreModel(read_bytes_per_s=1e7)
    without, with_it = tier_gains(study(store=slow), Layout.parse("1EPD"), RATE)
    assert with_it.found == pytest.approx(without.found, abs=0.02)


def test_what_is_searched_is_simulated_with_the_tiers():
    bare, tiered = (observe(s, Layout.parse("1EPD"), RATE).attempt for s in (study(), study(8.0, FAST)))
    assert tiered.ttft_p50 < bare.ttft_p50


def test_the_layout_s_file_has_the_tiers_of_each_role_that_uses_them():
    options = {"host_cache_gib": 2.0, "store": "dir:/x?gib=5"}
    layout = Layout.parse("1E1P1D")
    e, p, d = yaml.safe_load(layout_file(layout, study(2.0, FAST, "llava-1.5-7b"), tiers=options))["instances"]
    assert {**p, **options} == p and {**d, **options} == d
    assert e["store"] == options["store"] and "host_cache_gib" not in e
    assert "store" not in layout_file(layout, study(model="llava-1.5-7b"))


def test_host_memory_below_a_block_is_refused():
    with pytest.raises(ConfigError, match="--host-cache-gib is less than one block of each cache"):
        study(1e-6)
