"""What the planner chose is served: `--layout auto`, `--token-budget auto`, and the layout's file of `profile`."""

import io
import shlex
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hydrainfer.builtin import PICTURE
from hydrainfer.chatting import Server, ask_about
from hydrainfer.cli import app
from hydrainfer.config import load, read_layout
from hydrainfer.core import ConfigError
from hydrainfer.planner.costs import read_cost_file
from hydrainfer.profiling.auto import settle
from hydrainfer.serving import serve_in_background
from tests.caches import take_own_cache
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.multi
FAST, MEASURED = "configs/costs/fast.yaml", "configs/cost_models/builtin-cpu.yaml"
EMULATED = {"device": "emulated", "cost_model": FAST, "launcher": "inproc", "port": 0}
EXPECTED = {"workload": "benchmarks/compare/short-answers.yaml", "slo": "ttft=0.2,tpot=0.02"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    take_own_cache(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


def quiet():
    return Console(quiet=True)


def answers(loaded):
    with serve_in_background(loaded, quiet()) as (url, instance):
        text = "".join(ask_about(Server(url, instance.name), str(PICTURE), "What is this?", 8))
        health = httpx.get(f"{url}/health", timeout=PATIENCE_S).json()
    return text, health


@pytest.fixture
def short_plans(monkeypatch):
    """Plans of few requests: what is planned is served as well, whatever it is."""
    monkeypatch.setattr("hydrainfer.profiling.traces.REQUESTS", 100)


@pytest.mark.usefixtures("short_plans")
@pytest.mark.parametrize("costs", [FAST, MEASURED])
def test_layout_auto_plans_and_serves(cache, costs):
    given = {**EMULATED, **EXPECTED, "layout": "auto", "devices": 2, "cost_model": costs}
    loaded = settle(load(given), quiet())
    assert Path(loaded.config.layout).is_relative_to(cache) and loaded.provenance["layout"] == "planned"
    assert len(read_layout(loaded.config.layout)) == 2
    text, _ = answers(loaded)
    assert text


def said_next(result):
    """The last line of a command, as a shell reads it."""
    assert result.exit_code == 0, result.output
    return shlex.split(result.output.splitlines()[-1].removeprefix("next: "), comments=True)


def test_the_file_of_a_search_over_eight_starts(tmp_path, monkeypatch):
    out = tmp_path / "a [b] plan"
    args = ["builtin", "--devices", "8", "--cost-model", FAST, "--workload", EXPECTED["workload"]]
    args += ["--slo", EXPECTED["slo"], "--requests", "30", "--processes", "1", "--out", str(out)]
    result = CliRunner().invoke(app, ["profile", *args])
    served = []
    monkeypatch.setattr("hydrainfer.serving.serve_forever", lambda loaded, _: served.append(loaded))
    command, *words = said_next(result)
    assert command == "hydrainfer" and CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    wanted = {"layout": str(out / "layout.yaml"), "device": "emulated", "cost_model": FAST, "slo": EXPECTED["slo"]}
    assert served[0].config == load(wanted).config
    assert {p.name for p in out.iterdir()} >= {"plan.json", "report.html", "layout.yaml"}
    loaded = load({**EMULATED, "layout": str(out / "layout.yaml")})
    assert len(read_layout(loaded.config.layout)) == 8
    text, _ = answers(settle(loaded, quiet()))
    assert text


def test_a_configuration_without_weights_is_not_what_to_serve_next(tmp_path):
    args = ["llava-next-7b", "--devices", "1", "--hardware", "h800", "--requests", "60", "--processes", "1"]
    args += ["--slo", "ttft=8,tpot=0.08", "--dtype", "bfloat16", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["profile", *args])
    layout = str(tmp_path / "layout.yaml")
    wanted = ["--layout", layout, "--dtype", "bfloat16", "--slo", "ttft=8,tpot=0.08"]
    assert said_next(result) == ["hydrainfer", "serve", "CHECKPOINT", *wanted]
    assert result.output.rstrip().endswith("   # CHECKPOINT: the directory with llava-next-7b's weights")


def test_budgets_auto_are_values_that_were_measured():
    given = {**EXPECTED, "cost_model": MEASURED, "layout": "1E1PD", "token_budget": "auto", "image_budget": "auto"}
    loaded = settle(load({**given, "launcher": "inproc", "port": 0, "device": "cpu"}), quiet())
    e, pd = read_layout(loaded.config.layout)
    assert e.own["image_budget"] in (1, 2, 4, 8) and set(pd.own) == {"token_budget", "overlap"}
    assert loaded.config.cost_model is None
    text, _ = answers(loaded)
    assert text


def test_an_slo_by_name_is_kept_as_limits_by_what_serves():
    given = {**EXPECTED, "slo": "llava-1.5-7b:textcaps", "cost_model": MEASURED, "layout": "1EPD", "device": "cpu"}
    config = settle(load({**given, "token_budget": "auto"}), quiet()).config
    assert (config.slo, config.device, config.dtype) == ("ttft=0.25,tpot=0.04", "cpu", "float32")


@pytest.mark.usefixtures("short_plans")
def test_options_that_no_plan_counts_with_are_named():
    console = Console(record=True, quiet=False, file=io.StringIO())
    settle(
        load({**EMULATED, **EXPECTED, "layout": "auto", "devices": 1, "kv_cache_gib": 1.0, "order": "fcfs"}), console
    )
    assert "the plan counts with the defaults of --order, --kv-cache-gib" in console.export_text()


@pytest.mark.usefixtures("short_plans")
def test_host_memory_and_the_store_are_planned_with_and_served(tmp_path):
    console, tiers = Console(record=True, file=io.StringIO()), {"host_cache_gib": 0.25, "store": f"dir:{tmp_path}/s"}
    loaded = settle(load({**EMULATED, **EXPECTED, **tiers, "layout": "auto", "devices": 1}), console)
    (instance,) = read_layout(loaded.config.layout)
    assert {name: instance.own[name] for name in tiers} == tiers
    assert not any(name in console.export_text(clear=False) for name in ("--host-cache-gib", "--store"))
    assert not (tmp_path / "s").exists(), "a server makes the folder, not a plan"


def test_the_measured_engine_is_the_one_that_will_serve(monkeypatch):
    measured = []

    def measure_model(model, *, config, journal, **_):
        measured.append((config, journal))
        file = read_cost_file(Path(MEASURED))
        return msgspec.structs.replace(file, quantization=config.quantization, dtype=config.dtype)

    monkeypatch.setattr("hydrainfer.costing.measure.measure_model", measure_model)
    given = {**EXPECTED, "layout": "1EPD", "token_budget": "auto", "device": "cpu", "port": 0}
    for more in ({}, {"dtype": "bfloat16"}, {"native_kernels": False}, {"quantization": "int8"}):
        settle(load({**given, **more}), quiet())
    configs, journals = zip(*measured)
    assert {c.device for c in configs} == {"cpu"} and [c.native_kernels for c in configs] == [True, True, False, True]
    assert configs[1].dtype == "bfloat16" and "auto" not in {c.dtype for c in configs}, "what the server would choose"
    assert configs[3].quantization == "int8"
    assert len(set(journals)) == 4, "each is measured for itself"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slo": "llava-7b"}, "--slo llava-7b names a preset or a file, which is for --layout auto"),
        ({"slo": "foo=1"}, "cannot read the objective 'foo=1'"),
        ({"slo": "runs/rate=2/slo.yaml"}, "names a preset or a file"),
        ({"layout": "auto", "slo": "ttft=1", "cost_model": FAST, "device": "emulated"}, "needs --devices"),
        ({"layout": "auto", "devices": 2, "token_budget": 512}, "chooses --token-budget as well"),
        ({"layout": "1EPD", "devices": 2, "token_budget": "auto"}, "--devices is for --layout auto"),
        ({"layout": "configs/layouts/1epd.yaml", "token_budget": "auto"}, "not a file"),
        ({"layout": "auto", "devices": 2, "cost_model": FAST, "device": "emulated"}, "give the SLO"),
        ({**EMULATED, "layout": "auto", "devices": 1, "slo": "ttft=0.0001"}, "TTFT ≤ 0.1 ms is impossible"),
        ({"token_budget": "many"}, "token_budget"),
    ],
)
def test_what_cannot_be(given, said):
    with pytest.raises(ConfigError, match=said):
        settle(load(given), quiet())


def test_elsewhere_auto_is_refused():
    with pytest.raises(ConfigError, match="hydrainfer serve"):
        read_layout("auto")
