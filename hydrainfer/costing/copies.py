"""Measured copies of blocks between two processes by each transport, as when a request migrates."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import msgspec
import torch

from hydrainfer.cache import CacheSpec
from hydrainfer.config.shipped import shipped
from hydrainfer.core import ConfigError
from hydrainfer.judging import at_quantile
from hydrainfer.ops import block_copier
from hydrainfer.planner.costs import Copies, read_hardware
from hydrainfer.storage import BlockStore, Exports, Routes, needs_shared

_SECRET = b"measurement"
_SIZES = (64 << 10, 1 << 20, 16 << 20)  # bytes
_START_S = 120.0
_ROUNDS = 20


def measure_copies(
    specs: Sequence[CacheSpec],
    transports: Sequence[str],
    device: str,
    seconds: float,
    say: Callable[[float, str], None] = lambda _share, _what: None,
) -> list[Copies]:
    """Measure copies of blocks of the last spec, which are scattered as after some time of service. The transports
    share `seconds`, not counting the time that their peers take to start. Transports that do not work here are left
    out. Raises `ConfigError` if none works."""
    spec, found, failed = specs[-1], [], []
    sizes = sorted({max(1, n // spec.block_bytes) for n in _SIZES})
    for transport in transports:
        say(1.0, f"copies by {transport}")
        try:
            found += _by(transport, device, spec, sizes, seconds / len(transports))
            if transport == "cuda-ipc":  # measured from a GPU to itself
                found = [_over_link(c) if c.transport == transport else c for c in found]
        except (OSError, EOFError, RuntimeError, ConfigError) as e:
            failed.append(f"{transport}: {e}")
    if failed and not found:
        raise ConfigError(f"no transport works on {device}: {'; '.join(failed)}", param="transport")
    return found


def _over_link(copies: Copies) -> Copies:
    """Copies measured within one GPU, slowed down to the link between two GPUs as given in the data sheet."""
    link = link_of_gpu(torch.cuda.get_device_name())
    if link is None:
        return copies
    least_s = copies.n_bytes / link
    p50_s, p90_s = round(max(copies.p50_s, least_s), 7), round(max(copies.p90_s, least_s), 7)
    return msgspec.structs.replace(copies, p50_s=p50_s, p90_s=p90_s)


def link_of_gpu(name: str) -> float | None:
    """Bytes per second between two GPUs of this kind in one machine, from the file in `configs/hardware` whose name
    matches; None if there is none."""
    known = sorted((p.stem for p in (shipped("configs") / "hardware").glob("*.yaml")), key=len, reverse=True)
    found = next((kind for kind in known if kind in name.lower()), None)
    return None if found is None else read_hardware(found).link.bytes_per_s


def _by(transport: str, device: str, spec: CacheSpec, sizes: list[int], seconds: float) -> list[Copies]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    n_blocks = 2 * max(sizes)
    peer = context.Process(target=_serve, args=(theirs, transport, device, spec, n_blocks), daemon=True)
    peer.start()
    theirs.close()
    routes = None
    try:
        if not ours.poll(_START_S):
            raise ConfigError(f"the other process did not start within {_START_S:.0f} s")
        handle = ours.recv()
        on = torch.device(device)
        routes = Routes(transport, on, secret=_SECRET, copy_blocks=block_copier(on))
        store = _store(spec, n_blocks, device, transport)
        draw, until_s, found = random.Random(0), time.perf_counter() + seconds, []
        stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None  # as in pulls
        for n in sizes:
            took: list[float] = []
            while len(took) < _ROUNDS + 1 and (len(took) < 3 or time.perf_counter() < until_s):
                ids, into = draw.sample(range(n_blocks), n), draw.sample(range(n_blocks), n)
                begin_s = time.perf_counter()
                with torch.cuda.stream(stream):
                    routes.copy(handle, ids, store, into)
                took.append(time.perf_counter() - begin_s)
            times = sorted(took[1:])  # the first one opens the connection
            p50, p90 = statistics.median(times), at_quantile(times, 0.9)
            found.append(
                Copies(
                    transport=transport,
                    n_bytes=n * spec.block_bytes,
                    n=len(times),
                    p50_s=round(p50, 7),
                    p90_s=round(p90, 7),
                )
            )
        return found
    finally:
        if routes is not None:
            routes.close()
        ours.close()  # tells the peer to end
        peer.join(10)
        if peer.is_alive():
            peer.kill()


def _serve(pipe: Connection, transport: str, device: str, spec: CacheSpec, n_blocks: int) -> None:
    torch.set_num_threads(1)
    exports = Exports("E0:1", {"cache": _store(spec, n_blocks, device, transport)}, transport, secret=_SECRET)
    pipe.send(exports.handles["cache"])
    try:
        pipe.recv()
    except EOFError:
        pass
    finally:
        exports.close()


def _store(spec: CacheSpec, n_blocks: int, device: str, transport: str) -> BlockStore:
    store = BlockStore(spec, n_blocks, device, shared=needs_shared(transport, torch.device(device)))
    store.bytes.fill_(7)
    return store
