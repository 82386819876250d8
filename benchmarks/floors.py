"""How long a stage must take at least on this machine: the arithmetic and the memory traffic it cannot avoid, and the
rates at which the machine does either."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hydrainfer.ops.cpu.products import ways
from hydrainfer.planner.costs import ModelShape


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
    """The rates that the device reaches: in a large matrix product, and reading an array far larger than its caches."""

    flops_per_s: float
    bytes_per_s: float


def encode_work(shape: ModelShape, n_pictures: int, n_tokens: int, picture_bytes: int) -> Work:
    """Vision tower up to the last layer used, and projector, of pictures of `n_tokens` each. Moved: weights, pixels in,
    embeddings out."""
    v = shape.vision
    assert v is not None, "a model that sees"
    tokens, rows = n_pictures * n_tokens, n_pictures * n_tokens * v.rows_per_token
    attention = 4 * v.layers * rows * (n_tokens * v.rows_per_token) * v.hidden
    flops = 2 * (rows * v.row_weights + tokens * v.token_weights) + attention
    return Work(flops, (v.weights + tokens * shape.hidden) * shape.item_bytes + n_pictures * picture_bytes)


def language_work(shape: ModelShape, counts: list[int], contexts: list[int]) -> Work:
    """Requests that compute `counts` tokens after `contexts` and sample one each. In a last layer with attention only
    the sampled rows need more than their keys and values. Moved: weights (of experts those that as many tokens choose),
    keys and values read and written once, states read and written, embedding rows."""
    rows, sampled, head = sum(counts), len(counts), shape.hidden * shape.vocab
    flops, moved = 2.0 * sampled * head, shape.head_bytes + rows * shape.hidden * shape.item_bytes
    for i in range(shape.layers):
        weights, used, keys = shape.layer_weights(i), shape.layer_weights(i, used=True), shape.key_weights(i)
        last = i == shape.layers - 1 and shape.attends(i)
        flops += 2 * (rows * keys + (sampled if last else rows) * (used - keys))
        moved += (weights - _unread(shape, i, rows)) * shape.layer_item_bytes
        if not shape.attends(i):
            state = shape.recurrence.state.matrix if shape.recurrence is not None else ()
            moved += 2 * 4 * sampled * math.prod(state or (0,))
            continue
        window = shape.seen[i] or math.inf
        seen = [[min(p + 1, window) for p in range(c, c + n)] for c, n in zip(contexts, counts)]
        pairs = sum(of_one[-1] if last else sum(of_one) for of_one in seen)
        flops += 2 * shape.heads * (shape.head_dim + (shape.value_dim or shape.head_dim)) * pairs
        moved += shape.kv_width(i) * (sum(min(c, window - 1) for c in contexts) + rows) * shape.item_bytes
    return Work(flops, moved)


def _unread(shape: ModelShape, layer: int, rows: int) -> float:
    """Weights of experts that so many rows do not choose."""
    e = shape.experts
    if e is None or not e.layers[layer]:
        return 0.0
    return e.count * 3 * shape.hidden * e.intermediate * (1 - e.chosen / e.count) ** rows


def fastest_s(call: Callable[[], object], n: int) -> float:
    """Seconds of the fastest of `n` calls, after one that does not count."""
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
    """With torch's present number of threads. Multiplying: the fastest way of this machine. Reading: the faster of a
    sum and of a matrix-vector product. `tiny`: for a dry run."""
    device = torch.device(device)
    side, read_bytes = (8192, 4 << 30) if device.type == "cuda" else (3072, 384 << 20)
    if tiny:
        side, read_bytes = 64, 1 << 20
    on: dict[str, Any] = {"device": device, "dtype": dtype}
    wait = waits_for(device)
    a, b = torch.rand(side, side, **on), torch.rand(side, side, **on)
    matrix = torch.ones(read_bytes // dtype.itemsize // 4096, 4096, **on)
    vector = torch.ones(4096, **on)

    def seconds(work: Callable[[], object]) -> float:
        return fastest_s(lambda: (work(), wait()), n)

    with torch.inference_mode():
        products: list[Callable[[], object]] = [lambda: a @ b]
        if device.type == "cpu":
            products += [partial(way.linear, a, b) for way in ways(dtype, None).values()]
        flops_per_s = 2 * side**3 / min(seconds(product) for product in products)
        reads = (matrix.sum, lambda: matrix @ vector)
        read_s = min(seconds(read) for read in reads)
    return Rates(flops_per_s, matrix.nbytes / read_s)
