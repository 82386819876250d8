"""The reason why a layout carries no more explains the number beside it: fixed figures of each kind of limit, and
studies whose own numbers have to be in the sentence."""

import msgspec
import pytest

from hydrainfer.config import Slo
from hydrainfer.core import Layout
from hydrainfer.metrics import INTERVALS
from hydrainfer.planner.nouns import CoreTime, Link, ServerCost
from hydrainfer.planner.search.bound import Bounds
from hydrainfer.planner.search.evidence import Evidence, Latency, Spent, evidence_of
from hydrainfer.planner.search.goodput import Finding
from hydrainfer.planner.search.plan import rows_of
from hydrainfer.planner.search.reason import FULL, explained, reason
from hydrainfer.planner.search.study import Attempt
from hydrainfer.planner.search.usage import CacheUse, RoleUse, use_of
from hydrainfer.scheduler import Budgets
from tests.planner.search.test_search import study

pytestmark = pytest.mark.unit


def use(role, vision=None, language=None, kv=0.2, **more):
    caches = {"kv": CacheUse(mean=kv, most=min(1.0, kv + 0.1), n_bytes=float(40 << 30))}
    given = {"running": 8.0, "decoding": 6.0, "places": 64, "language_least": language or 0.0, "vision_least": 0.0}
    return RoleUse(role=role, n=1, vision=vision, language=language, caches=caches, **given | more)


E, P, D = use("E", vision=0.5), use("P", language=0.4), use("D", language=0.6)
TTFT = Latency(limit_s=0.25, missed=0.34, seconds=0.9, alone_s=0.1, alone_missed=0.0)
TPOT = Latency(limit_s=0.05, missed=0.02, seconds=0.04, alone_s=0.02, alone_missed=0.0)


def figures(interval="", limit="TTFT", roles=(E, P, D), **more):
    """Figures in which requests lost their time in one interval."""
    spent = {name: Spent(mean_s=0.01, p90_s=0.02, alone_s=0.01) for name in INTERVALS}
    if interval:
        spent[interval] = Spent(mean_s=0.4, p90_s=0.8, alone_s=0.01)
    given = {
        "rate": 24.0,
        "n": 400,
        "target": 0.9,
        "missed": 0.34 if interval else 0.05,
        "latencies": {"TTFT": TTFT, "TPOT": TPOT},
        "intervals": spent,
        "use": roles,
        "limit": limit if interval else "",
        "interval": interval,
        "blamed": 0.3,
        "bound": 60.0,
        "bound_stages": ("decode",),
    }
    return Evidence(**given | more)


def test_encode_is_busy():
    found = explained(figures("encode_queue", roles=(use("E", vision=0.98, vision_least=0.9), P, D)))
    assert (found.kind, found.stage) == ("lane", "encode")
    assert found.words == "encode is busy: at 24/s the vision lane of E works 98 % of the time"
    assert found.details == (
        "34 % of the requests miss TTFT ≤ 250 ms (alone 100 ms), mostly waiting for an encoder (mean 400 ms, p90 800 "
        "ms)"
    )


def test_prefill_is_busy():
    found = explained(figures("prefill_queue", roles=(E, use("P", language=0.97), D)))
    assert (found.kind, found.stage) == ("lane", "prefill")
    assert found.words == "prefill is busy: at 24/s the language lane of P works 97 % of the time"
    assert "mostly waiting for prefill" in found.details


def test_a_lane_that_is_half_idle_is_no_reason():
    """Requests wait for prefill, but prefill works 41 % of the time."""
    found = explained(figures("prefill_queue", roles=(E, use("P", language=0.41), D)))
    assert found.kind == "bursts" and "busy" not in found.words
    assert found.words == (
        "bursts: at 24/s on average 9.6 requests are waiting for prefill, but 10 % wait over 800 ms"
    ), "24/s times 400 ms"
    assert "nothing is full: the language lane of P works 41 % of the time" in found.details
    assert "the fullest cache, kv of P, 20 %" in found.details


