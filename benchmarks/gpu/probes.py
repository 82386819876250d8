"""Does one thing work at all on this device? A probe prints one line at its end, or a traceback.

python -m benchmarks.gpu.probes NAME: an operator, a copy, or a whole instance of a tiny model that answers.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.floors import fastest_s, waits_for
from benchmarks.gpu.parts import PROBES
from benchmarks.gpu.shapes import device_of
from hydrainfer.ops import KV, AttentionBatch, Captured, OpSet, Segments, block_copier, reference, select_ops

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_TOKENS = 8, 2, 128, 16
_TOLERANCE = 4e-2
_GIB = 1 << 30


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _random(device: torch.device, *shape: int, seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, _dtype(device))


def _difference(got: Tensor, want: Tensor) -> float:
    """The largest difference; raises if it is too large."""
    torch.testing.assert_close(got.float(), want.float(), rtol=_TOLERANCE, atol=_TOLERANCE)
    return float((got.float() - want.float()).abs().max())


def _demand(ops: OpSet, op: str, variant: str, device: torch.device) -> None:
    chosen = dict(ops.chosen)[op]
    if device.type == "cuda" and chosen != variant:
        raise SystemExit(f"{op} is by {chosen}, not {variant}: {'; '.join(ops.notes)}")


def _batch(device: torch.device, counts: Sequence[int], contexts: Sequence[int], captured: bool = False) -> Any:
    """(queries, fresh keys and values, cache, batch) with scattered block tables."""
    lengths = [a + b for a, b in zip(counts, contexts)]
    longest = 16  # blocks of each request
    assert max(lengths) <= longest * _BLOCK_TOKENS
    n_blocks = longest * len(counts)
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(5))
    tables = order.view(len(counts), longest).to(torch.int32)
    places = [(i, p) for i, (n, c) in enumerate(zip(counts, contexts)) for p in range(c, c + n)]
    slots = [int(tables[i, p // _BLOCK_TOKENS]) * _BLOCK_TOKENS + p % _BLOCK_TOKENS for i, p in places]
    batch = AttentionBatch(
        counts=list(counts),
        contexts=list(contexts),
        n_decodes=sum(n == 1 for n in counts),
        block_tokens=_BLOCK_TOKENS,
        tables=tables.to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots=torch.tensor(slots, device=device),
        starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device),
        captured=Captured("kv", len(counts), n_blocks) if captured else None,
    )
    rows = sum(counts)
    q = _random(device, rows, _HEADS, _HEAD_DIM, seed=1)
    fresh = KV(*(_random(device, rows, _KV_HEADS, _HEAD_DIM, seed=s) for s in (2, 3)))
    cache = KV(*(_random(device, n_blocks, _BLOCK_TOKENS, _KV_HEADS, _HEAD_DIM, seed=s) for s in (4, 5)))
    for kept, new in zip(cache, fresh):
        kept.view(-1, _KV_HEADS, _HEAD_DIM)[batch.slots] = new
    return q, fresh, cache, batch


def kernels(device: torch.device, models: Path) -> str:  # noqa: ARG001 - as all probes
    """Our kernels against their references."""
    ops = select_ops(device, _dtype(device), _HEAD_DIM)
    _demand(ops, "silu_and_mul", "native-cuda", device)
    gate = _random(device, 33, 2 * 1024, seed=6)
    worst = _difference(ops.silu_and_mul(gate), reference.silu_and_mul(gate))
    q, fresh, cache, batch = _batch(device, [1, 1, 30], [5, 33, 0])
    turns = torch.randn(32, _HEAD_DIM // 2, generator=torch.Generator().manual_seed(7)).to(device)
    sides = []
    for write in (ops.rope_write_kv, reference.rope_write_kv):
        qk, copy = torch.cat([q, fresh.keys], 1), KV(*(x.clone() for x in cache))
        write(qk, fresh.values, turns.cos(), turns.sin(), copy, batch)
        sides.append((qk, *copy))
    worst = max(worst, *(_difference(a, b) for a, b in zip(*sides)))
    copy_blocks = block_copier(device)
    if copy_blocks is not None:
        to, source = (torch.randint(0, 256, (40, 16 << 10), dtype=torch.uint8, device=device) for _ in range(2))
        into, ids = (torch.randperm(40, device=device)[:17] for _ in range(2))
        want = to.clone()
        want[into] = source[ids]
        copy_blocks(to, into, source, ids)
        assert torch.equal(to, want), "other blocks were copied"
    return f"largest difference {worst:.4f}"


def attention(device: torch.device, models: Path) -> str:  # noqa: ARG001
    """FlashInfer's plan and run of a mixed batch against the reference."""
    ops = select_ops(device, _dtype(device), _HEAD_DIM)
    _demand(ops, "attention", "flashinfer", device)
    q, fresh, cache, batch = _batch(device, [1, 1, 40, 17], [5, 133, 0, 60])
    start_s = time.perf_counter()
    ops.prepare(batch)
    got = ops.attention(q, fresh, cache, batch, _HEAD_DIM**-0.5)
    waits_for(device)()
    took_s = time.perf_counter() - start_s
    worst = _difference(got, reference.attention(q, fresh, cache, batch, _HEAD_DIM**-0.5))
    return f"largest difference {worst:.4f}, first call {took_s:.2f} s"


