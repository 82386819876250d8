"""CUDA IPC over a driver of our own: order of calls, lifetimes, errors, an exporter that dies."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.storage import BlockStore, Exports, TransportError, Unreachable, cuda_ipc
from hydrainfer.storage.cuda_ipc import CudaIpcTransport, IpcAllocation
from tests.storage import driver
from tests.storage.peers import SPECS, _context, content
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]

IDS, INTO = [7, 0, 1, 2, 5], [0, 1, 2, 3, 6]


@pytest.fixture(scope="module", params=["new", "old"])
def library(request, tmp_path_factory):
    built = driver.build(tmp_path_factory.mktemp("driver"), *(["-DOLD"] if request.param == "old" else []))
    if built is None:
        pytest.skip("no C compiler")
    return built


@pytest.fixture
def log(library, tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_DRIVER_LOG", "")
    driver.use(library, tmp_path / "ours", monkeypatch.setattr)
    return tmp_path / "ours"


class Exporter:
    """Another process with a store; its GPU is none that this process sees."""

    def __init__(self, library, log) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=driver.export, args=(theirs, library, log), daemon=True)
        self.process.start()
        address = self.pipe.recv()
        self.name = IpcAllocation.decode(address).handle.rstrip(b"\0").decode()
        self.handle = ExportHandle(
            owner=f"E{self.process.pid}:1",
            host="here",
            process="another",
            device="cuda:of-another-process",
            n_blocks=8,
            block_bytes=SPECS["kv"].block_bytes,
            ways={"cuda-ipc": address},
        )

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)

    def clean(self) -> None:
        if self.process.is_alive():
            self.kill()
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm{self.name}")


@pytest.fixture
def exporter(library, tmp_path):
    made = Exporter(library, tmp_path / "theirs")
    yield made
    made.clean()


def calls(log) -> list[str]:
    return log.read_text().split("\n")[:-1] if log.exists() else []


def test_blocks_of_an_invisible_gpu_in_one_call(library, log, exporter):
    store, transport = driver.DriverStore(9), CudaIpcTransport()
    for _ in range(3):
        transport.copy(exporter.handle, IDS, store, INTO)
    assert torch.equal(store.bytes[INTO], content("kv", 8, 1)[IDS])
    assert not store.bytes[[4, 5, 7, 8]].any()
    copies = ["copy"] * 3 if "OLD" in library.name else ["batch of 3"]
    assert calls(log) == ["open", *[*copies, "synchronize"] * 3], "opened once, and waited for before it counts"
    transport.forget(exporter.handle.owner)
    transport.close()
    assert calls(log)[-2:] == ["synchronize", "close"]
    store.free()


def test_scattered_blocks_are_one_launch_of_our_kernel(log, exporter, monkeypatch):
    """The driver takes as long for each piece of a batch as for one."""
    launches = []

    def kernel(to, to_ids, source, source_ids) -> None:
        launches.append(len(to_ids))
        size = to.shape[1]
        for i, into in zip(source_ids.tolist(), to_ids.tolist()):
            to[into] = torch.frombuffer((ctypes.c_ubyte * size).from_address(source + i * size), dtype=torch.uint8)

    monkeypatch.setattr(cuda_ipc, "upload", lambda arrays, _: {k: torch.from_numpy(v) for k, v in arrays.items()})
    store, transport = driver.DriverStore(9), CudaIpcTransport(kernel)
    transport.copy(exporter.handle, IDS, store, INTO)
    transport.copy(exporter.handle, [4, 5], store, [7, 8])
    assert torch.equal(store.bytes[[*INTO, 7, 8]], content("kv", 8, 1)[[*IDS, 4, 5]])
    assert launches == [5] and calls(log)[:2] == ["open", "synchronize"], "one run of blocks is the driver's"
    transport.close()
    store.free()


def test_blocks_may_land_in_host_memory(log, exporter, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    store, transport = BlockStore(SPECS["kv"], 9), CudaIpcTransport()
    transport.copy(exporter.handle, IDS, store, INTO)
    assert torch.equal(store.bytes[INTO], content("kv", 8, 1)[IDS])
    assert calls(log) == ["open", *["copy to host"] * 3, "synchronize"]
    transport.close()


def test_a_forgotten_peer_is_opened_again(log, exporter):
    store, transport = driver.DriverStore(9), CudaIpcTransport()
    transport.copy(exporter.handle, [1], store, [2])
    transport.forget(exporter.handle.owner)
    transport.copy(exporter.handle, [3], store, [4])
    transport.close()
    opened = [call for call in calls(log) if call in ("open", "close")]
    assert opened == ["open", "close", "open", "close"]
    store.free()


def test_a_thread_without_a_context_gets_one_before_it_calls_the_driver(log, exporter):
    """Else the mapping stays when it is closed, and with it the memory of an exporter that has died."""
    store, transport = driver.DriverStore(9), CudaIpcTransport()
    with ThreadPoolExecutor(1) as copies, ThreadPoolExecutor(1) as closes:
        copies.submit(transport.copy, exporter.handle, [1], store, [2]).result()
        closes.submit(transport.close).result()
    assert torch.equal(store.bytes[2], content("kv", 8, 1)[1])
    assert calls(log)[-1] == "close"
    assert f"{exporter.name}" not in Path("/proc/self/maps").read_text(), "really closed"
    store.free()


def test_auto_goes_on_with_tcp_where_memory_cannot_be_shared(log, monkeypatch, caplog):
    """Virtual GPUs, WSL, confidential computing, expandable segments: the driver gives no handle."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="of-ours"))
    store = driver.DriverStore(2)
    exports = Exports("E0:1", {"kv": store}, "auto", secret=b"x")
    assert set(exports.handles["kv"].ways) == {"cuda-ipc", "tcp"}
    exports.close()
    monkeypatch.setenv("HYDRA_DRIVER_SHARES_NOTHING", "1")
    exports = Exports("E0:1", {"kv": store}, "auto", secret=b"x")
    assert set(exports.handles["kv"].ways) == {"tcp"}
    exports.close()
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "cannot be shared" in record.getMessage() and "\n" not in record.getMessage()
    with pytest.raises(ConfigError, match="cannot be shared"):  # asked for by name
        Exports("E0:1", {"kv": store}, "cuda-ipc", secret=b"x")
    store.free()


