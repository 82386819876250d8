"""What of the CUDA transports needs no GPU: addresses, and NCCL's place behind the two-sided pull."""

from __future__ import annotations

import base64
import os

import pytest
import torch

from hydrainfer.storage import WAYS, Unreachable, cuda_ipc, nccl
from hydrainfer.storage.cuda_ipc import IpcAllocation
from hydrainfer.storage.gloo import GLOO
from hydrainfer.storage.two_sided import Backend, TwoSidedTransport
from tests.storage.peers import SECRET, Instance, content

pytestmark = pytest.mark.cpu


def test_an_address_of_cuda_memory_is_short_and_comes_back():
    address = IpcAllocation(os.urandom(64), 3 << 30)
    assert IpcAllocation.decode(address.encode()) == address and len(address.encode()) < 104


@pytest.mark.parametrize("text", ["", "a/b", "AAAA/0", "?" * 88 + "/1", base64.b64encode(bytes(64)).decode() + "/-1"])
def test_anything_else_is_refused(text):
    with pytest.raises(Unreachable, match="no CUDA memory"):
        IpcAllocation.decode(text)


def test_without_a_driver_the_error_is_typed():
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is one")
    cuda_ipc._driver.cache_clear()
    with pytest.raises(cuda_ipc.TransportError, match="no CUDA driver"):
        cuda_ipc._call("cuInit", 0)


def test_nccl_is_gloos_code_with_another_group(monkeypatch):
    """The same transport and server, a group by another factory."""
    made = []

    def make(store, rank, host, stall_s):
        made.append((rank, host))
        return GLOO.make(store, rank, host, stall_s)

    fake = Backend("nccl", make, GLOO.finish)
    monkeypatch.setitem(WAYS, "nccl", WAYS["nccl"]._replace(backend=fake))
    source, target = Instance("E0:1", "gloo", 1), Instance("P0:1", "gloo", 2)
    source.handles["kv"].ways["nccl"] = source.handles["kv"].ways["gloo"]
    transport = TwoSidedTransport(fake, SECRET)
    transport.copy(source.handles["kv"], [3, 1], target.stores["kv"], [8, 9])
    assert torch.equal(target.stores["kv"].bytes[[8, 9]], content("kv", 4, 1)[[3, 1]])
    assert sorted(made) == [(0, "127.0.0.1"), (1, "127.0.0.1")]
    transport.close()
    target.close()
    source.close()


def test_a_work_that_hangs_aborts_its_group(monkeypatch):
    class Hung:
        def record(self, stream):
            pass

        def query(self):
            return False

        def wait(self):
            pass

    class Group:
        aborted = False

        def abort(self):
            self.aborted = True

    monkeypatch.setattr(torch.cuda, "Event", Hung)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    group = Group()
    with pytest.raises(cuda_ipc.TransportError, match="timed out"):
        nccl.NCCL.finish([Hung()], group, torch.device("cuda"), 0.05)
    assert group.aborted
