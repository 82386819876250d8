"""The cost file that was measured on a GPU, against what whole instances took there."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.gpu import predicted
from benchmarks.record import ROOT

pytestmark = pytest.mark.cpu


def test_the_simulator_predicts_what_was_measured_on_a_gpu(tmp_path, monkeypatch):
    out = tmp_path / "predicted.json"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["predicted", "--out", str(out)])
    predicted.main()
    results = json.loads(out.read_text())["results"]
    assert set(results) == {"off", "free"}
    assert all(0.75 < one["ratio"] < 1.25 for one in results.values()), results