def test_decode_misses_tpot():
    slow = msgspec.structs.replace(TPOT, missed=0.3, seconds=0.058)
    roles = (E, use("PD", language=0.98, decoding=35.0, language_least=0.5))
    found = explained(figures("decode", "TPOT", roles, latencies={"TTFT": TTFT, "TPOT": slow}))
    assert (found.kind, found.stage) == ("steps", "decode")
    assert found.words == "decode steps are long: at 24/s the token interval is 58 ms (alone 20 ms)"
    assert found.details == (
        "30 % of the requests miss TPOT ≤ 50 ms; PD decodes 35 requests at once beside prefill; the language lane of "
        "PD works 98 % of the time (least possible: 50 %)"
    )


def test_a_lane_that_small_batches_of_decode_fill_is_shared_and_not_full():
    found = explained(figures("prefill_queue", roles=(E, use("PD", language=1.0, language_least=0.3))))
    assert found.kind == "shared"
    assert found.words == (
        "prefill shares a lane with decode: at 24/s the language lane of PD works 100 % of the time (least possible: "
        "30 %)"
    )


def test_pictures_take_turns_with_prefill():
    found = explained(figures("encode_queue", roles=(use("EPD", vision=0.64, language=1.0, gated=0.35),)))
    assert (found.kind, found.stage) == ("gate", "encode")
    assert found.words == (
        "encode waits for prefill: at 24/s the vision lane of EPD works 64 % of the time, and for 35 % of it pictures "
        "wait until nothing is in prefill (encode gate)"
    )
    idle = explained(figures("encode_queue", roles=(use("EPD", vision=0.5, language=1.0, gated=0.2),)))
    assert idle.kind == "bursts"


def test_a_queue_that_grows_is_no_burst():
    found = explained(figures("encode_queue", growth=1.2))
    assert found.kind == "growth" and "nothing is full" in found.details
    assert found.words.startswith("encode: at 24/s a queue grows: waiting for an encoder takes")


def test_the_memory_for_kv_is_full():
    """A lane that decodes is always busy; what it lacks is memory."""
    found = explained(figures("pd_migration", roles=(E, P, use("D", language=1.0, language_least=0.4, kv=0.97))))
    assert (found.kind, found.stage) == ("memory", "decode")
    assert found.words == "the memory of D is full: at 24/s requests hold 97 % of the 40 GiB for kv"
    assert "mostly waiting for their KV to reach decode" in found.details


def test_no_place_is_free():
    roles = (E, P, use("D", language=1.0, language_least=0.4, running=63.5))
    found = explained(figures("pd_migration", roles=roles))
    assert found.kind == "places"
    assert found.words == "D has no place free: at 24/s it runs 63.5 of the 64 requests that it may run at once"


def test_a_link_is_busy():
    found = explained(figures("pd_migration", link=0.95))
    assert (found.kind, found.stage) == ("link", "decode")
    assert found.words == "a link is busy: at 24/s its busiest end copies 95 % of the time"
    assert explained(figures("pd_migration", link=0.4)).kind == "bursts"
    assert explained(figures("prefill_queue", link=0.95)).kind == "bursts", "nobody waits for a copy"


def test_the_server_is_short_of_time():
    """Requests that have not reached an instance wait for no encoder."""
    found = explained(figures("encode_queue", roles=(use("E", vision=0.98, vision_least=0.9), P, D), server_s=0.35))
    assert (found.kind, found.stage) == ("server", "")
    assert found.words == "the server is short of time: at 24/s requests wait 350 ms in it on average"


def test_batches_are_slowed():
    found = explained(figures("prefill", roles=(E, use("EP", vision=0.7, language=0.8))))
    assert found.words == "prefill is slow under load: at 24/s it takes 400 ms (alone 10 ms)"
    assert "the vision lane of EP works 70 % of the time, the language lane of EP works 80 %" in found.details


def test_a_request_misses_the_slo_even_alone():
    never = msgspec.structs.replace(TTFT, alone_s=0.3, alone_missed=0.5)
    e = figures("encode_queue", latencies={"TTFT": never, "TPOT": TPOT})
    spent = e.intervals | {"prefill": Spent(mean_s=0.2, p90_s=0.3, alone_s=0.2)}
    found = explained(msgspec.structs.replace(e, intervals=spent))
    assert (found.kind, found.stage) == ("alone", "prefill")
    assert found.words == "TTFT ≤ 250 ms cannot be met: without any other request it is 300 ms"
    assert found.details == "90% of the requests attain that alone, and most of it is prefill"


