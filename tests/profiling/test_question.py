"""From what was typed to a plan: what is refused and how, objectives, and the layout's file."""

import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance

import msgspec
import pytest
from typer.testing import CliRunner

from hydrainfer.builtin import MODEL
from hydrainfer.cache import TOKENS_PER_RUNNING, tokens_in
from hydrainfer.cli import app
from hydrainfer.config import read_layout
from hydrainfer.core import ConfigError, Layout
from hydrainfer.planner.costs import read_cost_file
from hydrainfer.planner.inputs import shape_of
from hydrainfer.planner.search import LayoutPlan, layout_file
from hydrainfer.profiling.answer import answer, winners_file
from hydrainfer.profiling.options import Profile, ProfileQuestion, check_flags
from hydrainfer.profiling.question import prepare
from hydrainfer.reports.plan.page import plan_page
from hydrainfer.reports.plan.tables import conclusions
from hydrainfer.workload.sources import ChatRequest, Recording, write_recording

pytestmark = pytest.mark.cpu
FAST = Path("configs/costs/fast.yaml")
ASKED = ProfileQuestion(
    model="llava-1.5-7b", devices=2, hardware="h800", workload="textcaps", slo="ttft=0.3,tpot=0.04", requests=80
)

BUILTIN = {"model": "builtin", "hardware": None, "cost_model": Path("configs/cost_models/builtin-cpu.yaml")}


def never(model, n_threads):
    raise AssertionError("nothing is to be measured here")


def asked(**changes):
    return prepare(msgspec.structs.replace(ASKED, **changes), never)


def answered(**changes):
    question = asked(**changes)
    plan, study = answer(question, n_processes=1, on_progress=lambda *_: None, command="hydrainfer profile …")
    return question, plan, study


@pytest.fixture(scope="module")
def plan():
    return answered()


def test_every_layout_is_ranked_and_explained(plan):
    _, plan, _ = plan
    assert {row.layout for row in plan.layouts} == {"2EPD", "1EP1D", "1ED1P", "1E1PD"}
    goodputs = [row.goodput or 0.0 for row in plan.layouts]
    assert goodputs == sorted(goodputs, reverse=True) and goodputs[0] > 1.0
    for row in plan.layouts:
        assert row.limited_by and row.stage in ("encode", "prefill", "decode")
        assert row.goodput_high is not None
        if row.goodput is not None:
            assert row.goodput_low <= row.goodput <= row.goodput_high
    assert plan.best.ttft_p90 <= 0.3


def test_json_holds_what_is_promised(plan):
    _, plan, _ = plan
    rows = msgspec.json.decode(msgspec.json.encode(plan))["layouts"]
    promised = {"layout", "goodput", "goodput_low", "goodput_high", "ttft_p90", "tpot_p90", "limited_by"}
    assert promised <= rows[0].keys()
    assert msgspec.json.decode(msgspec.json.encode(plan), type=LayoutPlan) == plan


def test_the_same_question_has_the_same_answer(plan):
    assert answered()[1].layouts == plan[1].layouts


def test_the_winner_s_file_is_a_layout(plan, tmp_path):
    question, plan, study = plan
    path = tmp_path / "layout.yaml"
    path.write_text(winners_file(plan, study, question))
    specs = read_layout(str(path))
    assert len(specs) == 2
    of_layout = study.budgets(Layout(tuple(spec.role for spec in specs)))
    for spec in specs:
        budgets = of_layout[str(spec.role)]
        assert spec.own["max_running"] == budgets.running
        assert spec.own.get("token_budget", budgets.tokens) == budgets.tokens


def test_fewest_devices():
    _, plan, _ = answered(devices=4, objective="devices", rate=answered(devices=1)[1].best.goodput * 1.5)
    assert plan.devices == 2 and plan.best is not None and len(plan.best.layout) > 3


def test_more_than_there_is():
    _, plan, _ = answered(objective="devices", rate=1e4)
    assert plan.best is None and "more than 2 devices carry" in plan.notes[0]


