"""How the way to multiply is chosen: by what was measured, once, in words that say why."""

from __future__ import annotations

import itertools
import resource
import time

import pytest
import torch

from hydrainfer.assemble.sizes import dtype_of
from hydrainfer.config import ServeConfig
from hydrainfer.ops import select_ops
from hydrainfer.ops.cpu import measured, remembered
from hydrainfer.ops.cpu.measured import ROWS, ProductSeconds, WideProducts, fastest
from hydrainfer.ops.cpu.products import Way

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


def times(few: dict[str, float], many: dict[str, float], few_up_to: int = 8) -> dict[int, dict[str, float]]:
    return {rows: few if rows <= few_up_to else many for rows in ROWS}


def no_race(shape, found):
    raise AssertionError(f"{shape} need not be measured")


def ways(*names: str) -> dict[str, Way]:
    """Ways that return their name instead of a product."""
    return {name: Way(name, lambda *_, n=name: n, lambda *_, n=name: n) for name in names}


def test_the_choice_goes_by_rows_and_size():
    few, many = {"native-cpu": 1.0, "onednn": 2.0}, {"native-cpu": 6.0, "onednn": 3.0}
    chosen = WideProducts(
        ProductSeconds(times(few, few), times(few, many)), ways("native-cpu", "onednn"), torch.bfloat16, no_race
    )
    small, large = torch.empty(4, 4), torch.empty(2048, 1024)
    taken = {rows: chosen.linear(torch.empty(rows, 4), large) for rows in (0, 1, 8, 9, 64, 5000)}
    assert taken == dict.fromkeys((0, 1, 8), "native-cpu") | dict.fromkeys((9, 64, 5000), "onednn")
    assert chosen.linear_add(torch.empty(0), torch.empty(5000, 4), small) == "native-cpu"
    assert chosen.describe()[0] == "native-cpu up to 8 rows, onednn above"
    assert "onednn 0 GB/s" in chosen.describe()[1]


def test_many_rows_go_by_the_shape_of_a_large_weight():
    """Among the ways that are not far behind; a shape is measured once, and of a huge weight a part."""
    asked = []

    def race(shape, found):
        asked.append(shape)
        assert set(found) == {"native-many", "onednn"}
        return {"native-many": float(shape[1]), "onednn": float(shape[0])}

    seconds = times(
        {"native-cpu": 1.0, "native-many": 9.0, "onednn": 9.0}, {"native-cpu": 9.0, "native-many": 3.0, "onednn": 2.0}
    )
    products = WideProducts(ProductSeconds(seconds, seconds), ways(*seconds[1]), torch.bfloat16, race)
    wide, deep, huge = torch.empty(4096, 768), torch.empty(768, 2048), torch.empty(32000, 4096, device="meta")
    many = {"wide": wide, "deep": deep, "huge": huge, "small": torch.empty(256, 256)}
    taken = {name: [products.linear(torch.empty(n, 4), w) for n in (1, 256, 257)] for name, w in many.items()}
    assert taken == {
        "wide": ["native-cpu", "onednn", "native-many"],
        "deep": ["native-cpu", "onednn", "onednn"],
        "huge": ["native-cpu", "onednn", "onednn"],
        "small": ["native-cpu", "onednn", "onednn"],
    }
    assert asked == [(4096, 768), (768, 2048), (1024, 4096)]
    assert products.packs(deep) and not products.packs(wide)
    products.linear(torch.empty(600, 4), deep)
    assert len(asked) == 3


def test_a_shape_that_cannot_be_remembered_goes_the_usual_way():
    def race(shape, found):
        raise OSError("No space left on device")

    seconds = times({}, {"native-many": 3.0, "onednn": 2.0}, 0)
    products = WideProducts(ProductSeconds(seconds, seconds), ways("native-many", "onednn"), torch.bfloat16, race)
    assert products.linear(torch.empty(600, 4), torch.empty(4096, 768)) == "onednn"


def test_small_layers_are_computed_in_one_call_for_more_rows():
    """One call saves those of the operators. The longer the products take, the less that counts."""
    ours = {1: 9e-5, 2: 9e-5, 4: 9e-5, 8: 1.2e-4, 16: 2e-4, 32: 4e-4, 64: 1e-3, 256: 1e-3}
    seconds = {rows: {"native-cpu": s, "native-many": 1e-4} for rows, s in ours.items()}
    products = WideProducts(ProductSeconds(seconds, seconds), ways("native-cpu", "native-many"), torch.float32, no_race)
    assert products.native_rows == 4
    assert [products.decoder_rows(n << 20) for n in (0, 4, 8, 64)] == [256, 16, 8, 4]


def test_code_is_compiled_where_onednn_multiplies():
    """Also if it is slower for large weights, or for the most rows: a small model has no large ones."""
    ours, theirs = {"native-cpu": 1.0, "onednn": 2.0}, {"native-cpu": 2.0, "onednn": 1.0}
    found = ways("native-cpu", "onednn")
    products = WideProducts(
        ProductSeconds(times(ours, theirs, 32), times(theirs, ours, 64)), found, torch.float32, no_race
    )
    small, large = torch.empty(4, 4), torch.empty(2048, 1024)
    by_rows = {rows: [products.compiles(torch.empty(rows, 4), w) for w in (small, large)] for rows in (8, 64, 65, 300)}
    assert by_rows == {8: [False, True], 64: [True, True], 65: [True, False], 300: [True, False]}


def test_weights_are_packed_where_onednn_multiplies_many_rows():
    ours, theirs = {"native-cpu": 1.0, "onednn": 2.0}, {"native-cpu": 2.0, "onednn": 1.0}
    products = WideProducts(
        ProductSeconds(times(ours, ours), times(ours, theirs)), ways("native-cpu", "onednn"), torch.float32, no_race
    )
    assert [products.packs(torch.empty(shape)) for shape in ((4, 4), (2048, 1024))] == [False, True]


