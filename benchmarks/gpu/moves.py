"""Do copies of blocks come near the device's own, and what does a peer's death take with it?

Without flags: a migration within the process, by one launch of our kernel and by one `copy_` per block, against one
`copy_` of as many bytes. `--killed`: another process exports its cache and is killed while we copy from it; afterwards,
does our context still compute? `--nccl`: a communicator of one rank that sends to itself, and the memory that it takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.floors import fastest_s, waits_for
from benchmarks.gpu.shapes import device_of
from benchmarks.record import write_result
from hydrainfer.cache import FullSpec
from hydrainfer.ops import block_copier, upload
from hydrainfer.storage import BlockStore, Exports, Routes, needs_shared
from hydrainfer.storage.nccl import options as nccl_options

SECRET = b"benchmark"
KV_TOKENS = 1024
CASES = {  # caches of 7B models in 16 bit
    "llava-1.5-7b": FullSpec.of(layers=32, kv_heads=32, head_dim=128, dtype="bfloat16", block_tokens=16),
    "qwen2-vl-7b": FullSpec.of(layers=28, kv_heads=4, head_dim=128, dtype="bfloat16", block_tokens=16),
}
TINY = {"tiny": FullSpec.of(layers=2, kv_heads=2, head_dim=32, dtype="bfloat16", block_tokens=16)}
_START_S = 120.0


def within(device: torch.device) -> dict[str, Any]:
    """Bytes per second, by cache."""
    found, wait, kernel = {}, waits_for(device), block_copier(device)
    for name, spec in (TINY if device.type == "cpu" else CASES).items():
        n = spec.blocks_for(KV_TOKENS)
        to, source = BlockStore(spec, 2 * n, device), BlockStore(spec, 2 * n, device)
        ids = random.Random(0).sample(range(2 * n), n)

        def by_kernel(to: BlockStore = to, source: BlockStore = source, ids: list[int] = ids) -> None:
            on = upload({"to": np.arange(len(ids)), "from": np.array(ids)}, device)
            assert kernel is not None
            kernel(to.bytes, on["to"], source.bytes, on["from"])
            wait()

        def by_copies(to: BlockStore = to, source: BlockStore = source, ids: list[int] = ids) -> None:
            for i, at in enumerate(ids):
                to.bytes[i].copy_(source.bytes[at], non_blocking=True)
            wait()

        def by_one(to: BlockStore = to, source: BlockStore = source, n: int = n) -> None:
            to.bytes[:n].copy_(source.bytes[:n])
            wait()

        ways: dict[str, Callable[[], None]] = {"kernel": by_kernel} if kernel is not None else {}
        ways |= {"copies": by_copies, "one copy": by_one}
        found[name] = {way: n * spec.block_bytes / fastest_s(call, 10) for way, call in ways.items()}
    return found


def _export(pipe: Connection, device: str, transport: str, n: int) -> None:
    spec = next(iter((TINY if device == "cpu" else CASES).values()))
    store = BlockStore(spec, n, device, shared=needs_shared(transport, torch.device(device)))
    store.bytes.fill_(7)
    waits_for(store.device)()
    exports = Exports("E0:1", {"cache": store}, transport, secret=SECRET)
    pipe.send(exports.handles["cache"])
    pipe.recv()


class _Peer:
    """Another process that exports a cache of `n` blocks full of sevens."""

    def __init__(self, device: torch.device, n: int) -> None:
        self.transport = "shared-memory" if device.type == "cpu" else "cuda-ipc"
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=_export, args=(theirs, str(device), self.transport, n), daemon=True
        )
        self.process.start()
        if not self.pipe.poll(_START_S):
            raise SystemExit("the exporter did not start")
        self.handle = self.pipe.recv()


def between(device: torch.device) -> str:
    """Scattered blocks of another process on the same device: that they came, and how fast."""
    spec, n = next(iter((TINY if device.type == "cpu" else CASES).values())), 512
    peer = _Peer(device, n)
    target, ids = BlockStore(spec, n, device), list(range(0, n, 2))
    routes = Routes(peer.transport, device, secret=SECRET, copy_blocks=block_copier(device))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        took_s = fastest_s(lambda: routes.copy(peer.handle, ids, target, ids), 5)
    assert bool((target.bytes[ids] == 7).all()), "other bytes came"
    routes.close()
    peer.pipe.send(None)
    peer.process.join(10)
    return f"{len(ids) * spec.block_bytes / took_s / 1e9:.0f} GB/s by {peer.transport}"


def killed(device: torch.device) -> dict[str, Any]:
    """What copies raised, and whether this process computes afterwards. It may not live to say so: then the part
    fails, which is the answer."""
    spec, n = next(iter((TINY if device.type == "cpu" else CASES).values())), 512
    peer, target = _Peer(device, n), BlockStore(spec, n, device)
    routes = Routes(peer.transport, device, secret=SECRET, copy_blocks=block_copier(device))
    found: dict[str, Any] = {"transport": peer.transport, "copies": 0, "raised": ""}
    ids, stop = [*range(0, n, 2), *range(1, n, 2)], threading.Event()  # scattered

    def copy_on() -> None:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.inference_mode(), torch.cuda.stream(stream):
            while not stop.is_set():
                try:
                    routes.copy(peer.handle, ids, target, ids)
                    found["copies"] += 1
                except Exception as e:
                    found["raised"] = f"{type(e).__name__}: {e}"
                    return

    thread = threading.Thread(target=copy_on, daemon=True)
    thread.start()
    while not found["copies"] and thread.is_alive():
        time.sleep(0.01)
    assert peer.process.pid is not None
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.join(10)
    time.sleep(1.0)  # copies after its death, too
    stop.set()
    thread.join(20)
    found["ended"] = not thread.is_alive()
    try:
        found["computes"] = int(torch.ones(1000, device=device).sum()) == 1000
    except RuntimeError as e:
        found["computes"], found["why"] = False, str(e).splitlines()[0]
    routes.close()
    return found


def self_send(device: torch.device) -> dict[str, Any]:
    """NCCL's communicator of one rank: bytes of the device that it takes, and whether what it sends to itself comes."""
    if device.type == "cpu":
        return {"not run": "NCCL is for CUDA"}
    torch.ones(1, device=device)
    free = torch.cuda.mem_get_info()[0]
    group: Any = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, nccl_options(30.0))
    sent, came = torch.arange(1 << 20, device=device), torch.zeros(1 << 20, dtype=torch.int64, device=device)
    group._start_coalescing()
    group.send([sent], 0, 0)
    group.recv([came], 0, 0)
    group._end_coalescing().wait()
    torch.cuda.synchronize()
    return {"arrived": bool(torch.equal(sent, came)), "bytes": free - torch.cuda.mem_get_info()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    work = killed if args.killed else self_send if args.nccl else within
    with torch.inference_mode():
        results = work(device_of(args.device))
    print(results)
    settings = {"device": args.device, "part": work.__name__}
    write_result("gpu.moves", __doc__, settings, results, args.out)


if __name__ == "__main__":
    main()
