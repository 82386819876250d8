"""`--validate`: which loads a layout is given, and what is predicted of it beside the client."""

import io
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from hydrainfer.core import ConfigError
from hydrainfer.planner.search import Row
from hydrainfer.profiling import live
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.profiling.question import prepare
from hydrainfer.workload.sources import ChatRequest, Recording, write_recording

pytestmark = pytest.mark.cpu
COSTS = Path("configs/cost_models/builtin-cpu.yaml")


def test_recorded_times_are_not_what_is_validated(tmp_path):
    chats = tuple(ChatRequest(text="why?", max_tokens=4, at_s=0.5 * i) for i in range(60))
    write_recording(tmp_path / "r.jsonl", Recording(dataset="d", chats=chats))
    given = {"workload": str(tmp_path / "r.jsonl"), "cost_model": COSTS, "slo": "ttft=1,tpot=0.1", "requests": 60}
    question = ProfileQuestion(model="builtin", devices=1, **given)
    with pytest.raises(ConfigError, match="plan with --arrivals poisson"):
        live.check_live(prepare(question, never))
    live.check_live(prepare(msgspec.structs.replace(question, arrivals="poisson"), never))


def test_the_live_run_has_the_target_of_the_plan(monkeypatch):
    question = ProfileQuestion(
        model="builtin", devices=1, cost_model=COSTS, slo="ttft=1,tpot=0.1", requests=60, target=0.5
    )

    class Planned(Exception):
        """Ends the run before anything is started."""

    def comparison(plan, *_):
        raise Planned(plan.target)

    monkeypatch.setattr(live, "Comparison", comparison)
    with pytest.raises(Planned, match=r"0\.5"):
        live._run(prepare(question, never), Path("layout.yaml"), (1.0, 2.0), Console(file=io.StringIO()))


def never(*_):
    pytest.fail("nothing is measured")


def test_a_layout_is_run_at_the_ends_of_the_stated_error(monkeypatch):
    """The rates are of a server that has the client on its cores; what that takes is less than a search can tell."""
    question = ProfileQuestion(model="builtin", devices=1, cost_model=COSTS, slo="ttft=1,tpot=0.1", requests=60)
    asked = prepare(question, lambda *_: pytest.fail("nothing is measured"))
    study, ran = asked.inputs.study(), []
    layout, beside = live.Layout.parse("1EPD"), live._with_client(study)
    bound, less = (live.Bounds(s).of(layout).rate for s in (study, beside))
    planned = live.measured(study, layout, bound, bound).goodput
    assert less < bound and beside.server.work_s(study.trace, 1) > study.server.work_s(study.trace, 1)

    def run(asked, path, rates, console):
        assert "role: EPD" in path.read_text()
        ran.append(rates)
        return SimpleNamespace(runs=())

    monkeypatch.setattr(live, "_run", run)
    row = Row(layout="1EPD", method="EPD", goodput=planned)
    assert live.validate(asked, study, [row], Console(file=io.StringIO())) == ()
    predicted = live.measured(beside, layout, less, min(planned, less)).goodput
    assert ran == [pytest.approx((predicted / 1.25, predicted * 1.25))]
