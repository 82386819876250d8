"""YAML files: what is wrong with one is said in one line, whatever it is."""

import pytest

from hydrainfer.config import read_yaml
from hydrainfer.core import ConfigError

pytestmark = pytest.mark.unit


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "some.yaml"

    def write(text):
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb: 2026-13-01\n", "line 2: '2026-13-01' is no timestamp"),
        ("a: [1, {b: 2026-02-30}]\n", "line 1: '2026-02-30' is no timestamp"),
        ("a: !!int x\n", "line 1: 'x' is no int"),
        ("a: !!int ''\n", "line 1: '' is no int"),
        ("a: !!bool x\n", "line 1: 'x' is no bool"),
        ("a: !!timestamp x\n", "line 1: 'x' is no timestamp"),
        ("a: !!python/name:os.system\n", "line 1: could not determine a constructor"),
        ("? [1]\n: 2\n", "line 1: found unhashable key"),
        ("a: [\n", "line 2: "),
        ("a: 1\nb: 2\na: 3\n", "line 3: 'a' is set twice"),
        ('a: 1\n"a": 3\n', "line 2: 'a' is set twice"),
        ("a:\n  b: {c: 1, c: 1}\n", "line 2: 'c' is set twice"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: " + "{a: " * 5000 + "}" * 5000, "nested too deeply"),
        ("a: " + "1" * 5000, "line 1: '1111"),
    ],
)
def test_a_fault_is_one_line_that_names_the_file(write, text, fault):
    path = write(text)
    with pytest.raises(ConfigError) as e:
        read_yaml(path)
    said = e.value.message
    assert said.startswith(f"{path} is ") and fault in said and "\n" not in said and len(said) < 300


def test_merged_keys_may_be_set_again(write):
    text = "x: {y: {z: &base {a: 1, b: 2}}}\nd: &mid {<<: *base, a: 3}\ne: {<<: *mid, b: 4}\n"
    base, mid = {"a": 1, "b": 2}, {"a": 3, "b": 2}
    assert read_yaml(write(text)) == {"x": {"y": {"z": base}}, "d": mid, "e": {"a": 3, "b": 4}}
    assert read_yaml(write("")) == {} and read_yaml(write("a: 2026-12-01\n"))["a"].year == 2026
