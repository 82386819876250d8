"""Thirty schemas of the JSON Schema organisation's own test suite (MIT), asked for over HTTP; all of them: `b27`."""

from pathlib import Path

import pytest

from benchmarks.b27_json_schemas import arguments, experiment

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
SUITE = Path(__file__).with_name("suite.json")


def test_every_finished_answer_is_valid():
    results = experiment(arguments([str(SUITE), "--max-tokens", "80"]))
    assert results["schemas"] == 30 and not results["wrong"], results["wrong"]
    assert results["kinds"]["valid"] >= 20, results["kinds"]