@pytest.mark.parametrize("by", ["ttft", "tpot"])
def test_least_latency_at_a_rate(by):
    _, plan, _ = answered(objective=by, rate=5.0)
    seconds = [getattr(row, f"{by}_p90") for row in plan.layouts if row.goodput]
    assert len(seconds) > 1 and seconds == sorted(seconds)
    assert len(asked(objective=by, rate=5.0).inputs.more) == 6 * ASKED.requests, "for longer runs at that rate"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": 0}, "0 devices cannot serve anything"),
        ({"hardware": "h8000"}, "no hardware called 'h8000'.*h800"),
        ({"model": "llava-2"}, "no model 'llava-2'.*llava-1.5-7b"),
        ({"workload": "nothing"}, "no workloads called 'nothing'.*textcaps"),
        ({"hardware": None}, "without weights.*--hardware h800"),
        ({"slo": "ttft=-1"}, "must be a positive time"),
        ({"slo": "ttft=soon"}, "cannot read the objective"),
        ({"slo": "", "workload": "text"}, "give the SLO, for example --slo"),
        ({"objective": "devices"}, "needs a --rate"),
        ({"target": 1.5}, "--target"),
        ({"drafts": "ngram"}, "--drafts is off or right=SHARE"),
        ({"drafts": "right=2"}, "right= takes a share from 0 to 1"),
        ({"drafts": "right=0.5", "max_drafts": 64}, "--max-drafts is at most 63"),
        ({"drafts": "right=0.5", "engine": "vllm"}, "--drafts are planned for hydrainfer"),
        ({"cost_model": Path("configs/cost_models/builtin-cpu.yaml")}, "not both"),
        ({"cost_model": Path("nowhere.yaml"), "hardware": None}, "nowhere.yaml"),
        ({"tensor_parallel": 3}, "2 devices are no groups of 3"),
        ({"tensor_parallel": 2, "hardware": None}, "--tensor-parallel is for a described device"),
        ({"weights": "int3"}, "no weights 'int3'; there are as-dtype, fp8, int8, int4"),
        ({"weights": "int8", "hardware": None}, "--weights is for a described device"),
        ({"quantization": "int8"}, "--quantization int8 is for CPUs, not for h800"),
        ({"quantization": "int8", "weights": "int8"}, "both say how weights are stored"),
        ({**BUILTIN, "quantization": "int8"}, "measured with --quantization none, not int8"),
        ({"price": "cheap"}, "--price is what a device costs for an hour"),
        ({"price": "h100=2"}, "--price is .* h800=2.5 for each kind"),
        ({"hardware": "h20:1,h800"}, "written as h20:4,h800:4"),
        ({"hardware": "h20:4,h800:4"}, "has 8 devices, but --devices is 2"),
        ({"hardware": "h20:1,h20:1"}, "names a device twice"),
        ({"arrivals": "often"}, "no arrivals 'often': one of poisson, constant, gamma"),
        ({"burst_shape": 0.5}, "--burst-shape is for --arrivals gamma"),
        ({"hardware": None, "cost_model": Path("configs/cost_models/builtin-cpu.yaml")}, "measured with shapes-and"),
    ],
)
def test_questions_that_cannot_be_planned_are_refused_in_one_line(changes, said):
    with pytest.raises(ConfigError, match=said) as e:
        asked(**changes)
    assert "\n" not in e.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hardware": "h800", "save_cost_model": FAST}, "--save-cost-model .* with --hardware nothing is measured"),
        ({"hardware": "h800", "measure_minutes": 3.0}, "--measure-minutes .* with --hardware nothing is measured"),
        ({"cost_model": FAST, "measure_minutes": 3.0}, "--measure-minutes .* with --cost-model nothing is measured"),
        ({"objective": "ttft", "rate": 1.0, "exhaustive": True}, "--exhaustive is for --objective goodput"),
        ({"rate": 1.0}, "--rate is for the objectives devices, ttft and tpot"),
        ({"grid": True}, "--grid is for the page and the JSON"),
        ({"measure_minutes": 1.0, "save_cost_model": FAST}, None),
        ({"hardware": "h800", "exhaustive": True}, None),
        ({"grid": True, "json": True}, None),
        ({"objective": "tpot", "rate": 1.0}, None),
    ],
)
def test_flags_without_effect_are_refused(changes, said):
    q = Profile(model="llava-1.5-7b", devices=2, **changes)
    if said is None:
        check_flags(q)
        return
    with pytest.raises(ConfigError, match=said) as e:
        check_flags(q)
    assert "\n" not in e.value.message


def test_a_folder_that_cannot_be_is_refused_before_anything_is_planned(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "plan"):
        with pytest.raises(ConfigError, match="file is a file, not a folder"):
            check_flags(Profile(model="llava-1.5-7b", devices=2, out=out))
    check_flags(Profile(model="llava-1.5-7b", devices=2, out=tmp_path / "new" / "plan"))
    assert (tmp_path / "new" / "plan").is_dir()
    with pytest.raises(ConfigError, match="--out /proc/x: cannot be made: "):
        check_flags(Profile(model="llava-1.5-7b", devices=2, out=Path("/proc/x")))


