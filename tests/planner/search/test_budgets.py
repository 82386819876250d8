"""Budgets keep the TPOT SLO where tokens are owed, are searched alike over a model and over measurements, and return
measured values only."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.config import Slo
from hydrainfer.core import CostModel, Role
from hydrainfer.planner.costs.costfile import BatchShape, BatchTime, CostFile
from hydrainfer.planner.costs.fitting import predicted_s
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.search.budgets import CHUNKS, MARGIN, PICTURES, SEQUENCES, Mix, budgets_for, largest, mix_of
from hydrainfer.scheduler import Budgets

pytestmark = pytest.mark.unit
COST = CostModel(
    encode_base_s=0.7e-3, encode_image_s=0.0, encode_token_s=1.7e-6, step_base_s=1.5e-3, prefill_token_s=2.55e-5,
    prefill_attention_s=5e-10, decode_token_s=2.7e-5, decode_context_s=1e-9, weights_s=5.6e-3, context_s=2.2e-7,
    overlap_slowdown=3.0, prefill_overlap_slowdown=1000.0,
)  # fmt: skip
MIX = Mix(decodes=16, context=700, prompt=620, picture=576)
TIGHT, LOOSE = Slo(ttft_s=0.25, tpot_s=0.04), Slo(ttft_s=8.0, tpot_s=0.12)


def measured(noise=0.0, co_run=True):
    """A device that behaves as `COST` says, but for noise."""
    draw = random.Random(0)

    def point(work, beside=None, more_s=0.0):
        p50 = (predicted_s(COST, work) + more_s) * (1 + draw.uniform(0, noise))
        return BatchTime(work=work, beside=beside, n=9, min_s=p50, p50_s=p50, p90_s=1.1 * p50)

    encodes = [BatchShape(pictures=n, tokens=576) for n in (1, 2, 4, 8)]
    mixed = [BatchShape(chunk=c, decodes=16, context=1024) for c in (64, 128, 256, 512, 1024)]
    points = [point(w) for w in encodes + mixed]
    points += [point(BatchShape(chunk=c)) for c in (64, 256, 512, 1024, 2048)]
    points += [point(BatchShape(decodes=n, context=1024)) for n in (1, 4, 16, 64)]
    if co_run:
        points += [point(w, e, predicted_s(COST, e)) for w in mixed for e in encodes[::2]]
    return CostFile(
        kind="measured", model="m", device="d", dtype="float32", threads=1, date="", hardware={}, versions={},
        cost=COST, errors={}, points=tuple(points),
    )  # fmt: skip


@pytest.mark.parametrize("slo", [TIGHT, LOOSE])
@pytest.mark.parametrize("role", ["D", "PD", "ED", "EPD"])
def test_budgets_of_instances_that_decode_keep_the_tpot_slo(role, slo):
    b = budgets_for(COST, Role.parse(role), slo, MIX)
    decode_s = COST.language_s(0, 0, b.running, b.running * 701)
    assert decode_s <= MARGIN * slo.tpot_s
    if "P" in role:
        chunk = b.tokens - MIX.decodes
        start = max(0, MIX.prompt - chunk)
        step_s = COST.language_s(chunk, chunk * (start + chunk), 16, 16 * 701, start)
        beside_s = COST.encode_s([576] * b.images) if "E" in role else 0.0
        assert step_s + beside_s <= MARGIN * slo.tpot_s * 1.001
        bigger = next(c for c in CHUNKS if c > chunk)
        longer_s = COST.language_s(bigger, bigger * bigger, 16, 16 * 701) + beside_s
        assert chunk == CHUNKS[-1] or longer_s > MARGIN * slo.tpot_s


def test_looser_slos_give_larger_batches():
    for role in map(Role.parse, ("PD", "EPD")):
        tight, loose = (budgets_for(COST, role, slo, MIX) for slo in (TIGHT, LOOSE))
        assert loose.tokens > tight.tokens and loose.running >= tight.running and loose.images >= tight.images


def test_budgets_of_other_instances_are_bound_by_ttft_and_by_throughput():
    assert budgets_for(COST, Role.parse("P"), LOOSE, MIX).tokens == 768  # a prompt, and at least what saturates
    hurried = budgets_for(COST, Role.parse("P"), Slo(ttft_s=0.04), MIX)
    assert COST.language_s(hurried.tokens, hurried.tokens**2, 0, 0) <= 0.25 * 0.04
    e = budgets_for(COST, Role.parse("E"), LOOSE, MIX)
    assert e.images in (8, 12) and budgets_for(COST, Role.parse("E"), Slo(ttft_s=0.01), MIX).images == 1


def test_lanes_that_take_turns_have_less_room():
    free, turns = (budgets_for(COST, Role.parse("ED"), Slo(tpot_s=0.02), MIX, overlap=o) for o in ("free", "off"))
    assert turns.images <= free.images


@pytest.mark.parametrize("role", ["EPD", "PD", "ED", "D"])
def test_where_batches_are_cut_as_they_are_made_only_the_number_of_sequences_is_bound(role):
    role = Role.parse(role)
    sliced, bound = (budgets_for(COST, role, TIGHT, MIX, overlap=o) for o in ("slice", "off"))
    assert sliced.wait_s <= 20 * sliced.gap_s == 20 * TIGHT.tpot_s
    assert sliced.running == bound.running < Budgets().running
    if str(role) != "D":
        others = budgets_for(COST, Role.parse(str(role).removesuffix("D")), TIGHT, MIX)
        assert (sliced.tokens, sliced.images) == (others.tokens, others.images)
    assert budgets_for(COST, role, Slo(ttft_s=1.0), MIX, overlap="slice").gap_s == 0.0


def test_without_slos_only_throughput_counts():
    b = budgets_for(COST, Role.parse("EPD"), Slo(e2e_s=9.0), MIX)
    assert b.running == Budgets().running and b.tokens >= 1024 and b.images > 1


def test_chunk_and_pictures_share_the_time_between_two_tokens():
    """Lanes that take turns: the largest vision batch would leave a chunk of 16 tokens, a prompt of 150 steps."""
    cost = msgspec.structs.replace(COST, overlap_slowdown=3.0, prefill_overlap_slowdown=1000.0)
    mix = msgspec.structs.replace(MIX, prompt=2400, picture=2300)
    epd, pd = (budgets_for(cost, Role.parse(role), TIGHT, mix) for role in ("EPD", "PD"))
    encode_only = budgets_for(cost, Role.parse("ED"), TIGHT, mix)
    assert epd.images <= encode_only.images
    assert CHUNKS[0] + mix.decodes < epd.tokens <= pd.tokens


def test_an_impossible_slo_gives_the_least():
    b = budgets_for(COST, Role.parse("EPD"), Slo(tpot_s=1e-4), MIX)
    assert (b.tokens, b.images, b.running) == (CHUNKS[0] + 16, PICTURES[0], SEQUENCES[0])


@pytest.mark.parametrize("role", ["E", "P", "D", "EP", "ED", "PD", "EPD"])
@pytest.mark.parametrize("slo", [TIGHT, LOOSE, Slo(tpot_s=1e-4)])
def test_only_measured_values_come(role, slo):
    file = measured(noise=0.3)
    b = budgets_for(file, Role.parse(role), slo, MIX)
    if "E" in role:
        assert b.images in (1, 2, 4, 8)
    if "P" in role:
        assert b.tokens - (16 if "D" in role else 0) in (64, 128, 256, 512, 1024, 2048)
    if "D" in role:
        assert b.running in (1, 4, 16, 64)


def test_measured_and_modelled_agree():
    for role in ("PD", "EPD", "P"):
        model, file = (budgets_for(c, Role.parse(role), TIGHT, MIX) for c in (COST, measured()))
        assert 0.4 < file.tokens / model.tokens < 2.1 or role == "P"


def test_the_percentile_counts_not_the_median():
    file = measured()
    slow = CostFile(**{f: getattr(file, f) for f in file.__struct_fields__ if f != "points"}, points=tuple(
        msgspec.structs.replace(p, p90_s=3 * p.p50_s) for p in file.points
    ))  # fmt: skip
    tokens = [budgets_for(f, Role.parse("PD"), TIGHT, MIX).tokens for f in (file, slow)]
    assert tokens[1] < tokens[0]


@given(st.lists(st.integers(1, 100), min_size=1, unique=True).map(sorted), st.integers(0, 110))
def test_largest_is_the_last_that_fits(candidates, limit):
    fitting = [n for n in candidates if n <= limit]
    assert largest(candidates, lambda n: n <= limit) == (fitting[-1] if fitting else candidates[0])


def test_the_mix_is_of_high_quantiles():
    trace = [TraceRequest(arrival_s=i, n_text=i + 1, pictures=(64,) * (i % 2), n_output=10) for i in range(100)]
    mix = mix_of(trace)
    assert mix.picture == 64 and 140 < mix.prompt < 160 and mix.context == mix.prompt + 10
    assert mix_of([TraceRequest(arrival_s=0, n_text=1, n_output=1)]).picture == 0
