"""Engines as files: what they schedule like, what they add to a device."""

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.planner.costs import cost_of, read_engine, read_hardware, slowed
from hydrainfer.planner.inputs import shape_of
from hydrainfer.scheduler import Budgets

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["hydrainfer", "vllm", "sglang"])
def test_shipped_engines(name):
    engine = read_engine(name)
    assert engine.name == name and engine.sources
    assert (engine.budgets(Budgets()) is None) == (name == "hydrainfer")
    assert engine.overlap == ("free" if name == "hydrainfer" else "off")
    assert (engine.policy.batching == "prefill-first") == (name == "sglang")


def test_an_engine_s_host_takes_its_time():
    engine, device = read_engine("vllm"), read_hardware("a100")
    shape = shape_of("qwen3-vl-4b")
    plain, own = cost_of(shape, device), engine.cost(cost_of(shape, engine.on(device)))
    assert own.step_base_s == engine.step_base_s and own.weights_s == plain.weights_s
    assert engine.cost(plain, mixed=True).encode_token_s == pytest.approx(own.encode_token_s * engine.mixed)
    assert own.prefill_token_s == pytest.approx(plain.prefill_token_s * engine.slower)
    assert own.overlap_slowdown == pytest.approx(plain.overlap_slowdown, rel=0.2)


def test_slower_is_slower_throughout():
    cost = cost_of(shape_of("llava-1.5-7b"), read_hardware("h800"))
    assert slowed(cost, 2.0).language_s(100, 5000, 8, 8000) == pytest.approx(2 * cost.language_s(100, 5000, 8, 8000))
    assert slowed(cost, 2.0).encode_s([576] * 3) == pytest.approx(2 * cost.encode_s([576] * 3))


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("slower: 0", "slower"),
        ("step_base_s: -1", "negative"),
        ("schedulin: x", "scheduling"),
        ("scheduling: x", "x"),
        ("server: {cores: 0}", "server.cores"),
        ("server: {workers: -1}", "its workers"),
    ],
)
def test_wrong_files_of_engine_times_are_refused_with_the_reason(tmp_path, text, needle):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=needle):
        read_engine(str(path))
    with pytest.raises(ConfigError, match="vllm"):
        read_engine("nothing")
