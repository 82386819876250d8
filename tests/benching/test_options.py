"""What the flags of `bench` come to, and the command that `trace` names."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from hydrainfer.benching.commands import _tell
from hydrainfer.benching.options import check_like, objective_of, sorted_out
from hydrainfer.config import Slo
from hydrainfer.core import ConfigError
from hydrainfer.workload.measuring import Effort, FirstPass, LoadPlan
from hydrainfer.workload.sources import ChatRequest, Recording, read_workload

pytestmark = pytest.mark.unit
LIMITS = Slo(ttft_s=0.25, tpot_s=0.04)


@pytest.mark.parametrize(
    ("parts", "slo"),
    [([], "ttft=0.25,tpot=0.04"), ([], "ttft:250 tpot:40"), (["ttft:250", "tpot:40"], None)],
)
def test_limits_can_be_written_out(parts, slo):
    assert objective_of(parts, slo, None, "textcaps", True) == LIMITS


def test_a_misspelt_limit_is_no_server():
    assert sorted_out(["localhost:8000", "tpot:40"], ["ttft:250"]) == (["localhost:8000"], ["ttft:250", "tpot:40"])
    with pytest.raises(ConfigError, match="cannot read the objective 'tpto:40'"):
        sorted_out(["http://127.0.0.1:8000", "tpto:40"], ["ttft:250"])
    with pytest.raises(ConfigError, match="one server at a time"):
        sorted_out(["http://a", "http://b"], ["ttft:250"])


def test_a_preset_is_of_a_data_set():
    preset = objective_of([], "llava-1.5-7b:pope", None, "textcaps", True)
    assert preset == objective_of([], "llava-1.5-7b", None, "pope", True)
    assert objective_of([], None, None, "textcaps", False) is None


def test_limits_are_given_once():
    with pytest.raises(ConfigError, match="--goodput or --slo, not both"):
        objective_of(["ttft:250"], "tpot=0.04", None, "textcaps", True)
    with pytest.raises(ConfigError):
        objective_of([], "nothing=3", None, "textcaps", True)


@pytest.mark.parametrize(("n", "said"), [(800, "--max-rate 20"), (100, "--max-rate 2.5 --requests 25")])
def test_a_recording_has_enough_requests_for_the_command_that_trace_names(n, said):
    out = io.StringIO()
    made = FirstPass(Recording(dataset="d", chats=(ChatRequest(text="why?"),) * n), (), "")
    _tell(Console(file=out), made, Path("r.jsonl"), None, "")
    assert f"tpot:40 {said}\n" in out.getvalue()
    numbers = dict(zip(said.split()[::2], map(float, said.split()[1::2])))
    effort = Effort(requests=int(numbers.get("--requests", 100)))
    assert effort.n_at(numbers["--max-rate"]) * 2 ** (LoadPlan().max_runs - 1) <= n


def test_answers_are_like_those_of_a_model_that_is_known():
    textcaps = read_workload("textcaps")
    for known in (None, "llava-1.5-7b", "LLaVA-1.5-7b-hf", "llava-1.5-7b-x10:pope"):
        check_like(known, textcaps)
    with pytest.raises(ConfigError, match=r"--like llava-2: this model is not known; textcaps has llava-1.5-7b, "):
        check_like("llava-2", textcaps)


@pytest.mark.parametrize(("name", "value"), [("requests", 0), ("min-seconds", -1.0), ("min-seconds", float("nan"))])
def test_an_effort_out_of_range_is_named(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be at least [01], not {value}"):
        Effort(**{"min_s" if name == "min-seconds" else name: value})