def test_the_search_ended_at_its_upper_bound():
    found = explained(figures(rate=59.5))
    assert (found.kind, found.stage) == ("bound", "decode")
    assert found.words == "decode: the least possible work allows 60/s"
    assert found.details.startswith("the search ends there; at 59.5/s the vision lane of E works 50 %")


def test_a_queue_grows_while_all_meet_the_slo():
    e = figures(growth=1.4, missed=0.0)
    waits = e.intervals | {"prefill_queue": Spent(mean_s=0.5, p90_s=1.0, first_s=0.02, last_s=1.4)}
    found = explained(msgspec.structs.replace(e, intervals=waits))
    assert (found.kind, found.stage) == ("growth", "prefill")
    assert found.words == (
        "prefill: at 24/s a queue grows: waiting for prefill takes 20 ms in the first quarter of a run, 1.4 s in the "
        "last"
    )
    assert found.details.startswith("all 400 requests of a run meet the SLO, later ones would not; the vision lane")


def test_a_lane_is_nearly_full_and_the_run_too_short():
    found = explained(figures(roles=(E, P, use("D", language=0.95, language_least=0.85))))
    assert found.kind == "near"
    assert found.words == ("decode: at 24/s the language lane of D works 95 % of the time (least possible: 85 %)")
    assert found.details.startswith("5 % of the 400 requests of a run miss the SLO")


def test_nothing_explains_it():
    found = explained(figures(missed=0.004))
    assert found.kind == "open"
    assert found.words == (
        "not clear: at 24/s 0.4 % of the 400 requests of a run miss the SLO, but runs this short cannot tell"
    )


# ---- figures that a study makes


def figure(text, before, after=" %"):
    """The number between two texts."""
    return float(text[text.index(before) + len(before) :].partition(after)[0])


def test_few_encoders_are_busy_as_the_study_says():
    s, layout, rate = study(Slo(ttft_s=0.2, tpot_s=0.05)), Layout.parse("1E3PD"), 60.0
    found = reason(s, layout, rate)
    assert (found.kind, found.stage) == ("lane", "encode") and found.evidence.limit == "TTFT"
    encoders = next(u for u in use_of(s, layout, rate) if u.role == "E")
    assert figure(found.words, "lane of E works ") == round(encoders.vision * 100) >= FULL * 100
    shown = Attempt(rate=rate, n=120, n_met=120)
    assert 1.0 - found.evidence.missed < s.target * shown.n_met / shown.n, "the rate is not carried"
    assert figure(found.details, "") == round(found.evidence.latencies["TTFT"].missed * 100)


