"""The search keeps the layout that trying everything would choose, and says why the others carry no more."""

import random
from collections import Counter

import msgspec
import pytest

from hydrainfer.config import Slo
from hydrainfer.core import ConfigError, Layout, Role, Stage
from hydrainfer.core.stage import ROLE_NAMES
from hydrainfer.planner.costs import slowed
from hydrainfer.planner.nouns import CoreTime, ServerCost, TraceRequest
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.goodput import QUICK, SearchEffort, measured, search
from hydrainfer.planner.search.layouts import layout_of, layouts, method_of, placed_layouts
from hydrainfer.planner.search.objectives import least_devices, ranked_at
from hydrainfer.planner.search.study import Station, Study, attempt, observe
from hydrainfer.planner.search.trials import Trials
from hydrainfer.planner.search.usage import use_of
from tests.planner.simulation.test_leaps import COST, deployment

pytestmark = pytest.mark.unit
N_OUTPUT, PICTURE, TEXT = 30, 20, 30


def study(slo, n=120):
    rng, at, trace = random.Random(3), 0.0, []
    for _ in range(n):
        at += rng.expovariate(1.0)
        trace.append(TraceRequest(arrival_s=at, n_text=TEXT, pictures=(PICTURE,), n_output=N_OUTPUT))
    blocks = {str(i.role): i.blocks for i in map(_instance, ROLE_NAMES)}
    return Study(stations={r: Station(cost=COST, blocks=b) for r, b in blocks.items()}, trace=tuple(trace), slo=slo)


def _instance(role):
    return next(i for i in deployment(f"1{role}+1EPD") if i.role == Role.parse(role))


def test_141_layouts_of_8_devices():
    found = layouts(8)
    assert len(found) == len({str(x) for x in found}) == 141
    assert {method_of(x) for x in layouts(2)} == {"EPD", "EP+D", "ED+P", "E+PD"}
    with pytest.raises(ConfigError, match="0 devices"):
        layouts(0)


@pytest.mark.slow
def test_the_winner_is_that_of_trying_everything():
    s = study(Slo(ttft_s=0.3, tpot_s=0.05))
    quick, every = (search(s, layouts(3), n_processes=1, exhaustive=x) for x in (False, True))
    assert len(quick) == len(every) == len(layouts(3))
    by_name = {f.layout: f for f in every}
    best = quick[0]
    assert best.stage == "final" and best.goodput > 0.0
    assert by_name[best.layout].goodput >= 0.95 * every[0].goodput, "measured alike: other runs give other estimates"
    assert best.goodput_low <= every[0].goodput <= best.goodput_high * 1.03
    for f in every:
        assert f.goodput <= f.bound, "nothing carries more than can be"
        assert f.goodput_low <= f.goodput <= f.goodput_high
    for f in quick:
        if f.goodput is None:
            assert by_name[f.layout].goodput <= every[0].goodput


@pytest.mark.parametrize(
    "server",
    [
        ServerCost(process=CoreTime(request_s=2e-3), preparing=CoreTime(request_s=6e-3), workers=1),
        ServerCost(process=CoreTime(request_s=3e-3), passing=CoreTime(request_s=4e-3), workers=2, cores=2.0, threads=1),
    ],
)
def test_with_a_server_that_is_short_of_cores_the_winner_is_that_of_trying_everything(server):
    s = msgspec.structs.replace(study(Slo(ttft_s=0.3, tpot_s=0.2), n=60), server=server)
    quick, every = (
        search(s, layouts(2), n_processes=1, exhaustive=x, effort=SearchEffort(1, 0.1)) for x in (False, True)
    )
    measured_alike = {f.layout: f.goodput for f in every}
    assert measured_alike[quick[0].layout] >= 0.95 * every[0].goodput > 0.0
    for f in every:
        late = attempt(
            msgspec.structs.replace(study(s.slo, 300), server=server), Layout.parse(f.layout), 1.25 * f.bound
        )
        assert not late.carried(s.target), "a bound is more than what lasts"


def test_hurry_changes_no_verdict():
    s = study(Slo(ttft_s=0.3, tpot_s=0.05))
    for rate in (4.0, 40.0, 160.0):
        hasty, patient = (attempt(s, Layout.parse("1EP1D"), rate, hurry=h) for h in (True, False))
        assert hasty.carried(s.target) == patient.carried(s.target)
    assert hasty.stopped and not patient.stopped


