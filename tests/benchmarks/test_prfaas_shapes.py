"""What follows from the shapes of published models (all of it: `python -m benchmarks.prfaas`)."""

import pytest

from benchmarks.prfaas import fig2, hydra_fig7, mimo_cost, mimo_kv, mimo_prefix, table3_shapes
from benchmarks.prfaas.__main__ import PARTS
from benchmarks.prfaas.models import h200, model_of, published, shape
from benchmarks.prfaas.report import write_readme
from benchmarks.prfaas.setting import KI
from benchmarks.prfaas.table3 import TABLE_3
from benchmarks.record import write_result
from hydrainfer.core import ConfigError
from hydrainfer.planner.costs import decoder_of
from hydrainfer.planner.inputs import shape_of

pytestmark = pytest.mark.cpu


def cells(part):
    return {cell["cell"]: cell for cell in part.compute()["rows"]}


@pytest.mark.parametrize("name", list(published()))
def test_a_model_has_as_many_weights_as_its_authors_say(name):
    model = published()[name]
    total, used = model.parameters
    assert model.shape.weights / 1e9 == pytest.approx(total, rel=0.03)
    head = model.shape.vocab * model.shape.hidden
    assert model.shape.used_weights / 1e9 <= 1.01 * used <= 1.05 * (model.shape.used_weights + 2 * head) / 1e9
    assert model.source


@pytest.mark.parametrize(
    ("name", "token_bytes", "fixed_bytes"),
    [
        ("MiniMax-M2.5", 62 * 2 * 8 * 128 * 2, 0),
        ("Qwen3-235B", 94 * 2 * 4 * 128 * 2, 0),
        ("MiMo-V2-Flash", 9 * 4 * 320 * 2, 39 * 8 * 320 * 128 * 2),
        ("Kimi Linear", 7 * 576 * 2, 20 * (32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2)),
        ("Ring-2.5-1T", 10 * 576 * 2, 70 * 64 * 128 * 128 * 4),
        ("Qwen3.5-397B", 15 * 2 * 2 * 256 * 2, 45 * (64 * 128 * 128 * 4 + 3 * 12288 * 2)),
    ],
)
def test_bytes_of_table_3_s_models_by_hand(name, token_bytes, fixed_bytes):
    assert shape(name).cache_bytes(32 * KI) == token_bytes * 32 * KI + fixed_bytes


@pytest.mark.parametrize(
    ("attention", "complaint"),
    [({"kind": "grouped", "heads": 8}, "kv_heads"), ({"kind": "quadratic"}, "quadratic"), ({"heads": 8}, "kind")],
)
def test_a_model_that_is_not_described_in_full_is_refused_in_one_line(attention, complaint):
    layers = [{"count": 1, "attention": attention}]
    with pytest.raises(ConfigError, match=complaint) as refused:
        model_of("one", {"source": "here", "parameters": [1, 1], "hidden": 8, "vocab": 8, "layers": layers})
    assert "\n" not in refused.value.message and refused.value.param == "one"


def test_mimo_s_layers_are_those_of_its_configuration():
    """There a window is of 128 tokens before a token, and itself."""
    served, ours = decoder_of(shape_of("mimo-v2-flash")), shape("MiMo-V2-Flash")
    assert ours.weights == served.weights and ours.used_weights == served.used_weights
    one_more = 39 * 8 * (192 + 128) * 2
    assert served.cache_bytes(8 * KI) - ours.cache_bytes(8 * KI) == one_more


@pytest.mark.parametrize("model", TABLE_3)
def test_seconds_of_table_3_are_plausible(model):
    found = table3_shapes.points(model)
    seconds = [p["seconds"] for p in found]
    assert seconds == sorted(seconds) and 0.33 < seconds[0] < 0.49
    assert all(0.0 < p["share_of_peak"] < 0.5 for p in found)
    assert all(p["curve_s"] == pytest.approx(p["seconds"], rel=0.055) for p in found)


