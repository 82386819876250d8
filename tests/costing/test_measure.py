"""A tiny model is measured on this machine: within its time, going on where it stopped, in the format others read."""

import os

import pytest

from hydrainfer.config import ServeConfig, Slo, read_cost_model
from hydrainfer.core import ConfigError, Role
from hydrainfer.costing.grid import Grid, pool_for
from hydrainfer.costing.measure import _is_known, _note, measure_model
from hydrainfer.costing.rig import Rig
from hydrainfer.machine import busy_cores
from hydrainfer.planner.costs import BatchShape, read_cost_file, write_cost_file
from hydrainfer.planner.search.budgets import Mix, budgets_for
from hydrainfer.runtime import LanguageRunner
from tests.checkpoints import make_llava
from tests.checkpoints_text import make_text
from tests.memory import watch_caches

pytestmark = pytest.mark.cpu
GRID = Grid(
    sizes=((56, 56), (640, 480)), pictures=(1, 2), chunks=(16, 64), starts=(0, 32), decodes=(1, 4), contexts=(32, 96),
    mixed=(2,), beside=((2, 0), (2, 16)), pictures_beside=(1,),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("measured"), context=512)


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory):
    journal, said = tmp_path_factory.mktemp("journal") / "j.jsonl", []
    config = ServeConfig(model=str(checkpoint), threads=1, native_kernels=False)
    file = measure_model(
        str(checkpoint), minutes=0.1, journal=journal, config=config, grid=GRID, transports=(),
        on_progress=lambda share, what: said.append((share, what)),
    )  # fmt: skip
    return file, journal, said, config


def test_every_case_has_samples(measured):
    file, _, said, _ = measured
    alone = {p.work for p in file.points if p.beside is None}
    assert {w.pictures for w in alone if w.is_vision} == {1, 2} and {w.tokens for w in alone if w.is_vision} == {16}
    assert {(w.chunk, w.start) for w in alone if w.chunk and not w.decodes} == {(16, 0), (16, 32), (64, 0), (64, 32)}
    assert {(w.decodes, w.context) for w in alone if not w.chunk and w.decodes} >= {(1, 32), (4, 96)}
    beside = [p for p in file.points if p.beside is not None]
    assert len(beside) == 4 and all(0 < p.min_s <= p.p50_s <= p.p90_s for p in file.points)
    assert said[0] == (0.0, "loading the model") and said[-1] == (1.0, "done")
    assert file.threads == 1 and file.dtype == "float32" and file.versions["torch"] and file.hardware["cores"] >= 1


def test_the_cost_model_can_be_used(measured, tmp_path):
    file = measured[0]
    assert file.cost.step_base_s > 0 and file.errors["decode"]["n"] >= 4
    write_cost_file(tmp_path / "m.yaml", file)
    assert read_cost_model(tmp_path / "m.yaml") == file.cost == read_cost_file(tmp_path / "m.yaml").cost
    budgets = budgets_for(file, Role.parse("EPD"), Slo(tpot_s=1.0), Mix(decodes=2, context=96, prompt=64, picture=16))
    assert budgets.tokens - 2 in (16, 64) and budgets.images in (1, 2) and budgets.running in (1, 2, 4)


def test_a_stage_that_was_not_reached_is_said(checkpoint, measured):
    """It would cost nothing in a plan."""
    with pytest.raises(ConfigError, match="too few to measure encode and prefill even once"):
        measure_model(str(checkpoint), minutes=1e-6, config=measured[3], grid=GRID, transports=())


def test_a_measurement_goes_on_where_it_was_interrupted(measured, checkpoint):
    file, journal, _, config = measured
    lines = journal.read_bytes()
    journal.write_bytes(lines + b'{"work": {"chu')  # killed while it wrote
    before = {(p.work, p.beside): p.n for p in file.points}
    again = measure_model(str(checkpoint), minutes=0.001, journal=journal, config=config, grid=GRID, transports=())
    assert len(again.points) == len(file.points) and all(p.n >= before[p.work, p.beside] for p in again.points)


