"""The language lane: prefill chunks and decodes of many requests in one forward pass, then sampling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydrainfer.cache import CacheSpec, for_stage
from hydrainfer.core import HydraError, Lane, Stage, StepBatch, StepResult, TokenLogprobs, TokenWork
from hydrainfer.grammar import Failure, Follower
from hydrainfer.models import DeepRows, LastRows, LayerCache, Model
from hydrainfer.ops import AttentionBatch, Captured, ScanBatch, to_device, upload
from hydrainfer.runtime.graphs import Capture, DecodeGraphs, capture_on
from hydrainfer.runtime.guessing import Guesser, MtpGuesser, Passed
from hydrainfer.runtime.lane import LaneThread, LaneTicket, Read, guarded
from hydrainfer.runtime.packing import AskedRows, PackedTokens, one_token, pack_tokens
from hydrainfer.runtime.positions import RotaryPositions
from hydrainfer.runtime.sampler import logprobs_of, sample, sampled
from hydrainfer.runtime.sampling import SamplingPlan, plan_sampling
from hydrainfer.runtime.tables import BlockTables
from hydrainfer.storage import BlockStore

_log = logging.getLogger(__name__)
_ASKED_ROWS = 64
"""Rows of the prompt whose logits exist at the same time. Each takes 600 KB if the vocabulary has 150,000 tokens."""


class LanguageRunner:
    """Executes `TokenWork` batches; satisfies `engine.ports.Runner`.

    `stores`: those of all caches of the instance; each layer uses those whose specs name it. `lane` executes the
    batches. `follower`: None if no request has a grammar. `capture`: if given, decode steps are replayed from graphs.
    `guesser`: who guesses beside the model, if that has no MTP layer. `loading`: by request id, how a batch waits for
    what is still on its way to the layers' caches.
    """

    def __init__(
        self,
        model: Model,
        stores: Iterable[BlockStore],
        lane: LaneThread,
        follower: Follower | None = None,
        capture: Capture | None = None,
        guesser: Guesser | None = None,
        loading: Mapping[str, Callable[[int], None]] | None = None,
    ) -> None:
        self._follower = follower
        self._loading = {} if loading is None else loading
        self._model = model
        stores = list(stores)
        embed = for_stage((store.spec for store in stores), Stage.ENCODE)
        self._embeds = next((store for store in stores if store.spec is embed), None)
        kept = [store for store in stores if store is not self._embeds]
        self._tables = [BlockTables(store.spec) for store in kept if store.spec.paged]
        self._sums = [store.spec for store in kept if not store.spec.paged]
        views = {layer: view for store in kept for layer, view in zip(store.spec.layers, store.layers)}
        names = {layer: store.spec.name for store in kept for layer in store.spec.layers}
        text = model.config.text
        cached = [text.cache_of(i) for i in range(len(text.cached_windows))]
        self._layers = [(names[i], views[i]) for i in cached]
        self._guesser = guesser
        if text.guesses:
            last = next(store.spec for store in kept if text.layers in store.spec.layers)
            self._guesser = MtpGuesser(model, last, self._embeds)
        self._rotary = RotaryPositions() if model.config.text.rope.sections is not None else None
        self._lane = lane
        self._graphs = None if capture is None else DecodeGraphs(self, capture)
        self._packed: list[TokenWork] = []  # the batch that was launched last; none if that failed
        self._sampled: Tensor | None = None  # the tokens of the batch that was executed last; None if it failed
        self._before: Tensor | None = None  # those of the batch before

    def launch(self, batch: StepBatch) -> LaneTicket:
        """Pack on the caller's thread, then execute on the lane's."""
        jobs: list[tuple[PackedTokens, SamplingPlan, Any]] = []
        loading = self._loading
        waits = [loading[item.seq.id] for item in batch.work if item.seq.id in loading] if loading else []

        def pack() -> StepResult:
            embed_spec = self._embeds.spec if self._embeds is not None else None
            packed = pack_tokens(batch.work, self._tables, embed_spec, self._rotary, self._sums, before)
            follows = None if packed.follows is None else packed.follows[packed.sample_rows].tolist()
            ahead = None if self._guesser is None else self._guesser.ahead(packed, batch.work)
            jobs.append((packed, plan_sampling(batch.work, follows), ahead))
            self._packed = batch.work
            return StepResult(batch)

        before, self._packed = self._packed, []
        outcome = guarded(batch, pack)
        if not jobs:
            return self._lane.complete(outcome)
        packed, plan, ahead = jobs[0]
        return self._lane.submit(batch, lambda: self._execute(batch, packed, plan, ahead, waits))

    def capture(self) -> None:
        """Capture all graphs. Call this before anything is served, since it writes to block 0 of the caches. If
        capturing fails, the runner warns and goes without graphs. Raises if the device is lost."""
        graphs = self._graphs
        if graphs is None:
            return
        paged, states = ([spec.name for spec in specs] for specs in ((t.spec for t in self._tables), self._sums))
        one = one_token(paged, states, multimodal=self._rotary is not None)
        if not capture_on(self._lane, Lane.LANGUAGE, self.device, lambda: graphs.capture_all(one)):
            self._graphs = None

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    def close(self) -> None:
        """Wait for what is running, then end the lane's thread and free the graphs."""
        self._lane.close()
        self._graphs = None  # they refer to this runner, and so to the caches

    def _execute(
        self,
        batch: StepBatch,
        packed: PackedTokens,
        plan: SamplingPlan,
        ahead: Any = None,
        waits: Sequence[Callable[[int], None]] = (),
    ) -> StepResult | Read:
        self._before, self._sampled = self._sampled, None
        with torch.inference_mode():
            passed, hidden = self._forward(packed, waits)
            asked = {one.item: self._likelihoods(hidden, one) for one in packed.asked}
            if asked:
                hidden = hidden[to_device(np.array(packed.sample_rows, dtype=np.int64), hidden.device)]
            if not packed.sample_rows:
                self._guess(batch, ahead, passed)
                return lambda: StepResult(batch, prompt_logprobs={item: told() for item, told in asked.items()})
            failed: dict[str, Failure] = {}
            if plan.greedy:
                self._sampled, read_tokens = sampled(self._model.likeliest(hidden))
            else:
                logits = self._model.logits(hidden)
                failed = self._guide(plan, logits.shape[1])  # a GPU computes meanwhile
                self._sampled, read_tokens = sample(logits, plan, self._before)
            guesses = self._guess(batch, ahead, passed)

        def read() -> StepResult:
            told = {item: told() for item, told in asked.items()}
            tokens, logprobs = read_tokens()
            errors = _reached(failed, plan, tokens) if failed else {}
            return StepResult(batch, tokens, logprobs, prompt_logprobs=told, drafts=guesses, failed=errors)

        return read

    def _guess(self, batch: StepBatch, ahead: Any, passed: Passed | None) -> dict[int, tuple[int, ...]]:
        """Guesses of the tokens that follow those that the batch sampled, by work item."""
        if self._guesser is None or passed is None:
            return {}
        began_s, guesser = time.perf_counter(), self._guesser
        try:
            guesses = guesser.guess(batch.work, ahead, passed, self._sampled, batch.n_guesses)
        except Exception:
            _log.exception("guessing has failed; from now on this instance goes without it")
            self._guesser, batch.guess_failed, guesses = None, True, {}
        batch.guess_s = time.perf_counter() - began_s
        if not guesser.usual:
            batch.n_guesses = 0
        return guesses

    def _likelihoods(self, hidden: Tensor, asked: AskedRows) -> Callable[[], list[TokenLogprobs]]:
        """A function that reads the log-probabilities of a chunk's next tokens. `hidden`: the hidden states of every
        row."""
        found: list[Callable[[], list[TokenLogprobs]]] = []
        for low in range(0, len(asked.ids), _ASKED_ROWS):
            ids = asked.ids[low : low + _ASKED_ROWS]
            first = asked.first + low
            logits = self._model.logits(hidden[first : first + len(ids)])
            on = to_device(np.array(ids, dtype=np.int64), logits.device)
            found.append(logprobs_of(logits, on, [asked.n_top] * len(ids)))
        return lambda: [one for read in found for one in read()]

    def _guide(self, plan: SamplingPlan, n_columns: int) -> dict[str, Failure]:
        """Set the tokens that the grammars forbid. Returns, by request id, what cannot go on."""
        if not plan.guided:
            return {}
        assert self._follower is not None, "a request with a grammar came to a runner without"
        plan.blocked, failed = self._follower.blocked(plan.guided, n_columns)
        return failed

    def _forward(self, p: PackedTokens, waits: Sequence[Callable[[int], None]] = ()) -> tuple[Passed | None, Tensor]:
        """Hidden states [sampling rows, hidden], in the order of `plan`; of all rows if `p.asked` is not empty. Before
        them what a guesser needs, if there is one. `waits`: what to wait for, layer by layer."""
        whole = p.n_decodes == len(p.counts)  # computed in one call
        if waits:
            for layer in range(len(self._layers) if whole else 1):
                _wait_for(waits, layer)
        if self._graphs is not None and not p.asked and self._guesser is None and self._graphs.take(p):
            return None, self._graphs.forward(p)
        on = upload(self.arrays(p), self.device)
        self.follow(on)
        caches = self.caches(p, on)
        if waits and not whole:
            caches = [cache._replace(wait=partial(_wait_for, waits, i)) for i, cache in enumerate(caches)]
        of_decoder = caches[: self._model.config.text.layers]
        if self._guesser is None or not self._guesser.reads_hidden:
            return Passed(p, on, caches, None), self.through(p, on, of_decoder)
        hidden = self._whole(on, of_decoder)
        return Passed(p, on, caches, hidden), hidden if p.asked else hidden[on["sample_rows"]]

    def follow(self, on: Mapping[str, Tensor]) -> None:
        """Copy the tokens that the batch before sampled to the rows that continue them. (If it failed, they have
        ended.)"""
        if "follow_rows" in on and self._before is not None:
            on["ids"][on["follow_rows"]] = self._before[on["follow_from"]]

    def caches(self, p: PackedTokens, on: Mapping[str, Tensor], *, captured: bool = False) -> list[LayerCache]:
        """The cache of each layer, with the batch prepared for it. `captured`: a CUDA graph computes the batch."""
        batches: dict[str, AttentionBatch | ScanBatch] = {}
        batches |= {tables.spec.name: self._attention(p, on, tables.spec, captured) for tables in self._tables}
        batches |= {spec.name: self._scan(p, on, spec, captured) for spec in self._sums}
        return [LayerCache(parts, batches[name]) for name, parts in self._layers]

    def through(self, p: PackedTokens, on: Mapping[str, Tensor], caches: list[LayerCache]) -> Tensor:
        """Run the model over the batch in `caches` and `on`. Returns the hidden states as `_forward` does."""
        every = len(p.sample_rows) == len(p.ids) and p.sample_rows == list(range(len(p.ids)))
        decodes_only = p.n_decodes == len(p.counts)
        whole = decodes_only or bool(p.asked)
        n_whole = self._model.config.text.n_own - 1
        hidden = self._whole(on, caches, None if whole else self._last_rows(p, on, caches[n_whole:]))
        return hidden[on["sample_rows"]] if decodes_only and not every and not p.asked else hidden

    def _whole(self, on: Mapping[str, Tensor], caches: list[LayerCache], last: LastRows | None = None) -> Tensor:
        """Hidden states of every row, or of the `last` ones."""
        x = self._model.embed(on["ids"])
        deep, ids, text = self._place_embeddings(on, x), on["ids"], self._model.config.text
        if text.per_layer:
            ids = self._model.embedded_as(ids)
            if "embed_at" in on:
                ids = ids.index_fill(0, on["embed_at"], text.pad)
        return self._model.forward(x, on["positions"], caches, last, deep, ids)

    def _place_embeddings(self, on: Mapping[str, Tensor], x: Tensor) -> DeepRows | None:
        """Write the pictures' embeddings to their rows of `x`. Returns further levels, which the layers add, if there
        are any."""
        if "embed_at" not in on:
            return None
        assert self._embeds is not None and self._embeds.rows is not None, "this role has no embedding cache"
        at = on["embed_at"]
        found = self._embeds.rows[on["embed_rows"]].to(x.dtype)  # [n, hidden * (1 + levels)]
        hidden = x.shape[1]
        x[at] = found[:, :hidden]
        return DeepRows(at, found[:, hidden:].unflatten(1, (-1, hidden))) if found.shape[1] > hidden else None

    def _attention(self, p: PackedTokens, on: Mapping[str, Tensor], spec: CacheSpec, captured: bool) -> AttentionBatch:
        paged, n, context = p.paged[spec.name], len(p.counts), self._model.config.text.context
        batch = AttentionBatch(
            counts=p.counts,
            contexts=paged.contexts,
            n_decodes=p.n_decodes,
            block_tokens=spec.block_tokens,
            tables=on[f"{spec.name}.tables"],
            lengths=on[f"{spec.name}.lengths"],
            slots=on[f"{spec.name}.slots"],
            starts=on["starts"],
            window=spec.window,
            spans=paged.spans if self._model.config.sees_whole_in(spec.window) else (),
            captured=Captured(spec.name, n, n * spec.blocks_for(context)) if captured else None,
            skips=captured and bool(p.scanned),
            shares=p.shares,
        )
        self._model.ops.prepare(batch)
        return batch

    @staticmethod
    def _scan(p: PackedTokens, on: Mapping[str, Tensor], spec: CacheSpec, captured: bool) -> ScanBatch:
        """The batch as recurrent layers take it."""
        name = spec.name
        ids = on[f"{name}.sources"], on[f"{name}.targets"]
        return ScanBatch(len(ids[0]), *ids, p.scanned[name].pieces, captured, p.scanned[name].waves)

    def _last_rows(self, p: PackedTokens, on: Mapping[str, Tensor], caches: list[LayerCache]) -> LastRows:
        """The sampling rows as batches of decodes, in the order of `plan`. `caches`: those of the layers that compute
        only these."""
        found: dict[int, AttentionBatch | None] = {}
        for cache in caches:
            if id(cache.batch) not in found:
                found[id(cache.batch)] = self._sampling(p, on, cache.batch)
        return LastRows(on["sample_rows"], [found[id(cache.batch)] for cache in caches])

    def _sampling(
        self, p: PackedTokens, on: Mapping[str, Tensor], full: AttentionBatch | ScanBatch
    ) -> AttentionBatch | None:
        """The sampling rows of a batch as a batch of decodes; None for states."""
        n, rows, requests = len(p.sample_rows), on["sample_rows"], on["sample_requests"]
        if isinstance(full, ScanBatch):
            return None
        batch = AttentionBatch(
            counts=[1] * n,
            contexts=[full.contexts[r] + row - int(p.starts[r]) for r, row in zip(p.sample_requests, p.sample_rows)],
            n_decodes=n,
            block_tokens=full.block_tokens,
            tables=full.tables[requests],
            lengths=full.lengths[requests],
            slots=full.slots[rows],
            starts=torch.arange(n + 1, dtype=torch.int32, device=rows.device),
            window=full.window,
        )
        self._model.ops.prepare(batch)
        return batch

    @property
    def device(self) -> torch.device:
        return self._model.device

    def arrays(self, p: PackedTokens) -> dict[str, np.ndarray]:
        """All arrays of the batch by name; a cache's arrays are named `CACHE.NAME`."""
        arrays = {"ids": p.ids, "positions": p.positions, "starts": p.starts}
        arrays["sample_rows"] = np.array(p.sample_rows, dtype=np.int64)
        arrays["sample_requests"] = np.array(p.sample_requests, dtype=np.int64)
        if p.embed_at is not None and p.embed_rows is not None:
            arrays |= {"embed_at": p.embed_at, "embed_rows": p.embed_rows}
        if p.follows is not None:
            rows = np.flatnonzero(p.follows >= 0)
            arrays |= {"follow_rows": rows, "follow_from": p.follows[rows]}
        for name, paged in p.paged.items():
            arrays |= {f"{name}.{part}": getattr(paged, part) for part in ("tables", "lengths", "slots")}
        for name, scanned in p.scanned.items():
            arrays |= {f"{name}.sources": scanned.sources, f"{name}.targets": scanned.targets}
        return arrays


def _wait_for(waits: Sequence[Callable[[int], None]], layer: int) -> None:
    for wait_for in waits:
        wait_for(layer)


def _reached(failed: Mapping[str, Failure], plan: SamplingPlan, tokens: list[int]) -> dict[str, HydraError]:
    """The errors of the requests that have come to where they cannot go on."""
    reached = {}
    for one in plan.guided:
        failure = failed.get(one.id)
        if failure is not None:
            n = failure.n_drafts
            if tokens[one.row : one.row + n] == list(one.drafts[:n]):
                reached[one.id] = failure.error
    return reached
