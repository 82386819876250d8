"""Layouts as text and as files, with what each instance gets."""

from pathlib import Path

import pytest

from hydrainfer.config import MachineShare, ServeConfig, choose_launcher, read_layout, read_yaml, settle, stores_of
from hydrainfer.core import ConfigError, Layout

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
LAYOUTS = ROOT / "configs" / "layouts"


def write(folder, text):
    path = folder / "layout.yaml"
    path.write_text(text)
    return str(path)


def test_text_and_file_name_the_same_instances():
    text, file = read_layout("1E2PD+1EPD"), read_layout(str(LAYOUTS / "1e2pd-1epd.yaml"))
    assert [s.name for s in text] == [s.name for s in file] == ["E0", "PD0", "PD1", "EPD0"]
    assert [s.role for s in text] == list(Layout.parse("1E2PD+1EPD").instances)
    assert all(s.share == MachineShare() for s in text)
    assert [s.own.get("kv_cache_gib") for s in file] == [None, 2, 2, None]


@pytest.mark.parametrize("path", sorted(LAYOUTS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_can_be_read(path):
    assert read_layout(str(path))


def test_a_file_says_all_that_an_instance_gets(tmp_path):
    one = "role: EPD, cpus: 2, gpus: 0.5, threads: 3, cores: [0, 1], resources: {vision: 1}, image_cache_gib: 0.25"
    (spec,) = read_layout(write(tmp_path, f"instances: [{{{one}, overlap: slice}}]"))
    assert spec.share == MachineShare(cpus=2, gpus=0.5, threads=3, cores=(0, 1), resources={"vision": 1})
    assert spec.own == {"image_cache_gib": 0.25, "overlap": "slice"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instances: [{role: E}, {role: P}]", r"layout.yaml has no instance that runs decode"),
        ("instances: [{role: EPD, cout: 2}]", r"unknown option 'cout' \(.*instance 1\); did you mean count\?"),
        ("instance: [{role: EPD}]", r"unknown option 'instance' .*did you mean instances"),
        ("instances: [{role: EPD, count: 0}]", r"instance 1: expected `int` >= 1 - at `\$.count`"),
        ("instances: [{role: X}]", r"instance 1: unknown role 'X'"),
        ("instances: [{role: EPD, overlap: auto}]", r"instance 1: invalid enum value 'auto' - at `\$.overlap`"),
        ("instances: [{count: 1}]", r"instance 1: object missing required field `role`"),
        (
            "instances: [{role: EPD, gpus: 1.5}]",
            r"instance 1: gpus must be at most 1, got 1.5: an instance computes on one device",
        ),
        ("instances: [{role: EPD, kv_cache_gib: .inf}]", r"instance 1: kv_cache_gib must be finite"),
        ("instances: [{role: EPD, resources: {GPU: 1}}]", r"instance 1: GPU is given by its own key"),
        ("instances: [EPD]", r"instance 1: must hold keys and values"),
        ("instances: []", r"must have a list `instances`"),
        ("- role: EPD", r"must hold keys and values"),
        ("instances: [", r"is not valid YAML: line 1: "),
        ("instances:\n- role: EPD\n  count: 2\n - x", r"is not valid YAML: line 4: "),
    ],
)
def test_a_wrong_file_says_so_in_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as e:
        read_layout(write(tmp_path, text))
    assert "\n" not in str(e.value)


def test_the_stores_of_all_instances(tmp_path):
    text = "instances: [{role: E}, {role: P, store: 'dir:/p'}, {role: D, count: 2, store: 'dir:/d'}]"
    specs = read_layout(write(tmp_path, text))
    assert stores_of(ServeConfig(model="m"), specs) == ["dir:/p", "dir:/d"]
    assert stores_of(ServeConfig(model="m", store="dir:/x"), specs) == ["dir:/x", "dir:/p", "dir:/d"]
    assert stores_of(ServeConfig(model="m", store="dir:/x"), specs[1:]) == ["dir:/p", "dir:/d"]
    assert stores_of(ServeConfig(model="m", store="dir:/x"), ()) == ["dir:/x"]
    assert stores_of(ServeConfig(model="m"), read_layout("1E1P1D")) == []


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.yml: No such file"):
        read_layout(str(tmp_path / "none.yml"))


def test_options_fill_what_the_file_leaves_open(tmp_path):
    specs = read_layout(write(tmp_path, "instances: [{role: EPD, gpus: 1, cpus: 3, threads: 5}, {role: EPD}]"))
    config = ServeConfig(model="m", cpu_share=2, gpu_share=0.5, threads=4)
    given, open_ = settle(specs, config, on_gpu=True)
    assert given.share == MachineShare(cpus=3, gpus=1, threads=5)
    assert open_.share == MachineShare(cpus=2, gpus=0.5, threads=2)
    assert [s.share.gpus for s in settle(specs, config, on_gpu=False)] == [1, 0]
    assert settle(read_layout("1EPD"), ServeConfig(model="m"), on_gpu=True)[0].share == MachineShare(gpus=1)


def test_ray_launches_several_or_what_has_to_be_placed(tmp_path):
    one, two = read_layout("1EPD"), read_layout("2EPD")
    placed = read_layout(write(tmp_path, "instances: [{role: EPD, cores: [0]}]"))

    def chosen(specs, **options):
        return choose_launcher(ServeConfig(model="m", **options), specs)

    assert [chosen(s) for s in (one, two, placed)] == ["inproc", "ray", "ray"]
    assert chosen(one, ray_address="head:6379") == chosen(one, launcher="ray") == "ray"
    assert chosen(two, launcher="inproc") == "inproc"
    with pytest.raises(ConfigError, match="--ray-address needs --launcher ray"):
        chosen(two, launcher="inproc", ray_address="head:6379")
    with pytest.raises(ConfigError, match=r"EPD0.s share of a node needs --launcher ray"):
        chosen(placed, launcher="inproc")


def test_a_shipped_file_is_found_from_anywhere_and_ones_own_goes_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = [path.relative_to(ROOT) for path in sorted((ROOT / "configs").rglob("*.yaml"))]
    assert len(shipped) > 20 and all(read_yaml(path) == read_yaml(ROOT / path) for path in shipped)
    assert len(read_layout("configs/layouts/1e1p1d.yaml")) == 3
    own = tmp_path / "configs/layouts/1e1p1d.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("instances: [{role: EPD}]")
    assert len(read_layout("configs/layouts/1e1p1d.yaml")) == 1
    with pytest.raises(ConfigError, match=r"cannot read configs/layouts/none.yaml"):
        read_layout("configs/layouts/none.yaml")
