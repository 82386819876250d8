"""Which interval is blamed for each limit that a request missed."""

import pytest

from hydrainfer.judging import Verdict, blamed, per_token

pytestmark = pytest.mark.unit
USUAL = {"prefill": 0.3, "decode": 0.01}


@pytest.mark.parametrize(
    ("spent", "ttft", "tpot", "e2e"),
    [
        ({"prefill_queue": 0.2, "prefill": 0.4, "decode": 0.5}, "prefill_queue", "decode", "decode"),
        ({"prefill": 0.4, "pd_migration": 0.05, "decode": 0.1}, "prefill", "pd_migration", "prefill"),
        ({"prefill": 0.2, "decode": 0.1, "outside": 1.0}, "outside", "outside", "outside"),
    ],
)
def test_the_interval_that_exceeds_the_usual_most_is_blamed(spent, ttft, tpot, e2e):
    assert blamed(Verdict(False, False, False), spent, USUAL, 11) == {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    assert blamed(Verdict(True, True, False), spent, USUAL, 11) == {"e2e": e2e}


def test_decode_is_compared_per_token():
    assert per_token({"prefill": 1.0, "decode": 1.0}, 11) == {"prefill": 1.0, "decode": pytest.approx(0.1)}
    assert per_token({"decode": 1.0}, 1) == {"decode": 1.0}
    late = Verdict(True, False, True)
    spent = {"decode": 0.14, "decode_queue": 0.05}
    assert blamed(late, spent, USUAL, 11) == {"tpot": "decode_queue"}
    assert blamed(late, spent, USUAL, 6) == {"tpot": "decode"}