def test_a_run_is_judged_by_other_limits_as_if_it_had_been_simulated_for_them():
    loose, tight, none = (Slo(ttft_s=ttft_s, tpot_s=0.05, e2e_s=2.0) for ttft_s in (0.3, 0.1, None))
    s, layout = study(loose), Layout.parse("1EP1D")
    for rate in (4.0, 40.0):
        own = observe(s, layout, rate)
        patient = observe(msgspec.structs.replace(s, slo=tight, patience_s=0.3), layout, rate)
        assert patient.under(loose) == own and own.under(tight) == patient
        assert sum(own.under(none).series.met) >= sum(own.series.met) >= sum(patient.series.met)
        assert 0.3 < own.under(none).series.limit_s < 2.0, "what the answers leave of the E2E limit"
    assert sum(own.series.met) > sum(patient.series.met)


def test_a_search_goes_on_from_what_is_known():
    """An exact final takes the runs of the one before it, and whoever searches the same again simulates nothing."""
    s, trials = study(Slo(ttft_s=0.3, tpot_s=0.05), 60), Trials()

    def runs() -> list[list[tuple[float, int]]]:
        each = [trials.of(s, k, hurry=h) for k in layouts(2) for h in (False, True)]
        return [[(t.attempt.rate, len(t.kept)) for t in some] for some in each]

    search(s, layouts(2), n_processes=1, effort=QUICK, trials=trials)
    before = runs()
    assert all(len(set(some)) == len(some) for some in before) and sum(map(len, before)) > 8
    search(s, layouts(2), n_processes=1, effort=QUICK, trials=trials)
    assert runs() == before


def test_runs_at_a_rate_share_no_request():
    s = study(Slo(ttft_s=0.3), n=10)
    other = tuple(msgspec.structs.replace(t, n_text=100 + i, arrival_s=i) for i, t in enumerate(s.trace * 2))
    runs = [msgspec.structs.replace(s, more=other).run(k).trace for k in range(3)]
    assert runs[0] == s.trace and [t.n_text for t in runs[1]] == [t.n_text for t in other]
    assert len(runs[2]) == 40 and runs[2] != runs[0] * 4, "where there are too few, they are drawn again"
    assert all(trace[0].arrival_s >= 0.0 and trace[-1].arrival_s > 0.0 for trace in runs)


def test_a_layout_carries_what_it_would_for_ever():
    """The rate that a short trace lets through is above what can last: the interval of steady runs is below."""
    s, layout = study(Slo(ttft_s=4.0, tpot_s=0.2), n=300), Layout.parse("1EP1D")
    bound = Bounds(s).of(layout).rate
    found = measured(s, layout, bound, bound)
    assert 0.0 < found.goodput_low <= found.goodput <= found.goodput_high <= bound
    assert attempt(s.run(3), layout, found.goodput_low).carried(s.target)
    if found.goodput_high < bound:
        assert not attempt(s.run(3), layout, found.goodput_high).carried(s.target)


def test_a_rate_is_carried_if_it_would_be_for_ever():
    """All requests of a short run meet the limit, even at a rate at which a queue grows."""
    s, layout = study(Slo(ttft_s=4.0, tpot_s=0.2)), Layout.parse("1EPD")
    bound = Bounds(s).of(layout).rate
    for share, known in ((0.5, True), (0.8, None), (0.98, False), (1.02, False)):
        rate = share * bound
        (found,) = ranked_at(s, [layout], rate, "ttft", n_processes=1)
        assert (found.goodput, found.goodput_low or None) == ((rate, rate) if known else (None, None)), share
        assert (found.goodput_high > rate) is (known is not False)
    assert attempt(s, layout, 0.98 * bound).carried(s.target)
    assert len(found.attempts) == 0, "no rate above the bound is simulated"


def test_the_fewest_devices_carry_the_rate_for_ever():
    studies = [(study(Slo(ttft_s=4.0, tpot_s=0.2)), [Layout.parse(text)]) for text in ("1EPD", "2EPD", "3EPD")]
    rate = 0.98 * Bounds(studies[0][0]).of(Layout.parse("1EPD")).rate
    n, found = least_devices(studies, rate, n_processes=1)
    assert n == 2 and found[0].layout == "2EPD" and found[0].goodput == rate


def test_bounds():
    bounds = Bounds(study(Slo(ttft_s=0.3, tpot_s=0.05)))
    one, two = (bounds.of(Layout.parse(text)) for text in ("1EPD", "2EPD"))
    assert two.rate == pytest.approx(2 * one.rate)
    encode_s = min(COST.encode_s([PICTURE] * k) / k for k in (1, 2, 4, 8, 16, 32))
    assert bounds.of(Layout.parse("1E7PD")) == (pytest.approx(1 / encode_s), (Stage.ENCODE,))