def test_the_first_of_equal_ways_is_taken():
    assert fastest({"torch": 1.0, "onednn": 1.02, "native-cpu": 1.5}) == "onednn"
    assert fastest({"widened": 0.5, "torch": 1.0}) == "widened"


def test_the_ways_to_multiply_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remembered, "processor_s", lambda: None)  # quiet, for all one knows
    monkeypatch.setattr(measured, "_BYTES", 16 << 20)
    first = select_ops("cpu", torch.float32, 64, use_native=False, threads=1).products
    (kept,) = tmp_path.glob("hydrainfer/products/*.json")
    was = kept.read_bytes()
    assert select_ops("cpu", torch.float32, 64, use_native=False, threads=1).products.describe() == first.describe()
    assert kept.read_bytes() == was
    kept.write_bytes(was[:40])  # a full disk
    select_ops("cpu", torch.float32, 64, use_native=False, threads=1)
    assert kept.read_bytes().startswith(was[:10]) and len(kept.read_bytes()) > 40


@pytest.mark.parametrize("full", ["of bytes", "of files"])
def test_a_full_disk_does_not_lose_a_measurement(monkeypatch, tmp_path, full):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, soft_and_hard = tmp_path / "hydrainfer" / "t", resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.parent.mkdir()
    if full == "of files":
        folder.touch()  # in the place of the folder, which then cannot be made

    def times():
        return remembered.remembered("t", ("x",), dict[str, float], bool, lambda: {"a": 1.0}, None)

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, soft_and_hard[1]))
    try:
        assert times() == {"a": 1.0}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob("*.part"))


def start_later(monkeypatch):
    """What is stored from now on counts as older than this process."""
    monkeypatch.setattr(remembered, "_STARTED_NS", time.time_ns() + 10**15)


def test_times_of_a_busy_machine_are_measured_again_and_the_least_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start_later(monkeypatch)
    others, found = (
        [0.0],
        iter([{"a": 3.0, "b": 2.0}, {"a": 1.0, "b": 4.0}, {"a": 5.0, "b": 6.0}, {"a": 9.0, "b": 9.0}]),
    )

    def measure():
        others[0] += busy_s
        return next(found)

    def times():
        return remembered.remembered("t", ("x",), dict[str, float], lambda kept: "b" in kept, measure, None)

    monkeypatch.setattr(remembered, "processor_s", lambda: (time.process_time() + others[0], 0.0))
    busy_s = 1.0
    assert times() == {"a": 3.0, "b": 2.0}
    assert times() == {"a": 1.0, "b": 2.0}
    busy_s = 0.0
    assert times() == times() == {"a": 5.0, "b": 6.0}, "a quiet machine's stand"


@pytest.mark.parametrize(
    ("later", "quiet_before", "n"), [(True, True, remembered._ENOUGH), (True, False, 1), (False, True, 1)]
)
def test_disturbed_times_are_measured_again_a_few_times_by_later_processes(
    monkeypatch, tmp_path, later, quiet_before, n
):
    """If the machine is quiet when such a process starts. Those that started together have waited long enough."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if later:
        start_later(monkeypatch)
    others_s, found = itertools.count(1000, 1000), []

    def measure():
        found.append(float(next(others_s)))
        return {"a": found[-1]}

    others = (lambda: found[-1] if found else 0.0) if quiet_before else (lambda: float(next(others_s)))
    monkeypatch.setattr(remembered, "processor_s", lambda: (others(), 0.0))
    for _ in range(20):
        remembered.remembered("t", ("x",), dict[str, float], bool, measure, None)
    assert len(found) == n


@pytest.mark.parametrize("threads", [1, 2])
def test_other_threads_of_this_process_disturb(monkeypatch, threads):
    """As where several instances load in one process."""
    monkeypatch.setattr(remembered, "processor_s", lambda: (time.process_time(), 0.0))
    process_s = time.process_time
    assert remembered._watched(lambda: None, threads)[1]
    began = time.perf_counter()
    monkeypatch.setattr(time, "process_time", lambda: process_s() + 3.0 * (time.perf_counter() - began))
    assert not remembered._watched(lambda: time.sleep(0.1), threads)[1]


@pytest.mark.parametrize(
    ("narrow", "sooner"),
    [((0.5, 0.3), True), ((1.0, 0.3), True), ((0.5, 0.75), False), ((0.5, 1.0), False), ((1.5, 0.3), False)],
)
def test_auto_is_the_checkpoints_dtype_where_that_is_faster(monkeypatch, narrow, sooner):
    """`narrow`: its time with one row and with many, where float32 takes 1, and 0.8 with many if it is widened."""

    def kept(dtype, _found, threads):
        few, many = narrow if dtype == torch.bfloat16 else (1.0, 1.0)
        assert threads == 3
        widened = ({}, {}) if dtype == torch.float32 else ({"widened": 2.0}, {"widened": 0.8})
        return ProductSeconds({}, times({"torch": few} | widened[0], {"torch": many} | widened[1]))

    monkeypatch.setattr(measured, "_measured", kept)
    auto = ServeConfig(model="", native_kernels=False, threads=3, device="cpu")
    assert dtype_of(auto, CPU, "bfloat16") == ("bfloat16" if sooner else "float32")
    assert dtype_of(auto, CPU, "float32") == "float32"
    assert dtype_of(ServeConfig(model="", dtype="float16"), CPU, "bfloat16") == "float16"
    assert dtype_of(ServeConfig(model="", device="emulated"), CPU, "bfloat16") == "float32"
