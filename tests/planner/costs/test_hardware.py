"""Descriptions of devices are read, or refused in one line that says what there is."""

from pathlib import Path

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.planner.costs.hardware import Hardware, read_hardware

pytestmark = pytest.mark.unit
SHIPPED = sorted(p.stem for p in (Path(__file__).parents[3] / "configs" / "hardware").glob("*.yaml"))
GOOD = "flops_per_s: 1e14\nbytes_per_s: 1.0e+12\nmemory_bytes: 80.0e9\nlink_bytes_per_s: 1.0e+11\n"


def test_these_ship():
    assert SHIPPED == ["a100", "h100", "h20", "h200", "h800", "l40s", "this-cpu"]


@pytest.mark.parametrize("name", SHIPPED)
def test_each_says_where_its_numbers_are_from(name):
    hardware = read_hardware(name)
    assert hardware.name == name and hardware.notes
    assert hardware.link.bytes_per_s == hardware.link_bytes_per_s * hardware.link_efficiency


def test_hardware_figures_agree_with_the_ratios_of_datasheets():
    h100, h200, h800, h20 = (read_hardware(n) for n in ("h100", "h200", "h800", "h20"))
    assert h800.flops_per_s == h100.flops_per_s == h200.flops_per_s
    assert h800.link_bytes_per_s < h100.link_bytes_per_s and h200.bytes_per_s > h100.bytes_per_s
    assert h20.flops_per_s / h20.bytes_per_s < h100.flops_per_s / h100.bytes_per_s / 5


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert read_hardware(str(path)) == Hardware(
        name="mine", flops_per_s=1e14, bytes_per_s=1e12, memory_bytes=80e9, link_bytes_per_s=1e11
    )


def test_an_unknown_name_lists_the_known():
    with pytest.raises(
        ConfigError, match=r"no hardware called 'h999': .*a100, h100, .*copy configs/hardware/h100.yaml"
    ):
        read_hardware("h999")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "flopps_per_s: 1", "did you mean flops_per_s"),
        ("bytes_per_s: 1", "missing required field"),
        (GOOD + "message_s: fast", "expected `float`"),
        (GOOD + "language_efficiency: 1.2", "language_efficiency must be a share above 0 and at most 1"),
        (GOOD + "lane_efficiency: -1", "lane_efficiency must be between 0 and 1"),
        (GOOD.replace("80.0e9", "0"), "memory_bytes must be positive"),
        (GOOD + "step_base_s: -1", "step_base_s must not be negative"),
        (GOOD + "dtype: int8", "invalid enum value"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as e:
        read_hardware(str(path))
    assert "\n" not in str(e.value)