def test_ring_s_seconds_are_a_parabola_only_with_float32_states():
    found = cells(table3_shapes)
    assert found["the same, Ring-2.5-1T"]["ours"] < 0.001
    assert found["the same, Ring-2.5-1T with states of 16 bits"]["ours"] > 0.02


def test_a_curve_of_seconds_knows_more_than_a_line_of_rates():
    found = cells(table3_shapes)
    by_curve = found["median error without a point, by the curve"]["ours"]
    assert by_curve < found["median error without a point, by the line between logarithms of Φ"]["ours"] / 2


def test_what_ring_saves_holds():
    found = {name: cell for name, cell in cells(table3_shapes).items() if name.startswith("Ring-2.5-1T:")}
    assert {cell["verdict"] for cell in found.values()} == {"holds", "not in the paper"}
    assert sum(cell["verdict"] == "holds" for cell in found.values()) == 3


def test_the_roofline_says_that_it_is_assumed_and_misses_table_3():
    found = [cell for name, cell in cells(table3_shapes).items() if "roofline" in name]
    assert len(found) == 24 and all("assumed" in cell["cell"] for cell in found)
    assert sum(cell["verdict"] == "holds" for cell in found) == 1
    assert h200().group == 8


def test_figure_2_rises_and_falls():
    found = fig2.compute()
    rates = found["curve_gbps"]
    assert rates[5] == pytest.approx(60.0, rel=0.05)
    assert rates[0] < rates[3] < rates[5] > rates[7]


def test_windows_save_seven_times_attention_and_bytes_but_not_a_prefill():
    found = cells(mimo_cost)
    for length in (32, 128, 1024):
        assert found[f"MiMo-V2.5-Pro, {length}K: FLOPs of attention"]["verdict"] == "holds"
        assert found[f"MiMo-V2.5-Pro, {length}K: bytes of keys and values"]["verdict"] == "holds"
        assert "does not hold" in found[f"MiMo-V2.5-Pro, {length}K: FLOPs of a prefill"]["verdict"]


def test_mimo_ranks_second_but_for_the_shortest_prompts():
    found = cells(mimo_kv)
    misses = {name for name, cell in found.items() if name.startswith("rank") and cell["verdict"] != "holds"}
    assert misses == {"rank of MiMo-V2.5-Pro among 4, 1K"}


def test_the_throughput_of_a_chunk_falls_with_its_prefix():
    found = mimo_prefix.compute()["relative"]
    for relative in found.values():
        assert relative[0] == 1.0 and relative == sorted(relative, reverse=True)
    assert found["MiMo-V2.5-Pro"][-1] == pytest.approx(0.092, abs=0.001)
    assert mimo_prefix.faster_attention(shape("MiMo-V2.5-Pro"), found["MiMo-V2.5-Pro"][-1]) == pytest.approx(1.0)


def test_stage_level_batches_stall_least():
    gaps = {name: max(hydra_fig7.run(name)["gap_ms"].values()) for name in (*hydra_fig7.STRATEGIES, hydra_fig7.SAME)}
    assert gaps["prefill-first"] > 2 * gaps["decode-first"] > 2 * gaps[hydra_fig7.SAME] > 2 * gaps["stage-level"]


def test_the_page_shows_a_part_s_table(tmp_path):
    results = mimo_kv.compute()
    write_result("prfaas", mimo_kv.TITLE, {}, results, tmp_path / "mimo_kv.json")
    page = write_readme(tmp_path, {"mimo_kv": mimo_kv}).read_text()
    assert "| model | 1K, GB | 32K, GB |" in page and "| MiniMax-M2.5 | 0.26 | 8.321 |" in page


def test_every_part_has_a_title_and_says_whether_it_draws():
    assert all(part.TITLE and part.TEXT and hasattr(part, "draw") == part.HAS_FIGURE for part in PARTS.values())
