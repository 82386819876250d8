"""Instances in processes of their own, for tests of transports; forked from a server that has torch: quick, clean."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import torch

from hydrainfer.cache import DEVICE, EmbedSpec, FullSpec, Pulls
from hydrainfer.storage import BlockStore, Exports, Routes, StorePuller, needs_shared
from tests.waiting import PATIENCE_S

SECRET = b"of this cluster"
SPECS = {
    "kv": FullSpec.of(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4),
    "embed": EmbedSpec.of(width=4096, dtype="float32", block_tokens=64),  # blocks of 1 MiB
}
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.storage.peers"])


def content(spec, n, seed):
    """[n, block_bytes] of what the instance `seed` has in a cache; never zero, each block the one before shifted."""
    draw, size = torch.Generator().manual_seed(seed), SPECS[spec].block_bytes
    some = torch.randint(1, 256, (size + 4096,), dtype=torch.uint8, generator=draw)
    return some.as_strided((n, size), (1, 1))


class Instance:
    """Stores, exports and puller of one instance. `n_source` blocks are its own, the rest it pulls into."""

    def __init__(self, owner, transport, seed, n=16, n_source=8, timeout_s=10.0) -> None:
        shared = needs_shared(transport, torch.device("cpu"))
        self.stores = {name: BlockStore(spec, n, shared=shared) for name, spec in SPECS.items()}
        for name, store in self.stores.items():
            store.bytes[:n_source].copy_(content(name, n_source, seed))
        self.exports = Exports(owner, self.stores, transport, secret=SECRET, timeout_s=timeout_s)
        self.woken = threading.Event()
        routes = Routes(transport, secret=SECRET, timeout_s=timeout_s)
        self.puller = StorePuller({DEVICE: self.stores}, self.exports, routes, self.woken.set)
        self.handles = self.exports.handles

    def begin(self, handles, ids, into, specs=("kv", "embed")):
        return self.puller.pull({s: handles[s] for s in specs}, Pulls(DEVICE, dict.fromkeys(specs, (ids, into))))

    def wait(self, copy, seconds=PATIENCE_S):
        while copy.done is None and self.woken.wait(seconds):
            self.woken.clear()
        return copy.done

    def pull(self, handles, ids, into, seed=None, specs=("kv", "embed")):
        """Whether it succeeded. With `seed`: and every byte is the peer's."""
        done = self.wait(self.begin(handles, ids, into, specs))
        if seed is not None and done:
            for s in specs:
                assert torch.equal(self.stores[s].bytes[into], content(s, max(ids) + 1, seed)[ids]), s
        return done

    def close(self):
        self.puller.close()


def _main(pipe, owner, transport, seed, options):
    torch.set_num_threads(1)
    instance = Instance(owner, transport, seed, **options)
    pipe.send(instance.handles)
    for args in iter(pipe.recv, None):
        try:
            times, *args = args
            pipe.send(all(instance.pull(*args) for _ in range(times)))
        except Exception as e:
            pipe.send(repr(e))
    instance.close()
    pipe.send(sorted(t.name for t in threading.enumerate() if t.name.startswith("hydrainfer")))


class Peer:
    """An instance in another process."""

    def __init__(self, owner, transport, seed, **options) -> None:
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_main, args=(theirs, owner, transport, seed, options), daemon=True)
        self._process.start()
        theirs.close()
        assert self.pipe.poll(30), owner
        self.handles = self.pipe.recv()

    def begin_pulls(self, times, handles, ids, into, seed):
        self.pipe.send((times, handles, ids, into, seed))

    def result(self):
        assert self.pipe.poll(20)
        return self.pipe.recv()

    def stop(self):
        """Hung from now on: every thread of it stands still, which takes a moment."""
        os.kill(self._process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        while any((t / "stat").read_text().rpartition(")")[2].split()[0] != "T" for t in tasks.iterdir()):
            time.sleep(0.001)

    def kill(self):
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(PATIENCE_S)

    def end(self):
        """What threads it has left after closing everything."""
        if not self._process.is_alive():
            return []
        self.pipe.send(None)
        left = self.result()
        self._process.join(PATIENCE_S)
        return left
