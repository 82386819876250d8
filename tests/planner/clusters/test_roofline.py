"""Times of described devices."""

import msgspec
import pytest

from benchmarks.prfaas.setting import GBIT
from benchmarks.prfaas.table3 import TABLE_3
from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import Roofline
from hydrainfer.planner.costs import cost_of, read_engine, read_hardware
from hydrainfer.planner.inputs import shape_of

pytestmark = pytest.mark.cpu


def roofline(model, hardware="h200", n=1, decodes=True):
    return Roofline(shape_of(model), read_hardware(hardware).joined(n), read_engine("hydrainfer"), decodes=decodes)


def test_a_prompt_takes_what_the_roofline_says_of_one_chunk():
    device = read_engine("hydrainfer").on(read_hardware("h200"))
    cost = cost_of(shape_of("llama-3.1-8b"), device)
    alone = roofline("llama-3.1-8b")
    assert alone.prefill_s(4096) == cost.language_s(4096, 4096**2, 0, 0)
    times = alone.times(100, 100_000)
    assert (times.shortest, times.longest) == pytest.approx((100, 100_000))
    assert times.prefill_s(5000) == pytest.approx(alone.prefill_s(5000), rel=0.01)


def test_bytes_are_those_of_the_caches():
    """32 layers of 8 heads of 128 keys and values each in 2 bytes; a hybrid leaves its state whatever the length."""
    assert roofline("llama-3.1-8b").kv_bytes(1000) == 1000 * 32 * 8 * 2 * 128 * 2
    shape = shape_of("qwen3-next-80b-a3b")
    hybrid = roofline("qwen3-next-80b-a3b", n=2)
    assert hybrid.kv_bytes(1000) == shape.state_bytes + 1000 * shape.kv_token_bytes


def test_a_window_keeps_its_last_tokens():
    shape = shape_of("gpt-oss-20b")
    kv = roofline("gpt-oss-20b").kv_bytes
    assert kv(100_000) - kv(50_000) == 50_000 * shape.kv_token_bytes
    assert kv(100) < 100 * sum(shape.kv_width(i) for i in range(shape.layers)) * shape.item_bytes + 1


def test_a_batch_grows_with_the_tpot_up_to_what_the_caches_hold():
    alone = roofline("llama-3.1-8b")
    batches = [alone.batch(4000, 4500, tpot_s) for tpot_s in (0.01, 0.02, 0.05, None)]
    sizes = [batch.sequences for batch in batches]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] and sizes[-2:] == [sizes[-1]] * 2
    assert all(batch.step_s <= limit for batch, limit in zip(batches, (0.01, 0.02, 0.05), strict=False))
    assert alone.batch(4000, 9000, None).sequences == pytest.approx(sizes[-1] / 2, abs=1)


def test_a_roofline_is_far_too_fast_for_short_prompts_and_a_third_for_long_ones():
    """MiMo-V2-Flash on 4 H200, beside the paper's Table 3 on 8: KV bytes per second of prefill."""
    shape = msgspec.structs.replace(shape_of("mimo-v2-flash"), weights="fp8")
    half = Roofline(shape, read_hardware("h200").joined(4), read_engine("hydrainfer"), decodes=False)
    times = half.times(1024, 128 * 1024)
    short, *_, long = TABLE_3["MiMo-V2-Flash"]
    assert float(times.kv_bytes_per_s(1024)) / GBIT / short == pytest.approx(18.6, abs=0.1)
    assert float(times.kv_bytes_per_s(128 * 1024)) / GBIT / long == pytest.approx(1.30, abs=0.01)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="does not fit"):
        roofline("qwen2.5-vl-72b")
    with pytest.raises(ConfigError, match="cannot be divided"):
        roofline("qwen3-next-80b-a3b", n=4)
    with pytest.raises(ConfigError, match="allows for none"):
        roofline("llama-3.1-8b").batch(4000, 4500, 0.001)
    with pytest.raises(ConfigError, match="no sequence of"):
        roofline("llama-3.1-8b").batch(4e6, 4e6, None)
