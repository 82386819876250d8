"""CUDA graphs: one launch instead of some thirty per layer of a decode step, or a dozen per layer of a vision tower.

A decode graph is captured for each of a few numbers of rows; a step is padded to the next one. The inputs of its
kernels have fixed addresses. Attention is planned before each replay.

A tower's graph is captured for each of its buckets (`models.Passes`): the first few numbers of pictures, if these have
one size, else numbers of patches that passes are padded to. A pass that fits no bucket keeps a GPU busy for longer than
its kernel launches take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hydrainfer.core import Lane, StepBatch, StepResult
from hydrainfer.models import Bucket, LayerCache, Model, Passes
from hydrainfer.ops import alone, packed_bytes, to_device, upload
from hydrainfer.runtime.lane import LaneThread
from hydrainfer.runtime.packing import PackedTokens, padded

_log = logging.getLogger(__name__)
_POLL_S = 0.005
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)

_READ = ("ids", "positions", "slots", "sources", "targets")
"""The arrays that the kernels of a decode step read, besides those that attention is planned with."""

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Runs a step once and captures it. Returns a function that replays it, and the tensor that it writes."""


def capture_for(model: Model) -> Capture | None:
    """The way to capture the model's decode steps; None if `no_graphs` has a reason."""
    return None if no_graphs(model) else _cuda_capture()


def no_graphs(model: Model) -> str:
    """The reason why the model's decode steps cannot be captured, because they depend on host arrays or wait for the
    device; empty if they can."""
    text = model.config.text
    if model.device.type != "cuda":
        return "no GPU"
    if not model.ops.captures:
        return "attention is not FlashInfer's"
    if text.recurrence is not None and not model.ops.captures_scans:
        return "recurrent states without our CUDA kernels"
    return "experts wait for the device" if text.experts is not None and not model.ops.captures_experts else ""


def capture_passes_for(model: Model) -> Capture | None:
    """The way to capture the passes of the vision tower; None if `no_pass_graphs` has a reason."""
    return None if no_pass_graphs(model) else _cuda_capture()


def no_pass_graphs(model: Model) -> str:
    """The reason why the passes of the vision tower cannot be captured; empty if they can."""
    passes = passes_of(model)
    if model.device.type != "cuda":
        return "no GPU"
    return "" if passes is not None and passes.captures else "the tower's operators depend on the pictures' sizes"


def passes_of(model: Model) -> Passes[Any] | None:
    return getattr(model.vision, "passes", None)


def capture_on(lane: LaneThread, name: Lane, device: torch.device, capture_all: Callable[[], None]) -> bool:
    """Run `capture_all` on the lane's thread, before anything is served. Returns False, and warns, if it fails: then
    everything is computed without graphs. Raises if the device is lost."""
    batch, done = StepBatch(0, name, [], 0), []

    def run() -> StepResult:
        try:
            with torch.inference_mode():
                capture_all()
            done.append(True)
        except Exception as e:
            torch.zeros(1, device=device).tolist()  # raises if the device is lost
            why = str(e).partition("\n")[0] or type(e).__name__
            _log.warning("CUDA graphs of the %s lane could not be captured; it goes without: %s", name.value, why)
        return StepResult(batch)

    ticket = lane.submit(batch, run)
    while ticket.result is None:
        time.sleep(_POLL_S)
    if ticket.result.error is not None:
        raise ticket.result.error
    return bool(done)


class Steps(Protocol):
    """The parts of a step: its arrays, the caches with their planned batches, the ids known only on the device, the
    layers."""

    @property
    def device(self) -> torch.device: ...

    def arrays(self, p: PackedTokens) -> dict[str, np.ndarray]: ...

    def caches(self, p: PackedTokens, on: Mapping[str, Tensor], *, captured: bool) -> list[LayerCache]: ...

    def follow(self, on: Mapping[str, Tensor]) -> None: ...

    def through(self, p: PackedTokens, on: Mapping[str, Tensor], caches: list[LayerCache]) -> Tensor: ...


