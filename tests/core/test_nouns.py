import msgspec
import numpy as np
import pytest

from hydrainfer.core import ConfigError, InvalidRequest, Layout, Role, SamplingParams, Stage
from hydrainfer.core.random import draw_key

pytestmark = pytest.mark.unit


def test_roles_know_their_stages_and_lanes():
    assert Role.parse("EP").runs(Stage.ENCODE)
    assert not Role.parse("EP").runs(Stage.DECODE)
    assert [len(Role.parse(r).lanes) for r in ("E", "P", "D", "EP", "ED", "PD", "EPD")] == [1, 1, 1, 2, 2, 1, 2]
    with pytest.raises(ConfigError, match="roles are E, P, D"):
        Role.parse("PE")


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("1EPD", ["EPD"]),
        ("1E2P1D", ["E", "P", "P", "D"]),
        ("1E2PD+1EPD", ["E", "PD", "PD", "EPD"]),
        ("1E1P2D+1PD+2EPD", ["E", "P", "D", "D", "PD", "EPD", "EPD"]),
        ("3ED5P", ["ED"] * 3 + ["P"] * 5),
        ("2P1D", ["P", "P", "D"]),  # enough for a model that takes text only
    ],
)
def test_layouts_read_back_as_written(text, roles):
    layout = Layout.parse(text)
    assert [str(r) for r in layout.instances] == roles
    assert str(layout) == text
    assert Layout.parse("+".join(f"1{role}" for role in roles)) == layout


@pytest.mark.parametrize("text", ["", "EPD", "1XPD", "2E", "1E1P", "0EPD", "1EPD,", "1DE1P", "1E-1P1D"])
def test_impossible_layouts_are_refused(text):
    with pytest.raises(ConfigError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", 99),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_p", 1.5),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("logit_bias", ((1, 200.0),)),
        ("logit_bias", ((1, 2.0),) * 1025),
        ("stop_token_ids", [5] * 1025),
        ("seed", 2**64),
        ("temperature", "x"),
        ("top_p", None),
        ("max_tokens", 2.5),
        ("n", "2"),
        ("stop", 5),
        ("stop", (5,)),
        ("stop", "\ud800"),
        ("stop_token_ids", 5),
        ("stop_token_ids", ("5",)),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "x"}),
        ("logit_bias", (5,)),
        ("logit_bias", 5),
    ],
)
def test_sampling_values_out_of_range_name_their_field(field, value):
    with pytest.raises(InvalidRequest) as e:
        SamplingParams(**{field: value})
    assert e.value.param == field


@pytest.mark.parametrize("flag", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "drafts"])
def test_a_flag_is_a_truth_value_and_none_is_its_default(flag):
    for value in ("false", "no", 2, []):
        with pytest.raises(InvalidRequest, match=f"{flag} must be True or False"):
            SamplingParams(**{flag: value})
    assert SamplingParams(**{flag: None}) == SamplingParams()


def test_the_forms_of_other_libraries():
    assert SamplingParams(stop="END").stop == ("END",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(logit_bias={5: 1.0, 6: -2}).logit_bias == ((5, 1.0), (6, -2))
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": np.float64(0.5), "top_k": True, "ignore_eos": 1, "skip_special_tokens": None},
        {"logit_bias": {True: np.float64(1.5)}, "stop_token_ids": (True,), "min_tokens": True},
        {"ignore_eos": None, "drafts": None, "include_stop_str_in_output": np.bool_(True)},
        {"logit_bias": [[5, 1.0]], "top_k": 2**63 - 1, "seed": 2**64 - 1},
    ],
)
def test_a_message_can_carry_every_value_that_is_accepted(fields):
    """Otherwise one request would end the hub, or be lost on its way."""
    sampling = SamplingParams(**fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling


def test_a_length_that_no_message_can_carry_is_refused():
    with pytest.raises(InvalidRequest) as e:
        SamplingParams(max_tokens=None, min_tokens=10**30)
    assert e.value.param == "min_tokens"


def test_keys_of_draws_depend_on_each_argument_and_are_uniform():
    base = draw_key(1, 0, 5)
    assert base == draw_key(1, 0, 5)
    assert len({base, draw_key(2, 0, 5), draw_key(1, 1, 5), draw_key(1, 0, 6)}) == 4
    keys = [draw_key(7, 3, i) for i in range(20_000)]
    assert all(0 <= key < 1 << 64 for key in keys)
    counts = [0] * 20
    for key in keys:
        counts[key * 20 >> 64] += 1
    chi2 = sum((c - 1000) ** 2 / 1000 for c in counts)
    assert chi2 < 50  # 19 degrees of freedom: p < 1e-4