def _replayed(device: torch.device, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What computes `run` again into the tensor that is returned: a graph, or on a CPU a call."""
    if device.type == "cpu":
        out = run()

        def again() -> None:
            out.copy_(run())

        return again, out
    run()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


def replay(device: torch.device, models: Path) -> str:  # noqa: ARG001
    """A captured decode that is planned and replayed with other contexts."""
    ops, scale = select_ops(device, _dtype(device), _HEAD_DIM), _HEAD_DIM**-0.5
    _demand(ops, "attention", "flashinfer", device)
    captured = device.type == "cuda"
    q, fresh, cache, batch = _batch(device, [1] * 4, [5, 33, 100, 7], captured)
    now = [batch]
    ops.prepare(batch)
    again, out = _replayed(device, lambda: ops.attention(q, fresh, cache, now[0], scale))
    worst = 0.0
    for contexts in ([5, 33, 100, 7], [200, 64, 3, 150], [0, 250, 17, 16]):
        other_q, _, other_cache, now[0] = _batch(device, [1] * 4, contexts, captured)
        q.copy_(other_q)
        for kept, new in zip(cache, other_cache):
            kept.copy_(new)
        ops.prepare(now[0])
        again()
        worst = max(worst, _difference(out, reference.attention(q, fresh, cache, now[0], scale)))
    return f"largest difference {worst:.4f}"


def _within(ops: OpSet, q: Tensor, k: Tensor, v: Tensor, place: list[Segments]) -> Tensor:
    """Attention within the segments that are in `place` when it is called."""
    return ops.attention_segments(q, k, v, place[0], q.shape[2] ** -0.5)


def tower(device: torch.device, models: Path) -> str:  # noqa: ARG001
    """A tower's attention within pictures, captured and replayed with pictures of other sizes."""
    ops = select_ops(device, _dtype(device), _HEAD_DIM)
    _demand(ops, "attention_segments", "torch-varlen", device)
    lengths, others = [64, 128, 64], ([32, 200, 24], [256, 0, 0], [1, 1, 254])
    worst = 0.0
    for dim in (64, 80):
        q, k, v = _random(device, 256, 3, 4, dim, seed=8).unbind(1)
        now = Segments(lengths, device, longest=256)
        starts, place = now.starts, [now]
        again, out = _replayed(device, partial(_within, ops, q, k, v, place))
        for other in others:
            place[0] = Segments(other, device)
            starts.copy_(place[0].starts)
            again()
            worst = max(worst, _difference(out, reference.attention_segments(q, k, v, place[0], dim**-0.5)))
    return f"largest difference {worst:.4f}"


def grouped(device: torch.device, models: Path) -> str:  # noqa: ARG001
    """torch's grouped product, with groups of no rows, against a loop; captured, with other groups."""
    n_rows, width, out_width, n_groups = 96, 256, 512, 8
    x = _random(device, n_rows, width, seed=9)
    weight = _random(device, n_groups, width, out_width, seed=10) / width**0.5
    ends = torch.tensor([10, 10, 40, 41, 60, 80, 95, 96], dtype=torch.int32, device=device)
    again, out = _replayed(device, lambda: F.grouped_mm(x, weight, offs=ends))
    worst = 0.0
    for groups in (ends.tolist(), [0, 0, 0, 96, 96, 96, 96, 96]):
        ends.copy_(torch.tensor(groups, dtype=torch.int32))
        again()
        bounds = list(zip([0, *groups], groups))
        want = torch.cat([x[a:b] @ weight[i] for i, (a, b) in enumerate(bounds)])
        worst = max(worst, _difference(out, want))
    return f"largest difference {worst:.4f}"


def copies(device: torch.device, models: Path) -> str:  # noqa: ARG001
    """Scattered blocks of 512 KiB within the device: by the driver's batched copy, by our kernel, by one copy."""
    from hydrainfer.storage import cuda_ipc

    n, size, wait = (8, 4096, waits_for(device)) if device.type == "cpu" else (512, 512 << 10, waits_for(device))
    source = torch.randint(0, 256, (2 * n, size), dtype=torch.uint8, device=device)
    to, ids = torch.zeros_like(source), list(range(0, 2 * n, 2))
    place = torch.tensor(ids, device=device)
    rates = [f"one copy {n * size / fastest_s(lambda: (to[:n].copy_(source[:n]), wait()), 5) / 1e9:.0f} GB/s"]
    kernel = block_copier(device)
    if device.type == "cuda" and kernel is None:
        raise SystemExit("there is no kernel that copies blocks")
    if kernel is not None:
        to.zero_()
        rate = n * size / fastest_s(lambda: (kernel(to, place, source, place), wait()), 5) / 1e9
        assert torch.equal(to[place], source[place]), "the kernel copied something else"
        rates.append(f"kernel {rate:.0f}")
    if device.type == "cuda":
        to.zero_()
        wait()
        pieces = [(to.data_ptr() + i * size, source.data_ptr() + i * size, size) for i in ids]
        stream = torch.cuda.Stream(device)

        def by_driver() -> None:
            cuda_ipc._copy(pieces, stream.cuda_stream, False)
            wait()

        rate = n * size / fastest_s(by_driver, 5) / 1e9
        assert torch.equal(to[place], source[place]), "the driver copied something else"
        rates.append(f"driver {rate:.0f}")
    return ", ".join(rates)


def ipc(device: torch.device, models: Path) -> str:  # noqa: ARG001
    """Blocks of another process on this device."""
    from benchmarks.gpu.moves import between

    return between(device)


def pinned(device: torch.device, models: Path) -> str:  # noqa: ARG001
    """1 GiB of pinned memory, and how fast it is copied."""
    n_bytes, on_cuda = (_GIB, True) if device.type == "cuda" else (1 << 20, False)
    start_s = time.perf_counter()
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=on_cuda)
    took_s = time.perf_counter() - start_s
    there, wait = torch.empty(n_bytes, dtype=torch.uint8, device=device), waits_for(device)

    def copy(to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)
        wait()

    pairs = ((there, host), (host, there))
    rates = [n_bytes / fastest_s(partial(copy, *pair), 3) / 1e9 for pair in pairs]
    return f"pinned in {took_s:.2f} s, {rates[0]:.1f} GB/s there, {rates[1]:.1f} GB/s back"