def test_a_picture_that_was_seen_is_encoded_once():
    s = study(Slo(ttft_s=0.3))
    same = msgspec.structs.replace(s, trace=tuple(msgspec.structs.replace(t, content="x") for t in s.trace))
    layout = Layout.parse("1E7PD")
    assert Bounds(same).of(layout).rate > 5 * Bounds(s).of(layout).rate


def test_nothing_carries_more_than_its_bound_for_long():
    """With a TTFT that a short trace could never miss."""
    s = study(Slo(ttft_s=0.5, tpot_s=0.05), n=600)
    for layout in map(Layout.parse, ("2EP1D", "1E1P1D", "1ED1P", "1EPD")):
        assert not attempt(s, layout, Bounds(s).of(layout).rate * 1.25).carried(s.target)


def test_layouts_of_unlike_devices():
    """A role stays on one kind, EPD may be on both, and every device has a role."""
    found = placed_layouts({"h20": 2, "h800": 1})
    names = [str(x) for x in found]
    assert len(set(names)) == len(names) and "2EPD@h20+1EPD@h800" in names
    assert "1E@h800+2PD@h20" in names and "1E@h20+1P@h20+1D@h800" in names
    for layout, name in zip(found, names):
        assert layout_of(name) == layout and str(layout_of(name)) == name
        kinds = Counter(role.device for role in layout.instances)
        assert kinds == {"h20": 2, "h800": 1}
        of_role = {(str(role).partition("@")[0], role.device) for role in layout.instances}
        split = [role for role, _ in of_role if role != "EPD"]
        assert len(split) == len(set(split))
    assert {method_of(x) for x in found} >= {"EPD", "E+PD", "E+P+D", "E+PD + EPD"}


def test_bounds_of_unlike_devices_add_up():
    s = study(Slo(ttft_s=0.3, tpot_s=0.05))
    fast, slow = s.stations, {r: msgspec.structs.replace(t, cost=slowed(t.cost, 2.0)) for r, t in s.stations.items()}
    both = {f"{r}@fast": t for r, t in fast.items()} | {f"{r}@slow": t for r, t in slow.items()}
    unlike = msgspec.structs.replace(s, stations=both)
    alone = Bounds(s).of(Layout.parse("1EPD")).rate
    assert Bounds(unlike).of(layout_of("1EPD@fast+1EPD@slow")).rate == pytest.approx(1.5 * alone)
    found = search(unlike, placed_layouts({"fast": 1, "slow": 1}), n_processes=1, effort=QUICK)
    assert found[0].stage == "final" and 0.0 < found[0].goodput <= found[0].bound


def test_a_device_that_suits_a_stage_has_that_stage():
    """One kind is ten times slower at vision, the other at language: together they carry what neither does alone."""
    s = study(Slo(ttft_s=0.5, tpot_s=0.05))

    def slower(*names: str) -> dict[str, Station]:
        return {
            role: msgspec.structs.replace(
                t, cost=msgspec.structs.replace(t.cost, **{name: 10 * getattr(t.cost, name) for name in names})
            )
            for role, t in s.stations.items()
        }

    kinds = {
        "a": slower("encode_base_s", "encode_image_s"),
        "b": slower("step_base_s", "prefill_token_s", "decode_token_s"),
    }
    unlike = msgspec.structs.replace(
        s, stations={f"{role}@{kind}": t for kind, of_kind in kinds.items() for role, t in of_kind.items()}
    )
    alike, apart = Bounds(s).of(Layout.parse("1E1PD")).rate, Bounds(unlike)
    assert apart.of(layout_of("1E@b+1PD@a")).rate >= alike
    assert apart.of(layout_of("1E@a+1PD@b")).rate < alike
    assert attempt(unlike, layout_of("1E@b+1PD@a"), 0.5 * alike).carried(s.target)


def test_the_use_of_roles():
    s, layout = study(Slo(ttft_s=0.5, tpot_s=0.05)), Layout.parse("1E2PD")
    busy, idle = (use_of(s, layout, rate) for rate in (60.0, 6.0))
    for e, pd in (busy, idle):
        assert (e.role, e.n, e.language) == ("E", 1, None) and (pd.role, pd.n, pd.vision) == ("PD", 2, None)
        assert 0.0 <= e.vision <= 1.0 and all(0.0 <= c.mean <= c.most <= 1.0 for c in pd.caches.values())
    assert busy[0].vision > 2 * idle[0].vision and busy[1].language > idle[1].language