def test_weights_in_8_bits_are_measured_counted_and_served():
    question = msgspec.structs.replace(ASKED, model="builtin", hardware=None)
    wide = read_cost_file(BUILTIN["cost_model"])
    narrow = prepare(
        msgspec.structs.replace(question, quantization="int8"),
        lambda *_: msgspec.structs.replace(wide, quantization="int8"),
    )
    assert narrow.flags == [
        *("--device", "cpu", "--dtype", "float32", "--quantization", "int8", "--slo", "ttft=0.3,tpot=0.04")
    ]
    assert narrow.inputs.shape.step_bytes == prepare(question, lambda *_: wide).inputs.shape.step_bytes / 4


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("ttft=0.01", "TTFT ≤ 10 ms is impossible: without any load .* ms is the best .* most of it in prefill"),
        ("tpot=0.001", "TPOT ≤ 1 ms is impossible: .* most of it in decode"),
    ],
)
def test_an_impossible_slo_names_the_stage_and_the_best(slo, said):
    _, plan, _ = answered(slo=slo)
    assert plan.layouts == () and plan.best is None and re.match(said, plan.impossible)
    assert conclusions(plan)[0].startswith(f"Nothing meets the SLO ({plan.slo}, for 90 % of the requests): ")
    assert re.search(said, conclusions(plan)[0]) and plan_page(plan)


def test_a_short_recording_is_planned_with_all_it_has(tmp_path):
    chats = tuple(ChatRequest(text="why?", max_tokens=4) for _ in range(39))
    write_recording(tmp_path / "r.jsonl", Recording(dataset="d", chats=chats))
    short = {"model": "builtin", "devices": 1, "hardware": None, "cost_model": FAST, "workload": f"{tmp_path}/r.jsonl"}
    question, plan, _ = answered(**short, requests=None)
    assert len(question.inputs.trace) == plan.requests == 39
    assert "Planned with all 39 requests that the workload has" in " ".join(plan.notes)
    assert not any("Planned with all" in note for note in answered(**short, requests=20)[1].notes)
    with pytest.raises(ConfigError, match=r"r\.jsonl has 39 requests, 40 are needed; record more"):
        asked(**short, requests=40)
    assert len(asked(requests=None).inputs.trace) == 1000


def test_nothing_that_meets_the_slo_is_an_answer_too():
    question = ["builtin", "--devices", "1", "--cost-model", str(FAST), "--requests", "20", "--slo", "ttft=1e-6"]
    result = CliRunner().invoke(app, ["profile", *question, "--json"])
    assert result.exit_code == 1
    plan = msgspec.json.decode(result.stdout, type=LayoutPlan)
    assert plan.layouts == () and "TTFT ≤ 0.001 ms is impossible" in plan.impossible
    assert "Nothing meets the SLO" in result.stderr and "layout" not in result.stderr