def _answer(device: torch.device, models: Path, kind: str, pictures: bool, **options: Any) -> str:
    """A tiny model answers a chat, with a picture if it takes one, by eight tokens."""
    from PIL import Image

    from benchmarks.gpu.tiny import tiny
    from hydrainfer import LLM, SamplingParams
    from tests.checkpoints import make_picture
    from tests.parts import parts

    path = tiny(kind, models)
    sized = {"threads": 1} if device.type == "cpu" else {"dtype": "bfloat16"}
    warnings = _warnings()
    start_s = time.perf_counter()
    limits = {"kv_cache_gib": 0.25, **({"image_cache_gib": 0.25} if pictures else {})}
    with LLM(path, device=device.type, **limits, **sized, **options) as llm:
        ready_s = time.perf_counter() - start_s
        text = "What is in this picture?"
        picture = {"type": "image", "image": Image.fromarray(make_picture(1, 112))}
        content: Any = [picture, {"type": "text", "text": text}] if pictures else text
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        start_s = time.perf_counter()
        (answer,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
        took_s = time.perf_counter() - start_s
        ids = answer.outputs[0].token_ids
        facts = parts(llm).facts
    print(*(facts.get(name, "") for name in ("operators", "attention", "graphs")), sep="\n")
    assert len(ids) == 8, ids
    if any("graphs" in line for line in warnings):
        raise SystemExit("; ".join(warnings))
    said = "".join(f"; warned: {line}" for line in warnings)
    ways = "; ".join(f"{facts.get(name, '')}".replace("\n", ", ") for name in ("attention", "graphs"))
    return f"{len(ids)} tokens in {took_s:.2f} s, ready after {ready_s:.1f} s; {ways}{said}"


def _warnings() -> list[str]:
    """What is logged as a warning from now on, such as that graphs could not be captured."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("hydrainfer").addHandler(Keep(logging.WARNING))
    return said


def three(device: torch.device, models: Path) -> str:
    """Three instances in this process capture their graphs one after the other."""
    return _answer(device, models, "llava", True, layout="1E1P1D", launcher="inproc")


def _family(kind: str) -> Callable[[torch.device, Path], str]:
    def probe(device: torch.device, models: Path) -> str:
        from benchmarks.gpu.tiny import PICTURES

        return _answer(device, models, kind, kind in PICTURES)

    return probe


def probe_of(name: str) -> Callable[[torch.device, Path], str]:
    """The function of that name, or else the family's."""
    found: Callable[[torch.device, Path], str] | None = globals().get(name)
    return _family(name) if found is None else found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=PROBES)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", type=Path, required=True)
    args = parser.parse_args()
    device = device_of(args.device)
    stream = torch.cuda.Stream(device) if args.device == "cuda" else None  # captures want one
    with torch.inference_mode(), torch.cuda.stream(stream):
        for name in args.names:
            line = probe_of(name)(device, args.models)
            waits_for(device)()
            print(f"ok: {line}")


if __name__ == "__main__":
    main()
