"""Engines fitted to what was measured of them."""

import json

import msgspec
import pytest

from benchmarks.calibrating import Measured, calibrated, off_by, predicted, read_measured
from hydrainfer.core import ConfigError
from hydrainfer.planner.costs import read_engine

pytestmark = pytest.mark.unit
POINT = Measured(
    name="x", source="a test", model="llava-1.5-7b", hardware="a100", layout="1EPD", quantity="tpot", value=1.0,
    text=50, pictures=((300, 300),), output=20, requests=12, rate=2.0,
)  # fmt: skip


@pytest.mark.parametrize("quantity", ["throughput", "ttft"])
def test_an_engine_that_is_slower_is_found_out(quantity):
    plain = msgspec.structs.replace(read_engine("vllm"), slower=1.0)
    slow = msgspec.structs.replace(plain, slower=2.5)
    points = []
    for n_text, fit in ((50, True), (400, True), (200, False)):
        m = msgspec.structs.replace(POINT, quantity=quantity, text=n_text, fit=fit, rate=None, output=2)
        points.append(msgspec.structs.replace(m, value=predicted(m, slow)))
    assert all(off_by(m, predicted(m, plain)) > 1.1 for m in points)
    found = calibrated(plain, points)
    assert 0.0 <= found.error < 0.35 and found.slower > 1.3


def test_goodput_is_where_the_target_is_just_met():
    m = msgspec.structs.replace(POINT, quantity="goodput", value=5.0, ttft_s=1.0, tpot_s=0.05, requests=40)
    engine = read_engine("vllm")
    rate = predicted(m, engine)
    assert rate > 0.0 and predicted(msgspec.structs.replace(m, ttft_s=4.0, tpot_s=0.2), engine) >= rate * 0.96


def test_files(tmp_path):
    path = tmp_path / "points.yaml"
    for text, needle in (("points: []", "no points"), ("point: []", "points"), ("points: [{name: 1}]", "name")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=needle):
            read_measured(path)


def test_a_point_that_cannot_be_attained_is_named():
    """No rate meets this TTFT, and an answer of one token has no time per token."""
    m = msgspec.structs.replace(POINT, name="that one", requests=12)
    limits = {"quantity": "goodput", "ttft_s": 1e-4, "tpot_s": 0.05}
    for point in (msgspec.structs.replace(m, **limits), msgspec.structs.replace(m, output=1)):
        with pytest.raises(ConfigError, match=r"that one: the predicted \w+ is 0"):
            calibrated(read_engine("vllm"), [point])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"value": 0.0}, "value must be positive, not 0"),
        ({"value": float("nan")}, "value must be positive, not nan"),
        ({"output": 0}, "output must be positive"),
        ({"rate": -1.0}, "rate must be positive, not -1"),
        ({"tpot_s": 0.0}, "tpot_s must be positive"),
        ({"pictures": ((300, 0),)}, "pictures must be positive"),
    ],
)
def test_measurements_are_positive(changes, said, tmp_path):
    fields = msgspec.to_builtins(POINT) | changes
    (tmp_path / "points.yaml").write_text(f"points: [{json.dumps(fields).replace('NaN', '.nan')}]")
    with pytest.raises(ConfigError, match=f"x: {said}"):
        read_measured(tmp_path / "points.yaml")