def test_little_memory_is_full_and_holds_up_what_comes_before():
    s = study(Slo(ttft_s=0.3, tpot_s=0.2))
    d = s.stations["D"]
    few = {spec: max(1, n // 20) for spec, n in d.blocks.items()}
    s = msgspec.structs.replace(s, stations={**s.stations, "D": msgspec.structs.replace(d, blocks=few)})
    found = reason(s, Layout.parse("2EP1D"), 50.0)
    (decoder,) = [u for u in found.evidence.use if u.role == "D"]
    assert found.kind == "memory" and decoder.caches["kv"].mean >= FULL
    assert "the memory of D is full" in found.words and found.words.endswith("and encode waits for that")
    assert figure(found.words, "requests hold ") == round(decoder.caches["kv"].mean * 100)


def test_few_places_are_taken():
    s = study(Slo(ttft_s=0.3, e2e_s=1.0))
    d = msgspec.structs.replace(s.stations["D"], budgets=Budgets(running=2))
    found = reason(msgspec.structs.replace(s, stations={**s.stations, "D": d}), Layout.parse("3EP1D"), 20.0)
    (decoder,) = [u for u in found.evidence.use if u.role == "D"]
    assert found.kind == "places" and decoder.places == 2 and found.evidence.limit == "E2E"
    assert figure(found.words, "it runs ", " of the 2") == pytest.approx(decoder.running, abs=0.01)


def short(s, n_output=2):
    """The study with short answers, which leave decode little to do."""
    return msgspec.structs.replace(s, trace=tuple(msgspec.structs.replace(t, n_output=n_output) for t in s.trace))


def test_a_slow_link_copies_all_the_time():
    s = msgspec.structs.replace(short(study(Slo(ttft_s=0.3))), link=Link(latency_s=0.025))
    found = reason(s, Layout.parse("3E1PD"), 60.0)
    assert found.kind == "link" and found.evidence.link >= FULL
    assert figure(found.words, "copies ") == round(found.evidence.link * 100)
    idle = evidence_of(s, Layout.parse("1E1PD"), 4.0)
    assert idle.link == pytest.approx(4.0 * 0.025, rel=0.2), "a copy for each request"


def test_decode_steps_of_many_sequences_are_long():
    s, layout = study(Slo(ttft_s=5.0, tpot_s=0.012)), Layout.parse("2EPD")
    found = reason(s, layout, 60.0)
    assert (found.kind, found.stage) == ("steps", "decode")
    latency = found.evidence.latencies["TPOT"]
    assert latency.seconds > latency.limit_s > latency.alone_s
    assert figure(found.words, "token interval is ", " ms") == pytest.approx(latency.seconds * 1e3, rel=0.01)


def test_a_busy_server_is_not_an_encoder():
    server = ServerCost(process=CoreTime(request_s=20e-3), workers=1)
    s = msgspec.structs.replace(study(Slo(ttft_s=0.3, tpot_s=0.2)), server=server)
    found = reason(s, Layout.parse("3EPD"), 60.0)
    assert found.kind == "server" and found.stage == ""
    assert figure(found.words, "wait ", " ") > 0.0 and found.evidence.server_s > 0.1


def test_bursts_are_no_lack_of_devices():
    s, layout = study(Slo(ttft_s=0.12, tpot_s=0.2)), Layout.parse("1EPD")
    rates = (0.4, 0.5, 0.6)
    found = [reason(s, layout, share * Bounds(s).of(layout).rate) for share in rates]
    for one in found:
        if one.kind == "bursts":
            shares = [u.vision for u in one.evidence.use]
            assert all(share < FULL for share in shares)
    assert any(one.kind == "bursts" for one in found), [one.kind for one in found]


def test_what_stopped_a_search_is_named_with_its_number():
    s = study(Slo(ttft_s=0.3, tpot_s=0.05))
    stopped = Attempt(rate=30.0, n=80, n_met=52, stopped=True)
    found = [
        Finding(layout="1E2PD", stage="screened", bound=70.0, goodput_high=30.0, attempts=(stopped,)),
        Finding(layout="2E1PD", stage="pruned", bound=22.0, goodput_high=22.0),
        Finding(layout="1E1P1D", stage="screened", bound=28.0, goodput_high=28.0),
    ]
    failed, pruned, screened = rows_of(s, found, n_processes=1)
    assert failed.limited_by == "not looked into: at 30/s 28 of 80 requests missed the SLO" and failed.limit == "failed"
    assert pruned.limited_by.endswith("the least possible work allows 22/s") and pruned.limit == "bound"
    assert screened.limited_by.endswith("the least possible work allows 28/s")
    for row in (failed, pruned, screened):
        assert f"{row.goodput_high:.3g}/s" in row.limited_by, "the number beside it"


def test_a_measured_layout_is_explained_at_the_rate_that_failed_by_the_run_that_decided():
    s = study(Slo(ttft_s=0.2, tpot_s=0.05))
    tried = (
        Attempt(rate=20.0, n=120, n_met=119),
        Attempt(rate=60.0, n=120, n_met=50),
        Attempt(rate=60.0, n=240, n_met=90),
    )
    one = Finding(
        layout="1E3PD", stage="final", bound=62.5, goodput=40.0, goodput_low=20.0, goodput_high=60.0, attempts=tried
    )
    (row,) = rows_of(s, [one], n_processes=1)
    assert row.limit == "lane" and row.stage == "encode" and "at 60/s the vision lane of E" in row.limited_by
    assert row.why.startswith(row.limited_by) and "miss TTFT ≤ 200 ms" in row.why
    long = reason(s, Layout.parse("1E3PD"), 60.0, 1)
    assert long.evidence.n == 240 and row.why == str(long)
