"""A plan over clusters in sentences, as a table and as a page."""

import re

import msgspec
import pytest

from hydrainfer.planner.clusters import Queued
from hydrainfer.profiling.cluster_answer import answer_clusters
from hydrainfer.profiling.cluster_question import prepare_clusters
from hydrainfer.profiling.options import Profile
from hydrainfer.reports.plan import cluster_conclusions, cluster_page, cluster_table
from hydrainfer.reports.plan.clusters import cells_of, cluster_answer, tokens
from tests.reports.test_page import Closed

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", autouse=True)
def short_simulations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydrainfer.profiling.cluster_answer.SIMULATED", 100)
        yield


@pytest.fixture(scope="module")
def plan():
    question = Profile(model="internal-1t-hybrid", clusters="prfaas-paper", workload="long", slo="ttft=8,tpot=0.05")
    return answer_clusters(prepare_clusters(question), on_progress=lambda *_: None, command="hydrainfer profile <all>")


def changed(plan, **changes):
    return msgspec.structs.replace(plan, **changes)


def alone_first(plan, **changes):
    """The plan if home alone were chosen."""
    alone = plan.named("home alone")
    others = tuple(row for row in plan.deployments if row is not alone)
    return changed(plan, deployments=(alone, *others), **changes)


def test_the_answer_has_threshold_split_rate_and_limit(plan):
    first, *more = cluster_answer(plan)
    assert first == (
        "Send prompts of more than 19,700 tokens to far, with 3 P and 5 D at home: 3.14 requests/s, 2.33 times what "
        "home carries alone, with 2 times the price of devices. What limits it is far prefill."
    )
    assert more == [
        "Home alone does not meet the SLO: even without queues, 85.6 % of its requests have their first token within "
        "8 s."
    ]


def test_costs_are_products(plan):
    lines = cluster_conclusions(plan)
    (devices,) = [line for line in lines if line.startswith("Devices:")]
    assert devices == (
        "Devices: 64 devices of home × 1.25 + 32 devices of far × 2.5 an hour each = 160 an hour; ÷ (3.14 requests/s × "
        "3,600 s) × 1,000 = 14.14 for 1,000 requests."
    )
    best = plan.chosen
    assert best.device_cost == pytest.approx(160.0 / (best.rate * 3600.0) * 1000.0)
    (link,) = [line for line in lines if line.startswith("Link:")]
    n_gb = float(link.split()[1])
    assert n_gb * 0.004 == pytest.approx(best.link_cost, rel=1e-3)
    assert link.endswith(f"× 0.004 per GB = {best.link_cost:.4g}; in all {best.cost:.4g}.")


def test_links_first_tokens_costs_and_the_price_that_ends_it_are_told(plan):
    lines = "\n".join(cluster_conclusions(plan))
    for part in (
        "All prefill far carries 2.33 requests/s",
        "far gets 48.9 % of the requests and sends 12 Gbps, 12% of its link.",
        "TTFT without queues: 2.23 s on average, p90 3.53 s; 100.0 % of the requests are within 8 s.",
        "With the link, a thousand requests cost 16.05 (14.14 devices, 1.908 link); on home alone, 16.47.",
        "far stops paying at 0.00532 per GB (it costs 0.004), with a threshold of 24,800 and 4 P.",
        "fitted to three cells of Table 6",
    ):
        assert part in lines


def test_ttft_with_queues_is_told_of_what_was_simulated(plan):
    queued = Queued(load=0.8, rate=2.5, requests=400, ttft_mean=4.26, ttft_p90=8.51, ttft_met=0.95, second_p90=8.81)
    rows = [msgspec.structs.replace(row, queued=msgspec.UNSET) for row in plan.deployments]
    assert "With queues" not in "\n".join(cluster_conclusions(changed(plan, deployments=tuple(rows))))
    rows[0] = msgspec.structs.replace(plan.chosen, queued=queued)
    lines = cluster_conclusions(changed(plan, deployments=tuple(rows)))
    said = (
        "With queues, far prefill at 2.5 requests/s (80.0 % of its rate, 400 simulated): TTFT 4.26 s on average, p90 "
        "8.51 s, {}; second token p90 8.81 s."
    )
    assert said.format("95.0 % within 8 s") in lines
    rows[0] = msgspec.structs.replace(rows[0], queued=msgspec.structs.replace(queued, ttft_met=0.85))
    lines = cluster_conclusions(changed(plan, deployments=tuple(rows)))
    assert said.format("85.0 % within 8 s, LESS THAN THE SLO: plan for a lower rate") in lines


def test_that_nothing_pays_is_the_first_sentence(plan):
    stays = alone_first(plan, pays=False)
    assert cluster_answer(stays)[0] == (
        "No far cluster pays: a thousand requests cost 16.47 on home alone, and 15.91 at least with one."
    )
    assert cluster_answer(changed(plan, pays=False))[0].startswith(
        "No far cluster pays: a thousand requests cost 16.05"
    )
    free = [msgspec.structs.replace(row, device_cost=None, link_cost=None) for row in stays.deployments]
    unpriced = changed(stays, deployments=tuple(free), pays=None)
    assert cluster_answer(unpriced)[0] == "No far cluster pays: one adds next to nothing to the rate."
    assert len(cluster_answer(unpriced)) == 2


def test_a_plan_without_a_far_cluster_says_so(plan):
    only = changed(plan, deployments=(plan.named("home alone"),), pays=False, links=(), worth=(), curves=None)
    assert cluster_answer(only) == [
        "There is no far cluster.",
        "Home alone carries 1.35 requests/s with 6 P and 2 D. What limits it is home prefill.",
    ]
    assert "How the rate depends" not in cluster_page(only)


def test_a_slo_that_nothing_meets_is_the_answer(plan):
    assert cluster_answer(changed(plan, met=False))[0].startswith("Nothing meets the SLO: even without queues")


def test_a_threshold_is_rounded_and_has_words_for_its_ends():
    assert [tokens(n) for n in (None, 0.0, 126.4, 19_716.7)] == ["–", "all", "126", "19,700"]


def test_the_table_has_each_deployment_with_costs_only_if_they_are_known(plan):
    assert cluster_table(plan).row_count == len(plan.deployments) == 4
    cells = cells_of(plan, plan.chosen)
    assert cells[:6] == ["far prefill", "19,700", "3P 5D", "3.14", "far prefill", "12 Gbps, 12%"]
    free = msgspec.structs.replace(plan.chosen, device_cost=None, link_cost=None)
    assert len(cells_of(plan, free)) == len(cells) - 1
    several = changed(plan, clusters=(*plan.clusters, plan.clusters[1]))
    assert cells_of(several, plan.chosen)[0] == "far prefill: far"


def test_the_page_loads_nothing_and_is_well_formed(plan):
    page = cluster_page(plan)
    checker = Closed()
    checker.feed(page)
    assert not checker.open and not re.search(r"https?://|src=|@import", page)
    assert page.count("<svg") == 3 and "hydrainfer profile &lt;all&gt;" in page
    for part in ("What this does not know", "Prefill-as-a-Service, Table 5", "8 x 8 h20"):
        assert part in page


def test_the_slider_has_the_cheapest_arrangements_and_is_there_only_with_prices(plan):
    page = cluster_page(plan)
    assert "What if a GB costs something else" in page and '"alone":16.4' in page
    assert page.count('"thousand_gb"') == len(plan.curves.prices) >= 2
    without = changed(plan, curves=msgspec.structs.replace(plan.curves, prices=()))
    assert "What if" not in cluster_page(without)


def test_names_are_escaped(plan):
    assert "<b>" not in cluster_page(changed(plan, model="<b>"))
