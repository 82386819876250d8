"""Simulated requests share what they have in common, as much as real ones would; and plans know it."""

import msgspec
import pytest

from hydrainfer.config import Slo
from hydrainfer.core import Layout
from hydrainfer.planner.inputs.workloads import PromptRules, trace_of, words_to_tokens
from hydrainfer.planner.nouns import ANSWER, PromptPart, TraceRequest
from hydrainfer.planner.search import Bounds, Study, served_at
from hydrainfer.planner.search.study import Station
from hydrainfer.planner.simulation import Simulator, as_requests, at_rate
from hydrainfer.planner.simulation.leap import TOKEN
from hydrainfer.workload.sources import Dialogues, Workload
from tests.planner.simulation.test_leaps import COST, EMBED, KV, deployment, dialogues

pytestmark = pytest.mark.unit
PROMPTS = PromptRules("seeing", lambda width, height: 40, lambda text, n: 3 + words_to_tokens(text), 4096)
CHAT = Workload(
    dataset="chat",
    output_tokens={"default": "uniform:8:20"},
    dialogues=Dialogues(turns="uniform:1:5", apart=3, systems=2, system_words=30, picture_pool=4),
)


def oracle(request, earlier):
    """Tokens of its prompt, in whole blocks and without the last one, that an earlier request has computed."""

    def facts(r, tokens):
        shown = {p: (m.key, p - m.start) for m in r.media for p in range(m.start, m.end)}
        return [(t, shown.get(p)) for p, t in enumerate(tokens)]

    mine, best = facts(request, request.prompt_ids), 0
    for other in earlier:
        theirs = facts(other, (*other.prompt_ids, *(TOKEN,) * (other.max_tokens - 1)))
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
        best = max(best, min(same, request.n_prompt - 1) // KV.block_tokens)
    return best * KV.block_tokens


@pytest.mark.parametrize("layout", ["1EPD", "1E1PD"])
@pytest.mark.parametrize("made", ["dialogues", "chat"])
def test_one_after_the_other_finds_all_that_is_there(layout, made):
    trace = list(dialogues(3)) if made == "dialogues" else trace_of(CHAT, PROMPTS, 60)
    requests = as_requests(at_rate(trace, 0.01), KV.block_tokens)
    simulator = Simulator(list(deployment(layout, kv_blocks=20_000, embed_blocks=400)))
    simulator.run(requests)
    stats = [node.engine.stats(0.0) for node in simulator.nodes.values()]
    found = sum(oracle(r, requests[:i]) for i, r in enumerate(requests))
    assert sum(s.tokens_found for s in stats) == found > 0.4 * sum(r.n_prompt for r in requests)


def test_a_chats_turns_begin_with_what_was_said():
    chats = CHAT.chats(200, 1)
    trace = trace_of(CHAT, PROMPTS, 200, 1)
    assert len({c.system for c in chats}) == 2 and len({p for c in chats for p in c.shown}) == 4
    for i, (chat, t) in enumerate(zip(chats, trace)):
        assert sum(p.n_tokens for p in t.parts) == t.n_prompt and len(chat.shown) == len(t.pictures) == 1
        assert [p.name == ANSWER for p in t.parts].count(True) == len(chat.before)
        if chat.before:
            earlier = trace[i - 4]  # three of others are between
            assert t.parts[: len(earlier.parts)] == earlier.parts and t.parts[len(earlier.parts)].name == ANSWER
            assert abs(t.parts[len(earlier.parts)].n_tokens - earlier.n_output) <= 1


def test_a_workload_without_repeats_is_as_it_was():
    alone = msgspec.structs.replace(CHAT, dialogues=Dialogues())
    trace = trace_of(alone, PROMPTS, 50)
    assert not any(t.parts for t in trace)
    assert all(not r.keys and set(r.prompt_ids) == {5} for r in as_requests(trace))


def test_the_bound_counts_nothing_twice():
    """It is no less than what a deployment with room for all carries, which computes what is said twice once."""

    def bound(trace):
        (instance,) = deployment("1EPD")
        stations = {"EPD": Station(cost=COST, blocks={KV: 20_000, EMBED: 400}, budgets=instance.budgets)}
        study = Study(stations=stations, trace=tuple(trace), slo=Slo(ttft_s=1.0))
        assert len(study.requests(1.0)) == len(trace)
        return Bounds(study).mean

    trace = trace_of(CHAT, PROMPTS, 100)
    shared, alone = bound(trace), bound([msgspec.structs.replace(t, parts=()) for t in trace])
    assert shared.prefill_s < 0.4 * alone.prefill_s and shared.encode_s == pytest.approx(alone.encode_s * 4 / 100)
    assert shared.decode_s == alone.decode_s
    again = TraceRequest(arrival_s=0.0, n_text=9, n_output=2, parts=(PromptPart("a", 9),))
    assert bound([again, again]).prefill_s == pytest.approx((bound([again]).prefill_s + COST.prefill_token_s) / 2)


def test_no_schedule_exceeds_the_bound_where_a_system_prompt_is_shared():
    """The room for KV holds the shared beginning once, so more requests decode at once than whole prompts fit."""
    (instance,) = deployment("1EPD")
    station = Station(cost=COST, blocks={KV: 120, EMBED: 40}, budgets=instance.budgets)
    begun = PromptPart("system", 200)
    trace = tuple(
        TraceRequest(arrival_s=i, n_text=208, n_output=40, parts=(begun, PromptPart(f"text {i}", 8))) for i in range(60)
    )
    study, layout = Study(stations={"EPD": station}, trace=trace, slo=Slo(ttft_s=1.0)), Layout.parse("1EPD")
    served = served_at(study, layout, 1e3)
    rate = len(served) / max(s.token_s[-1] for s in served)
    assert rate < Bounds(study).of(layout).rate