@dataclass(eq=False)
class _Graph:
    """A decode graph. `memory`: the fixed memory that its kernels read arrays from. `step`: the step that it computes
    next, needed only to capture it."""

    memory: Tensor
    step: tuple[PackedTokens, dict[str, Tensor], list[LayerCache]]
    replay: Callable[[], None] | None = None
    hidden: Tensor | None = None


class DecodeGraphs:
    """The graphs of one runner."""

    def __init__(self, steps: Steps, capture: Capture) -> None:
        self._steps, self._capture = steps, capture
        self._graphs: dict[int, _Graph] = {}

    def take(self, p: PackedTokens) -> bool:
        """Whether a graph can compute this batch: only decodes, no more than the largest graph's rows, sampled in their
        order, no embeddings, and no row that continues from the state of another."""
        in_order = not p.shares or p.sample_rows == list(range(len(p.ids)))
        return p.n_decodes == len(p.counts) <= ROWS[-1] and p.embed_at is None and in_order and not p.waits

    def capture_all(self, one: PackedTokens) -> None:
        """Capture every graph with copies of one decode, the largest first: the others use its memory."""
        for rows in reversed(ROWS):
            self.forward(padded(one, rows))

    def forward(self, p: PackedTokens) -> Tensor:
        """Hidden states [sampling rows, hidden]. The next step in the same graph overwrites them."""
        n = len(p.ids)
        rows = next(r for r in ROWS if r >= n)
        graph = self._set(rows, padded(p, rows))
        if graph.replay is None:
            graph.replay, graph.hidden = self._capture(lambda: self._steps.through(*graph.step))
        else:
            graph.replay()
        assert graph.hidden is not None
        if p.sample_rows == list(range(n)):
            return graph.hidden[:n]
        return graph.hidden[to_device(np.array(p.sample_rows, dtype=np.int64), self._steps.device)]

    def _set(self, rows: int, p: PackedTokens) -> _Graph:
        """The graph of `rows` rows, with this step's arrays in its memory."""
        arrays, device = self._steps.arrays(p), self._steps.device
        read = {name: arrays.pop(name) for name in list(arrays) if name.rpartition(".")[2] in _READ}
        graph = self._graphs.get(rows)
        memory = graph.memory if graph else torch.empty(packed_bytes(read), dtype=torch.uint8, device=device)
        on = upload(read, device, memory) | upload(arrays, device)
        self._steps.follow(on)
        step = p, on, self._steps.caches(p, on, captured=True)
        if graph is None:
            graph = self._graphs[rows] = _Graph(memory, step)
        graph.step = step
        return graph


class _PassGraph(NamedTuple):
    bucket: Bucket[Any]
    replay: Callable[[], None]
    embeddings: Tensor


class PassGraphs:
    """The graphs of a tower's passes, used in place of `Passes.compute`."""

    def __init__(self, passes: Passes[Any], capture: Capture) -> None:
        self._passes, self._capture = passes, capture
        self._graphs: dict[int, _PassGraph] = {}

    def capture_all(self) -> None:
        """Capture every graph, the largest first: the others use its memory. From then on the tower uses the graphs."""
        for size in reversed(self._passes.sizes):
            bucket = self._passes.bucket(size)
            self._graphs[size] = _PassGraph(bucket, *self._capture(bucket.compute))
        self._passes.through = self

    def __call__(self, given: Any) -> Tensor:
        """The result of `Passes.compute`."""
        size = self._passes.size_of(given)
        if size is None:
            return self._passes.compute(given)
        bucket, replay, embeddings = self._graphs[size]
        n = bucket.fill(given)
        replay()
        return embeddings[:n].clone()  # the next pass overwrites them

    def close(self) -> None:
        """Free the graphs. From then on the tower computes every pass itself."""
        self._graphs.clear()
        if self._passes.through is self:
            self._passes.through = None


def _cuda_capture() -> Capture:
    """A function that captures on the current stream, which is not the default one, while no other thread of the
    process captures. All graphs share one memory pool, because they run one after the other."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with alone():
            run()  # kernels are compiled and chosen, workspaces made
            stream = torch.cuda.current_stream()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # threads go on
                hidden = run()
            graph.replay()
        return graph.replay, hidden

    return capture
