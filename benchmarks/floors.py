"""How long a stage must take at least on this machine: the arithmetic and the memory traffic it cannot avoid, and the
rates at which the machine does either."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from hydrainfer.checkpoint import ModelConfig


class Work(NamedTuple):
    """Unavoidable work of one batch: `flops` of matrix products and attention (a multiply and an add are two), and
    `n_bytes` moved, every weight once and no activation ever."""

    flops: float
    n_bytes: float

    def floor_s(self, rates: Rates) -> float:
        return max(self.flops / rates.flops_per_s, self.n_bytes / rates.bytes_per_s)

    def bound(self, rates: Rates) -> str:
        return "arithmetic" if self.flops / rates.flops_per_s > self.n_bytes / rates.bytes_per_s else "memory"


class Rates(NamedTuple):
    """What the device reaches: a large matrix product, and reading an array far larger than its caches."""

    flops_per_s: float
    bytes_per_s: float


def encode_work(c: ModelConfig, n_pictures: int, item_bytes: int) -> Work:
    """Vision tower up to the last layer used, and projector. Moved: weights, pixels in, embeddings out."""
    v, width = c.vision, c.text.hidden
    rows, layers = n_pictures * (v.patches + 1), max(v.features)
    patch = 3 * v.patch_size**2 * v.hidden
    layer = 4 * v.hidden**2 + 2 * v.hidden * v.intermediate  # weights of one block
    projector = width * v.hidden * len(v.features) + width**2
    attention = 4 * n_pictures * layers * (v.patches + 1) ** 2 * v.hidden
    flops = 2 * (n_pictures * (v.patches * patch + v.tokens * projector) + rows * layers * layer) + attention
    moved = patch + layers * layer + projector + n_pictures * v.tokens * width
    return Work(flops, moved * item_bytes + n_pictures * 3 * v.image_size**2)


def language_work(c: ModelConfig, counts: list[int], contexts: list[int], item_bytes: int) -> Work:
    """Requests that compute `counts` tokens after `contexts` and sample one each. In the last layer only the sampled
    rows need more than their keys and values. Moved: weights, keys and values read and written once, embedding rows."""
    t = c.text
    q, kv = t.heads * t.head_dim, 2 * t.kv_heads * t.head_dim
    keys = kv * t.hidden
    rest = 2 * q * t.hidden + 3 * t.hidden * t.intermediate  # query, output, gate, up, down
    rows, sampled, head = sum(counts), len(counts), t.hidden * t.vocab
    seen = sum(n * context + n * (n + 1) // 2 for n, context in zip(counts, contexts))  # (query, key) pairs, causal
    seen_last = sum(n + context for n, context in zip(counts, contexts))
    attention = 4 * q * (seen * (t.layers - 1) + seen_last)
    flops = 2 * (rows * (t.layers * keys + (t.layers - 1) * rest) + sampled * (rest + head)) + attention
    cache = kv * t.layers * (sum(contexts) + rows)
    return Work(flops, (t.layers * (keys + rest) + head + cache + rows * t.hidden) * item_bytes)


def fastest_s(call: Callable[[], object], n: int) -> float:
    """Of `n` calls after one that does not count."""
    call()
    times = []
    for _ in range(n):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return min(times)


def waits_for(device: torch.device) -> Callable[[], object]:
    """A call that returns once the device has done all it was given."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def measure_rates(
    n: int = 5, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, tiny: bool = False
) -> Rates:
    """With torch's present number of threads. Reading: the faster of a sum and of a matrix-vector product. `tiny`: for
    a dry run."""
    device = torch.device(device)
    side, read_bytes = (8192, 4 << 30) if device.type == "cuda" else (3072, 384 << 20)
    if tiny:
        side, read_bytes = 64, 1 << 20
    on, wait = {"device": device, "dtype": dtype}, waits_for(device)
    a, b = torch.rand(side, side, **on), torch.rand(side, side, **on)
    matrix = torch.ones(read_bytes // dtype.itemsize // 4096, 4096, **on)
    vector = torch.ones(4096, **on)
    with torch.inference_mode():
        flops_per_s = 2 * side**3 / fastest_s(lambda: (a @ b, wait()), n)
        reads = (matrix.sum, lambda: matrix @ vector)
        read_s = min(fastest_s(lambda read=read: (read(), wait()), n) for read in reads)
    return Rates(flops_per_s, matrix.nbytes / read_s)
