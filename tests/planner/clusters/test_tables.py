"""Files of measured tables."""

import pytest
import yaml

from benchmarks.prfaas.setting import h20_times, h200_times
from benchmarks.prfaas.tables import FOLDER, texts
from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import DecodeBatch, read_table

pytestmark = pytest.mark.unit
TABLE = {
    "model": "m",
    "hardware": "h20",
    "devices": 8,
    "source": "a test",
    "prefill": [[1000, 100, 0.5], [100000, 2000, 20.0]],
    "decode": [[10, 0.02], [20, 0.025], [40, 0.06]],
}


def table(folder, **changes):
    path = folder / "table.yaml"
    path.write_text(yaml.safe_dump(TABLE | changes))
    return read_table(path)


def test_rows_are_tokens_mib_and_seconds(tmp_path):
    times = table(tmp_path).times
    assert times.kv_bytes(1000) == pytest.approx(100 * 2**20) and times.prefill_s(100000) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("tpot_s", "batch"), [(0.05, DecodeBatch(20, 0.025)), (0.02, DecodeBatch(10, 0.02)), (None, DecodeBatch(20, 0.025))]
)
def test_the_batch_with_most_tokens_per_second_within_the_tpot_is_used(tmp_path, tpot_s, batch):
    assert table(tmp_path).batch(tpot_s) == batch


def test_a_tpot_that_no_measured_batch_meets_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no batch was measured within tpot=0.01, the quickest step takes 0.02 s"):
        table(tmp_path).batch(0.01)
    with pytest.raises(ConfigError, match="decode: missing"):
        table(tmp_path, decode=[]).batch(0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": [[1000, 100, 0.5]]}, "prefill: 1 points, at least 2"),
        ({"prefill": [[1000, 100, 0.5], [1000, 100, 0.5]]}, "prefill: 1000 tokens after 1000"),
        ({"prefill": [[1000, 100, 0.5], [2000, -1, 0.5]]}, "prefill: tokens, KV bytes and seconds must be positive"),
        ({"prefill": [[1000, 100], [2000, 100]]}, "expected `array` of length 3"),
        (
            {"prefill": [[1000, 100, 0.5], [2000, 9, 0.6]]},
            "prefill: 2000 tokens leave 9 MiB in the caches, 1000 leave 100",
        ),
        ({"decode": [[0, 0.02]]}, "decode: sequences and seconds must be positive"),
        ({"decode": [[20, 0.02], [10, 0.01]]}, "decode: 10 sequences after 20"),
        ({"devices": 0}, "devices: at least 1"),
        ({"speed": 3}, "unknown option 'speed'"),
        ({"source": None}, "expected `str`"),
    ],
)
def test_a_fault_is_told_with_file_and_field(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as fault:
        table(tmp_path, **changes)
    assert "table.yaml" in fault.value.message


def test_shipped_tables_are_those_of_the_benchmark():
    for name, text in texts().items():
        assert (FOLDER / name).read_text() == text
    for name, times in (("h20", h20_times()), ("h200", h200_times())):
        read = read_table(FOLDER / f"prfaas-{name}.yaml").times
        assert read.prefill_s([200, 20000, 120000]) == pytest.approx(times.prefill_s([200, 20000, 120000]), rel=1e-4)
        assert read.kv_bytes([2000, 120000]) == pytest.approx(times.kv_bytes([2000, 120000]), rel=1e-4)