def test_no_blocks_are_no_copy(log, exporter):
    store, transport = driver.DriverStore(2), CudaIpcTransport()
    transport.copy(exporter.handle, [], store, [])
    transport.close()
    assert not any(call.startswith(("copy", "batch")) for call in calls(log))
    store.free()


def test_a_refused_copy_leaves_no_mapping_open(log, exporter):
    store, transport = driver.DriverStore(9), CudaIpcTransport()
    with pytest.raises(TransportError, match="no blocks"):
        transport.copy(exporter.handle, [8], store, [0])
    other = IpcAllocation(
        IpcAllocation.decode(exporter.handle.ways["cuda-ipc"]).handle, 1 << 40
    )  # beyond the allocation
    exporter.handle.ways["cuda-ipc"] = other.encode()
    with pytest.raises(TransportError, match="CUDA_ERROR_INVALID_VALUE"):
        transport.copy(exporter.handle, [1], store, [0])
    assert calls(log)[-1] == "close" and not store.bytes.any()
    transport.close()
    store.free()


def test_a_dead_exporter_fails_its_own_copies_only(library, log, exporter, tmp_path):
    store, transport = driver.DriverStore(9), CudaIpcTransport()
    other = Exporter(library, tmp_path / "other")
    try:
        transport.copy(exporter.handle, [1], store, [2])
        exporter.kill()
        time.sleep(0.01)
        with pytest.raises(TransportError, match="NOT_MAPPED"):
            transport.copy(exporter.handle, [1], store, [3])
        with pytest.raises(Unreachable, match="cannot be opened"):
            transport.copy(exporter.handle, [1], store, [3])
        transport.copy(other.handle, [5], store, [4])
        assert torch.equal(store.bytes[4], content("kv", 8, 1)[5]) and not store.bytes[3].any()
        transport.close()
        assert calls(log).count("open") == calls(log).count("close") == 2
        other.end()
    finally:
        other.clean()
        store.free()
