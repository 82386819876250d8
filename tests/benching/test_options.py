"""What the flags of `bench` come to."""

import pytest

from hydrainfer.benching.options import objective_of, sorted_out
from hydrainfer.config import Slo
from hydrainfer.core import ConfigError

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