def test_a_model_that_does_not_fit(tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text(Path("configs/hardware/h800.yaml").read_text().replace("85.0e9", "12.0e9"))
    with pytest.raises(ConfigError, match="does not fit small"):
        answered(hardware=str(small))


def test_roles_that_do_not_fit_are_left_out(tmp_path):
    """14 GB of language weights and 0.6 GB of the tower's: an EPD needs both."""
    small = tmp_path / "small.yaml"
    small.write_text(Path("configs/hardware/h800.yaml").read_text().replace("85.0e9", "18.4e9"))
    question = asked(hardware=str(small), devices=3)
    study = question.inputs.study()
    assert "EPD" not in study.stations and "D" in study.stations
    assert all("EPD" not in str(layout) for layout in question.inputs.candidates(study))


def test_fewest_devices_of_a_model_that_one_cannot_hold(tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text(Path("configs/hardware/h800.yaml").read_text().replace("85.0e9", "18.4e9"))
    _, plan, _ = answered(hardware=str(small), devices=3, objective="devices", rate=0.5, slo="ttft=2,tpot=0.2")
    assert plan.devices > 1 and plan.best is not None


def test_a_grid_needs_both_limits_before_anything_is_searched():
    question = asked(slo="ttft=0.3")
    with pytest.raises(ConfigError, match="--grid needs limits for both"):
        answer(question, on_progress=never, command="", grid=True)


def test_text_needs_no_encoder():
    question = asked(workload="text", slo="ttft=0.3,tpot=0.04")
    names = {str(role) for layout in question.inputs.candidates(question.inputs.study()) for role in layout.instances}
    assert "E" not in names and "ED" not in names and "EPD" in names


def test_emulated_devices_share_the_memory_of_this_machine():
    question = asked(model=str(MODEL), hardware=None, cost_model=FAST, devices=8)
    assert question.devices.kind == "emulated" and question.devices.threads is None
    assert question.inputs.study().overlap == "free"


def test_without_a_description_this_machine_is_measured(monkeypatch):
    from hydrainfer.planner.costs import read_cost_file

    wanted = []

    def measure(model, n_threads):
        wanted.append((model, n_threads))
        return read_cost_file(Path("configs/cost_models/builtin-cpu.yaml"))

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    question = prepare(msgspec.structs.replace(ASKED, model=str(MODEL), hardware=None), measure)
    assert wanted == [(str(MODEL), 2)]
    assert question.devices.kind == "cpu" and question.inputs.study().overlap == "slice"
    assert "overlap: slice" in layout_file(Layout.parse("1EPD"), question.inputs.study())


def test_another_type_than_was_measured_is_refused():
    question = msgspec.structs.replace(ASKED, **BUILTIN, dtype="bfloat16")
    with pytest.raises(ConfigError, match="was measured in float32, not in bfloat16"):
        prepare(question, never)


def test_plans_for_another_engine_cannot_be_served():
    assert asked(engine="hydrainfer").servable and not asked(engine="vllm").servable


def test_the_caches_of_a_cpu_are_as_large_as_a_server_of_the_plan_makes_them():
    """Which has some tokens for each request that may run, and room for the longest."""
    strict, loose = (asked(**BUILTIN, slo=f"ttft=2,tpot={tpot}").inputs.study().stations["PD"] for tpot in (0.004, 0.5))
    assert strict.budgets.running < loose.budgets.running
    for station in (strict, loose):
        n_context = shape_of("builtin").context
        n_tokens = max(station.budgets.running * TOKENS_PER_RUNNING, n_context)
        assert tokens_in(station.blocks) == -(-n_tokens // 16) * 16


def test_instances_that_share_cores_are_noted(monkeypatch):
    costs = Path("configs/cost_models/builtin-cpu.yaml")
    some = {"model": str(MODEL), "hardware": None, "cost_model": costs, "slo": "ttft=1,tpot=0.1", "requests": 20}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert not any("wait for each other" in note for note in answered(**some, devices=1)[1].notes)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    (note,) = (note for note in answered(**some, devices=2)[1].notes if "wait for each other" in note)
    assert re.search(r"2 instances of (\d) measured threads need \d cores; this machine has 1", note)


def at_a_rate(**changes):
    return answered(objective="ttft", rate=5.0, **changes)


def test_prices_and_power():
    _, plan, _ = at_a_rate(price="2.5")
    best = plan.best
    assert best.goodput == 5.0 and plan.price == 5.0 and plan.watts == 1400.0
    assert [(p.device, p.n, p.per_hour) for p in plan.prices] == [("h800", 2, 2.5)]
    assert best.request_cost == pytest.approx(5.0 / 3600 / 5.0)
    assert best.million_cost == pytest.approx(best.request_cost / plan.workload["output_mean"] * 1e6)
    assert best.request_wh == pytest.approx(1400.0 / 3600 / 5.0)


def test_unlike_devices():
    question, plan, study = at_a_rate(hardware="h20:1,h800:1", price="h20=1,h800=3")
    names = {row.layout for row in plan.layouts}
    assert len(names) == 7 and {"1EPD@h20+1EPD@h800", "1E@h20+1PD@h800", "1E@h800+1PD@h20"} <= names
    assert plan.hardware == "1 h20 + 1 h800" and plan.price == 4.0 and plan.watts == 1100.0
    assert [(p.device, p.n, p.per_hour) for p in plan.prices] == [("h20", 1, 1.0), ("h800", 1, 3.0)]
    assert plan.best is not None and winners_file(plan, study, question) is None
    assert any("there is no layout.yaml" in note for note in plan.notes)
    assert all("@" in u.role for u in plan.use)


def test_groups_of_devices():
    question, plan, study = at_a_rate(devices=4, tensor_parallel=2, price="2.5")
    assert plan.hardware == "2 x TP2 of h800" and plan.price == 10.0 and plan.watts == 2800.0
    assert [(p.device, p.n, p.per_hour) for p in plan.prices] == [("h800", 4, 2.5)]
    assert plan.best is not None and winners_file(plan, study, question) is None


def test_fewest_devices_are_counted_in_groups():
    _, plan, _ = answered(devices=8, tensor_parallel=2, objective="devices", rate=1.0)
    assert (plan.devices, plan.hardware) == (2, "1 x TP2 of h800") and plan.best.layout == "1EPD"
    assert conclusions(plan)[0].startswith("2 devices carry 1 requests/s within the SLO: as 1EPD")


def test_bursts():
    """The squared coefficient of variation of gamma's gaps is 1 / shape."""
    for shape, low, high in ((None, 1.2, 4.0), (0.2, 2.5, 10.0)):
        at_s = [t.arrival_s for t in asked(arrivals="gamma", burst_shape=shape, requests=400).inputs.trace]
        gaps = [b - a for a, b in pairwise(at_s)]
        assert low < pvariance(gaps) / fmean(gaps) ** 2 < high


def test_the_model_that_ships_has_a_short_name():
    costs = Path("configs/cost_models/builtin-cpu.yaml")
    some = {"hardware": None, "cost_model": costs, "slo": "ttft=1,tpot=0.1", "requests": 20}
    assert asked(model="builtin", **some).inputs.shape == asked(model=str(MODEL), **some).inputs.shape
