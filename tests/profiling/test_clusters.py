"""`hydrainfer profile --clusters`, from what was typed to the plan."""

import json
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from hydrainfer.cli import main
from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import ClusterPlan
from hydrainfer.profiling.cluster_answer import answer_clusters
from hydrainfer.profiling.cluster_question import prepare_clusters
from hydrainfer.profiling.options import Profile

pytestmark = pytest.mark.cpu
SHIPPED = Path(__file__).parents[2] / "configs" / "clusters"
MODEL = "internal-1t-hybrid"  # of the paper's tables
ASKED = Profile(model=MODEL, clusters="prfaas-paper", workload="long", slo="ttft=12,tpot=0.05")
DESCRIBED = {
    "clusters": {
        "home": {"hardware": "h20", "devices": 8, "price": 1.25},
        "far": {"hardware": "h200", "devices": 4, "price": 2.5, "roles": ["P"]},
    },
    "links": [{"from": "far", "to": "home", "gbps": 100, "price_per_gb": 0.0001}],
}


def answered(**changes):
    asked = prepare_clusters(msgspec.structs.replace(ASKED, **changes))
    return answer_clusters(asked, on_progress=lambda *_: None, command="hydrainfer profile …")


def run(monkeypatch, *words):
    """The exit status of a command line."""
    monkeypatch.setattr(sys, "argv", ["hydrainfer", "profile", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0


@pytest.fixture(scope="module", autouse=True)
def short_simulations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydrainfer.profiling.cluster_answer.SIMULATED", 100)
        yield


@pytest.fixture(scope="module")
def plan():
    return answered()


@pytest.fixture
def own(tmp_path):
    """A function that writes the paper's clusters with changes to the file, and to the table of a cluster."""

    def write(change=lambda content: None, table=None, edit=lambda content: None):
        shutil.copytree(SHIPPED / "times", tmp_path / "times", dirs_exist_ok=True)
        content = yaml.safe_load((SHIPPED / "prfaas-paper.yaml").read_text())
        change(content)
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        if table is not None:
            rows = yaml.safe_load((tmp_path / "times" / table).read_text())
            edit(rows)
            (tmp_path / "times" / table).write_text(yaml.safe_dump(rows))
        return path

    return write


def described(folder, change=lambda content: None):
    """A file of clusters without tables."""
    content = json.loads(json.dumps(DESCRIBED))
    change(content)
    path = folder / "described.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_the_paper_s_clusters_have_the_paper_s_answer(plan):
    best, alone, naive = plan.chosen, plan.named("home alone"), plan.named("all prefill far")
    assert (best.n_prefill, best.n_decode) == (3, 5) and best.threshold == pytest.approx(19_700, rel=0.01)
    assert best.rate == pytest.approx(3.143, abs=0.005) and best.limit == "far prefill"
    assert (alone.n_prefill, alone.n_decode) == (6, 2) and naive.rate == pytest.approx(2.334, abs=0.005)
    assert best.egress_gbps == pytest.approx(12.0, abs=0.1) and best.link_share == pytest.approx(0.12, abs=0.001)
    assert (best.ttft_mean, best.ttft_p90) == pytest.approx((2.23, 3.53), abs=0.02)
    assert plan.pays and plan.met and plan.worth[0].price_per_gb == pytest.approx(0.0053, abs=0.0001)
    assert best.cost == pytest.approx(best.device_cost + best.request_gb * 1000 * 0.004)


def test_json_holds_the_plan_with_queues_for_what_is_chosen_and_home_alone(plan):
    encoded = msgspec.json.encode(plan)
    assert msgspec.json.decode(encoded, type=ClusterPlan) == plan
    assert [row.name for row in plan.deployments if row.queued] == ["far prefill", "home alone"]
    for row in plan.deployments[:2]:
        assert row.queued.rate == pytest.approx(0.8 * row.rate)
        assert row.ttft_p90 < row.queued.ttft_p90 < row.queued.second_p90 < 6 * row.ttft_p90
    promised = {"deployments", "met", "pays", "worth", "curves", "unknown", "clusters", "links"}
    assert promised <= json.loads(encoded).keys()


def test_the_command_writes_plan_and_page(monkeypatch, capsys, tmp_path):
    words = [MODEL, "--clusters", SHIPPED / "prfaas-paper.yaml", "--workload", "long", "--slo", "ttft=8,tpot=0.05"]
    assert run(monkeypatch, *words, "--out", tmp_path, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "plan.json").read_text())
    assert "Send prompts of more than 19,700 tokens to far" in err and (tmp_path / "report.html").is_file()


def test_the_first_sentence_is_that_no_far_cluster_pays(monkeypatch, capsys, own):
    def dear(content):
        content["links"][0]["price_per_gb"] = 0.02

    assert run(monkeypatch, MODEL, "--clusters", own(dear), "--workload", "long", "--slo", "ttft=12,tpot=0.05") == 0
    sentences = capsys.readouterr().out.split("┘")[-1].strip()
    assert sentences.startswith("No far cluster pays: a thousand requests cost 16.47 on home alone, and 22.67 at least")


def test_prompts_below_every_sensible_threshold_stay_at_home():
    plan = answered(workload="text", slo="ttft=8,tpot=0.05")
    assert plan.pays is False and plan.chosen.name == "home alone" and plan.met
    assert any("counted by words" in line for line in plan.unknown)
    assert any("shorter than all that was measured" in line for line in plan.unknown)


def test_a_slo_that_nothing_meets_ends_with_status_1(monkeypatch, capsys):
    assert run(monkeypatch, MODEL, "--clusters", "prfaas-paper", "--workload", "long", "--slo", "ttft=3,tpot=0.05") == 1
    assert "Nothing meets the SLO: even without queues" in capsys.readouterr().out


def test_the_objective_cost_has_the_cheapest_arrangement_first():
    plan = answered(objective="cost")
    assert plan.chosen.cost == min(row.cost for row in plan.deployments)
    assert plan.chosen.n_prefill == 4


def test_a_tighter_limit_of_the_ttft_sends_more_away():
    """The cheapest threshold leaves home prompts that take 3.9 s there."""
    loose, tight = (answered(objective="cost", slo=f"ttft={ttft},tpot=0.05") for ttft in (12, 3.7))
    assert tight.chosen.threshold < loose.chosen.threshold and tight.chosen.ttft_met >= 0.9
    assert tight.chosen.cost >= loose.chosen.cost


def test_without_the_price_of_a_gb_or_of_anything_the_plan_says_so(own):
    def without_gb(content):
        del content["links"][0]["price_per_gb"]

    plan = answered(clusters=str(own(without_gb)))
    assert any("has no price_per_gb" in line for line in plan.unknown) and plan.worth[0].price_per_gb > 0.005

    def without_any(content):
        without_gb(content)
        for entry in content["clusters"].values():
            del entry["price"]

    plan = answered(clusters=str(own(without_any)))
    assert plan.pays is None and not plan.worth and plan.chosen.cost is None and plan.chosen.far == ("far",)
    assert any("Prices are not in the file" in line for line in plan.unknown)
    with pytest.raises(ConfigError, match="--objective cost needs the price"):
        answered(clusters=str(own(without_any)), objective="cost")


def test_described_devices_are_marked_as_assumed(tmp_path):
    question = {"model": "llama-3.1-8b", "workload": "text", "slo": "ttft=8,tpot=0.05"}
    plan = answered(**question, clusters=str(described(tmp_path)))
    assert not any(cluster.measured for cluster in plan.clusters)
    assert any("The times of home, far are ASSUMED" in line for line in plan.unknown)
    assert plan.chosen.rate > 0.0 and plan.clusters[0].step_s <= 0.05
    slower = answered(**question, clusters=str(described(tmp_path)), engine="vllm")
    assert slower.clusters[0].batch < plan.clusters[0].batch
    path = str(described(tmp_path, lambda c: c["clusters"]["home"].update(hardware="h200")))
    question |= {"slo": "ttft=8,tpot=0.0068", "clusters": path}
    as_saved, fp8 = (answered(**question, weights=weights) for weights in ("as-dtype", "fp8"))
    assert as_saved.clusters[0].batch < fp8.clusters[0].batch


def test_what_a_prefix_cache_would_have_is_left_out(tmp_path):
    question = {"model": "qwen3-vl-4b", "slo": "ttft=8,tpot=0.05", "clusters": str(described(tmp_path))}
    plan = answered(**question, workload="chat", requests=200)
    note = next(line for line in plan.unknown if line.startswith("Prefix caches"))
    assert "are left out, which an unlimited cache would have" in note
    assert any("Pictures count as tokens" in line for line in plan.unknown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "8"], "--devices is for devices in one place: leave it out, or --clusters"),
        (["--hardware", "h20"], "--hardware means nothing with --clusters"),
        (["--rate", "3"], "--rate means nothing with --clusters"),
        (["--tensor-parallel", "8"], "--tensor-parallel means nothing"),
        (["--validate"], "--validate means nothing"),
        (["--engine", "vllm"], "--engine is for clusters without measured times, and all have them"),
        (["--requests", "50"], "--requests is for requests that are drawn"),
        (["--objective", "ttft"], "--objective is goodput or cost with --clusters, not 'ttft'"),
        (["--target", "2"], "--target is a share"),
        (["--slo", "tpot=0.05", "--target", "0.8"], "--target is for a limit of the TTFT, and --slo has none"),
        (["--slo", "e2e=9"], "--slo e2e is not planned for"),
        (["--slo", "ttft=8,tpot=0.01"], "prfaas-h20.yaml: decode: no batch was measured within tpot=0.01"),
        (["--clusters", "nothing"], "no clusters called 'nothing'"),
        (["--workload", "pope"], "request 0 has pictures, but internal-1t-hybrid cannot see"),
        (["--out", "/dev/null"], "is a file, not a folder"),
    ],
)
def test_an_option_that_is_wrong_is_one_line(monkeypatch, capsys, words, message):
    usual = [MODEL, "--clusters", "prfaas-paper", "--workload", "long", "--slo", "ttft=8,tpot=0.05"]
    assert run(monkeypatch, *usual, *words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_there_has_to_be_something_to_plan_for(monkeypatch, capsys):
    assert run(monkeypatch, "llava-next-7b", "--hardware", "h800") == 2
    assert capsys.readouterr().err == "error: give --devices N, the number to plan for, or --clusters FILE\n"


@pytest.mark.parametrize(
    ("table", "edit", "message"),
    [
        (
            "prfaas-h200.yaml",
            lambda t: t["prefill"].pop(),
            "prfaas-h200.yaml: prefill: the last point has 32,768 tokens",
        ),
        ("prfaas-h20.yaml", lambda t: t.pop("decode"), "prfaas-h20.yaml: decode: missing"),
        ("prfaas-h20.yaml", lambda t: t.update(devices=4), "prfaas-h20.yaml: hardware: measured on 4 h20"),
        ("prfaas-h20.yaml", lambda t: t.update(model="other"), "prfaas-h20.yaml: model: measured with other, not with"),
        ("prfaas-h20.yaml", lambda t: t.update(speed=1), "unknown option 'speed'"),
        ("prfaas-h200.yaml", lambda t: t["prefill"].reverse(), "prefill: 32768 tokens after 131072"),
    ],
)
def test_a_table_that_is_wrong_is_one_line(monkeypatch, capsys, own, table, edit, message):
    path = own(table=table, edit=edit)
    assert run(monkeypatch, MODEL, "--clusters", path, "--workload", "long", "--slo", "ttft=8,tpot=0.05") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["clusters"]["far"].update(price=-2), "own.yaml: clusters.far.price: -2 is no price"),
        (lambda c: c["links"][0].update(to="moon"), "own.yaml: links[0].to: no cluster moon"),
        (lambda c: c["clusters"]["home"].update(roles=["P"]), "own.yaml: clusters: nobody decodes"),
        (lambda c: c["clusters"]["home"].update(times="none.yaml"), "none.yaml"),
        (lambda c: c["clusters"]["home"].update(gpus=3), "unknown field `gpus`"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(monkeypatch, capsys, own, change, message):
    assert run(monkeypatch, MODEL, "--clusters", own(change), "--workload", "long", "--slo", "ttft=8,tpot=0.05") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "workload", "change", "message"),
    [
        ("qwen2.5-vl-72b", "text", lambda c: None, "clusters.home.hardware: qwen2.5-vl-72b as D does not fit h20"),
        (
            "llama-3.1-8b",
            "text",
            lambda c: c["clusters"]["far"].update(hardware="abacus"),
            "clusters.far.hardware: no hardware called 'abacus'",
        ),
        ("llama-3.1-8b", "long", lambda c: None, "llama-3.1-8b takes 131,072 tokens"),
        ("no-such-model", "text", lambda c: None, "no model 'no-such-model'"),
    ],
)
def test_a_model_that_described_devices_cannot_serve_is_one_line(
    monkeypatch, capsys, tmp_path, model, workload, change, message
):
    path = described(tmp_path, change)
    assert run(monkeypatch, model, "--clusters", path, "--workload", workload, "--slo", "ttft=8,tpot=0.05") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