def test_a_journal_of_another_measurement_is_refused(measured, checkpoint):
    journal = measured[1]
    other = ServeConfig(model=str(checkpoint), threads=1, dtype="bfloat16", native_kernels=False)
    with pytest.raises(ConfigError, match=r"in float32 with 1 threads, not of .* in bfloat16"):
        measure_model(str(checkpoint), minutes=0.001, journal=journal, config=other, grid=GRID, transports=())


def test_no_time_is_no_measurement(checkpoint):
    with pytest.raises(ConfigError, match="must be positive"):
        measure_model(str(checkpoint), minutes=0.0)


@pytest.mark.multi
def test_copies_between_processes():
    from hydrainfer.cache import FullSpec
    from hydrainfer.costing.copies import measure_copies

    spec = FullSpec.of(layers=2, kv_heads=2, head_dim=32, dtype="float32")
    copies = measure_copies([spec], ["shared-memory"], "cpu", 2.0)
    assert [c.n_bytes for c in copies] == sorted(c.n_bytes for c in copies) and all(c.p50_s > 0 for c in copies)


def test_a_busy_machine_is_noted():
    assert 0.0 <= busy_cores(0.1) <= (os.cpu_count() or 1) + 0.5  # counted in hundredths of a second
    assert _note(0.0) == ""
    assert "NOT quiet: 9.0 of" in _note(9.0)


def test_a_model_with_states_is_measured(tmp_path):
    """Few blocks of those, whatever the context."""
    config = ServeConfig(model=str(make_text(tmp_path, "lfm2")), threads=1, native_kernels=False)
    works = (
        BatchShape(chunk=64),
        BatchShape(chunk=70, start=32, decodes=2, context=40),
        BatchShape(decodes=5, context=500),
        BatchShape(decodes=5, context=511),
    )
    rig = Rig(config, [], 0, works)
    assert {spec.name: n for spec, n in pool_for(works, rig.kv).items()} == {"state": 5 * 3, "kv": 5 * 32}
    for work in works:
        assert rig.run(work) > 0
    rig.close()


def test_decodes_ahead_continue_what_the_batch_before_samples(checkpoint, monkeypatch):
    config = ServeConfig(model=str(checkpoint), threads=1, native_kernels=False)
    decodes, packed = BatchShape(decodes=3, context=40), []
    rig = Rig(config, [(56, 56)], 1, [decodes])
    forward = LanguageRunner._forward
    monkeypatch.setattr(LanguageRunner, "_forward", lambda self, p, *more: packed.append(p) or forward(self, p, *more))
    try:
        assert rig.run(decodes) > 0 and packed[-1].follows is None
        assert len(rig.run_ahead(decodes, 0.0, 4)) >= 4
        assert packed[-1].follows.tolist() == [0, 1, 2] and packed[-1].positions.tolist() == [40] * 3
        assert not rig.device_times(decodes, 3), "a CPU has no streams"
    finally:
        rig.close()


def test_a_closed_rig_has_freed_its_caches(checkpoint, monkeypatch):
    n_caches = watch_caches(monkeypatch)
    config = ServeConfig(model=str(checkpoint), threads=1, native_kernels=False)
    rig = Rig(config, [(56, 56)], 1, [BatchShape(decodes=3, context=40)])
    rig.run(BatchShape(pictures=1, tokens=rig.picture_tokens[0]))
    assert n_caches() == 2
    rig.close()
    assert n_caches() == 0


@pytest.mark.parametrize(
    ("seconds", "known"),
    [
        ([1.0] * 9, False),
        ([1.0, 1.02] * 6, True),
        ([1.0, 1.5] * 6, False),
        ([1.0, 1.5] * 20, True),
        ([], False),
    ],
)
def test_a_case_is_known_by_its_scatter(seconds, known):
    assert _is_known(seconds) is known
