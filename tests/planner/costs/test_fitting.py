"""A cost model that made the measurements is found again, also through noise; files keep what was measured."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hydrainfer.config import Slo, read_cost_model
from hydrainfer.core import ConfigError, CostModel, Role
from hydrainfer.planner.costs.costfile import (
    BatchShape,
    BatchTime,
    Copies,
    CostFile,
    link_of,
    read_cost_file,
    write_cost_file,
)
from hydrainfer.planner.costs.fitting import fit_cost, non_negative, predicted_s
from hydrainfer.planner.costs.shape import slowdown_of
from hydrainfer.planner.search.budgets import Mix, budgets_for

pytestmark = pytest.mark.unit
SHIPPED = Path(__file__).parents[3] / "configs" / "cost_models"
GPU = CostModel(
    encode_base_s=0.7e-3, encode_image_s=0.0, encode_token_s=1.7e-6, step_base_s=1.5e-3, prefill_token_s=2.55e-5,
    prefill_attention_s=5e-10, decode_token_s=2.7e-5, decode_context_s=1e-9, weights_s=5.6e-3, context_s=2.2e-7,
    overlap_slowdown=2.5, prefill_overlap_slowdown=5.0,
)  # fmt: skip
CPU = CostModel(
    encode_base_s=1e-3, encode_image_s=0.0, encode_token_s=6e-4, step_base_s=0.02, prefill_token_s=1e-3,
    prefill_attention_s=1.4e-7, decode_token_s=8e-4, decode_context_s=7e-7, overlap_slowdown=1000.0,
)  # fmt: skip
WORKS = [
    *(BatchShape(pictures=n, tokens=t) for n in (1, 2, 4, 8) for t in (144, 576, 1500)),
    *(BatchShape(decodes=n, context=c) for n in (1, 4, 16, 64) for c in (64, 512, 2048)),
    *(BatchShape(chunk=c, start=s) for c in (16, 128, 512, 2048) for s in (0, 1024)),
    *(BatchShape(chunk=c, decodes=16, context=512) for c in (64, 512, 1024)),
]


def measured(cost, noise=0.0, seed=0):
    draw = random.Random(seed)

    def point(work, beside=None, times=1.0):
        p50 = predicted_s(cost, work) * times * (1 + draw.uniform(-noise, noise))
        return BatchTime(work=work, beside=beside, n=5, min_s=0.9 * p50, p50_s=p50, p90_s=1.2 * p50)

    points = [point(w) for w in WORKS]
    for language, slowdown in ((WORKS[12], cost.overlap_slowdown), (WORKS[25], cost.prefill_overlap_slowdown)):
        both = 2.0 / (1.0 + 1.0 / (slowdown or cost.overlap_slowdown))  # slowed alike
        points += [point(WORKS[1], language, both), point(language, WORKS[1], both)]
    return points


@pytest.mark.parametrize("cost", [GPU, CPU], ids=["roofline", "linear"])
def test_fitting_finds_the_cost_model_that_made_the_times(cost):
    fitted = fit_cost(measured(cost))
    for work in WORKS:
        assert predicted_s(fitted.cost, work) == pytest.approx(predicted_s(cost, work), rel=0.02)
    assert fitted.cost.overlap_slowdown == pytest.approx(cost.overlap_slowdown, rel=0.05)
    assert all(e["median"] < 0.02 for e in fitted.errors.values()) and set(fitted.errors) == {
        "encode", "prefill", "decode", "mixed"
    }  # fmt: skip


def test_a_device_bound_by_memory_gets_a_roofline():
    assert fit_cost(measured(GPU)).cost.context_s == pytest.approx(GPU.context_s, rel=0.05)
    assert fit_cost(measured(CPU)).cost.weights_s == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_through_noise(seed):
    fitted = fit_cost(measured(GPU, noise=0.1, seed=seed))
    for work in WORKS:
        assert predicted_s(fitted.cost, work) == pytest.approx(predicted_s(GPU, work), rel=0.2)
    assert all(0.0 < e["median"] < 0.15 for e in fitted.errors.values())  # held-out errors tell of the noise


def test_the_fastest_runs_count_where_the_machine_was_loaded():
    medians, fastest = (fit_cost(measured(CPU), of).cost for of in ("p50_s", "min_s"))
    assert fastest.step_base_s == pytest.approx(0.9 * medians.step_base_s, rel=0.01)


def test_nothing_is_negative():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, x = rng.random((30, 4)), rng.random(4) * (rng.random(4) < 0.5)
        assert non_negative(rows, rows @ x) == pytest.approx(x, abs=1e-6)
        assert (non_negative(rows, rng.normal(size=30)) >= 0).all()


def test_slowdowns_of_joint_speeds():
    assert slowdown_of(2.0) == 1.0 and slowdown_of(1.5) == 2.0 and slowdown_of(1.0) == slowdown_of(0.7) == 1000.0


def test_nothing_measured():
    with pytest.raises(ConfigError, match="nothing was measured"):
        fit_cost([])


def test_a_file_comes_back_and_serves_as_a_cost_model(tmp_path):
    fitted, path = fit_cost(measured(GPU, noise=0.1)), tmp_path / "deep" / "m.yaml"
    copies = tuple(
        Copies(transport=t, n_bytes=n, n=9, p50_s=1e-4 + n / rate, p90_s=1.0)
        for t, rate in (("tcp", 1e9), ("shared-memory", 4e9)) for n in (1 << 16, 1 << 24)
    )  # fmt: skip
    file = CostFile(
        kind="measured", model="m", device="cpu", dtype="float32", threads=2, date="2026",
        hardware={"cpu": "x", "cores": 2}, versions={"torch": "2"}, cost=fitted.cost, errors=fitted.errors,
        points=tuple(measured(GPU)), copies=copies,
    )  # fmt: skip
    write_cost_file(path, file, "line one\nline two")
    assert path.read_text().startswith("# line one\n# line two\nkind: measured\n")
    assert read_cost_file(path) == file and read_cost_model(path) == file.cost
    assert file.link().bytes_per_s == pytest.approx(4e9, rel=0.01)
    assert link_of(copies[:2]).latency_s == pytest.approx(1e-4, rel=0.01)
    with pytest.raises(ConfigError, match="no copies between instances"):
        msgspec.structs.replace(file, copies=()).link()


def test_another_file_is_refused(tmp_path):
    (tmp_path / "m.yaml").write_text("kind: measured\nmodel: 3\n")
    with pytest.raises(ConfigError, match="not a measurement"):
        read_cost_file(tmp_path / "m.yaml")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_measurements_we_ship_can_be_used(path):
    file = read_cost_file(path)
    assert read_cost_model(path) == file.cost and file.date and file.hardware["cpu"] and file.versions["torch"]
    again = fit_cost(file.points, "min_s" if "NOT quiet" in file.note else "p50_s")
    # least squares, whose last bits depend on the processor
    assert msgspec.structs.asdict(again.cost) == pytest.approx(msgspec.structs.asdict(file.cost), rel=1e-6)
    assert again.errors.keys() == file.errors.keys()
    for stage, errors in again.errors.items():
        assert errors == pytest.approx(file.errors[stage], abs=1e-3)
    for role in ("EP", "EPD"):
        budgets = budgets_for(
            file, Role.parse(role), Slo(ttft_s=1.0, tpot_s=0.1), Mix(picture=64, context=200, prompt=80)
        )
        assert budgets.tokens >= 16 and budgets.images >= 1
