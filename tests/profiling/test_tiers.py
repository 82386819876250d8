"""Host memory and a store in the question to `hydrainfer profile`, and in its answer."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from hydrainfer.cache import BlockName
from hydrainfer.config import read_layout
from hydrainfer.core import ConfigError
from hydrainfer.profiling import live
from hydrainfer.profiling.answer import answer, winners_file
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.profiling.question import prepare
from hydrainfer.profiling.tiers import tiers_of
from hydrainfer.reports.plan.tables import conclusions
from hydrainfer.stores import Root, open_places, parse_places, tools_of

pytestmark = pytest.mark.cpu
COSTS = Path("configs/cost_models/builtin-cpu.yaml")
GIB = 1 << 30
ASKED = ProfileQuestion(
    model="builtin", devices=1, cost_model=COSTS, workload="textcaps", slo="ttft=1,tpot=0.1", requests=120
)
TALKS = """
dataset: talks
n_pictures: 0
words: 20
output_tokens: {default: 8}
dialogues: {turns: 4, apart_s: 60}
"""


def never(*_):
    raise AssertionError("nothing is to be measured here")


def asked(**changes):
    return prepare(msgspec.structs.replace(ASKED, **changes), never)


def planned(**changes):
    return tiers_of(msgspec.structs.replace(ASKED, **changes))


@pytest.fixture
def talks(tmp_path):
    """A workload for a model with a short context."""
    path = tmp_path / "talks.yaml"
    path.write_text(TALKS)
    return str(path)


def answered(**changes):
    question = asked(objective="ttft", rate=2.0, **changes)
    plan, study = answer(question, n_processes=1, on_progress=lambda *_: None, command="")
    return question, plan, study


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    tiers = planned(store=f"dir:{tmp_path}/new?gib=3")
    assert not (tmp_path / "new").exists()
    assert tiers.store.n_bytes == 3 * GIB and tiers.store.read_bytes_per_s == 1.5e9
    assert "ASSUMED" in tiers.notes[0] and "--store-gib-per-s" in tiers.notes[0]


def test_a_folder_that_is_there_is_measured_and_keeps_what_it_has(tmp_path):
    """Also blocks beyond the limit that is planned for."""
    (place,) = parse_places(f"dir:{tmp_path}/a?gib=1")
    block = bytes(4 << 20)
    names = [BlockName(bytes([i]) * 16, "kv", i, group=bytes(16)) for i in range(8)]
    with closing(open_places([place], Root(b"r" * 16, {}))) as store:
        store.write(names, [memoryview(block)] * len(names))
        before = tools_of(place).summary()
        tiers = planned(store=f"dir:{tmp_path}/a?gib=0.01")
        assert all(store.has(names))
    after = tools_of(place).summary()
    assert [row[:4] for row in after] == [row[:4] for row in before]
    assert tiers.store.n_bytes == int(0.01 * GIB) and "measured here" in tiers.notes[0]


def test_a_rate_that_is_given_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("hydrainfer.profiling.tiers.try_places", never)
    tiers = planned(store=f"dir:{tmp_path}?gib=2,dir:{tmp_path}/b?gib=3", store_gib_per_s=0.25)
    assert tiers.store.read_bytes_per_s == tiers.store.write_bytes_per_s == 0.25 * GIB
    assert tiers.store.n_bytes == 5 * GIB
    assert planned(store="redis://host", store_gib_per_s=4.0).store.n_bytes == float("inf")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: no folder"):
        planned(store=f"dir:{tmp_path}/file")


def test_a_server_that_is_away_is_assumed():
    pytest.importorskip("redis")
    assert "ASSUMED" in planned(store="redis://127.0.0.1:1?timeout_ms=100").notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store": "/tmp/x"}, "a place of the store begins with dir:"),
        ({"store": "dir:/x?gib=much"}, "gib must be a positive number"),
        ({"store": "redis://user:secret@host"}, "must not hold a user or a password"),
        ({"store_gib_per_s": 1.0}, "--store-gib-per-s is for a --store"),
        ({"store": "dir:/x", "store_gib_per_s": 0.0}, "--store-gib-per-s is a positive rate, not 0"),
        ({"store": "dir:/x", "store_gib_per_s": float("nan")}, "--store-gib-per-s is a positive rate"),
        ({"host_cache_gib": -1.0}, "--host-cache-gib is an amount of 0 or more"),
        ({"host_cache_gib": float("inf")}, "--host-cache-gib is an amount"),
        ({"host_cache_gib": 1e6}, "--host-cache-gib 1e\\+06 for each of 1 instances is more than .* has"),
        ({"store": "dir:/x", "engine": "vllm"}, "planned for hydrainfer alone"),
    ],
)
def test_tiers_that_cannot_be_planned_are_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as e:
        asked(**changes)
    assert "\n" not in e.value.message and "secret" not in e.value.message


def test_a_plan_says_what_the_tiers_contribute_and_its_file_serves_with_them(tmp_path, talks):
    text = f"dir:{tmp_path}/store?gib=5"
    question, plan, study = answered(workload=talks, store=text, store_gib_per_s=8.0, host_cache_gib=0.125)
    assert (plan.store, plan.host_cache_gib, len(plan.tiers)) == (text, 0.125, 3)
    (sentence,) = (line for line in conclusions(plan) if "finds of the prompts' tokens" in line)
    assert "with 0.125 GiB of host memory each" in sentence and "with the store as well" in sentence
    assert any("read at 8 GiB/s by an instance, as --store-gib-per-s says" in note for note in plan.notes)
    assert any("turns came back too soon: repeat it with --requests" in note for note in plan.notes)
    path = tmp_path / "layout.yaml"
    path.write_text(winners_file(plan, study, question))
    (instance,) = read_layout(str(path))
    assert instance.own["store"] == text and instance.own["host_cache_gib"] == 0.125
    assert not (tmp_path / "store").exists()


def test_a_plan_without_tiers_says_nothing_of_them(talks):
    _, plan, _ = answered(workload=talks)
    assert plan.tiers == () and not any("finds of the prompts' tokens" in line for line in conclusions(plan))


def test_a_workload_that_never_comes_back_is_noted():
    _, plan, _ = answered(host_cache_gib=0.125)
    assert any("No two requests of textcaps begin alike" in note for note in plan.notes)


def test_a_validation_would_fill_the_store():
    with pytest.raises(ConfigError, match="--validate would fill the store"):
        live.check_live(asked(store="dir:/nowhere", store_gib_per_s=1.0))
