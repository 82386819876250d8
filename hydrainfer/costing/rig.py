"""A test rig: one model on the present device with its runners, and batches to run on them without a scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from hydrainfer.assemble.media import pixel_backend
from hydrainfer.assemble.model import free_unused, lanes_for, load_for, runners_for
from hydrainfer.assemble.sizes import dtype_of, torch_device
from hydrainfer.cache import CacheSpec, for_stage
from hydrainfer.checkpoint import ModelConfig, model_folder
from hydrainfer.config import ServeConfig
from hydrainfer.core import (
    ConfigError,
    EncodeWork,
    Lane,
    LiveSequence,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    Stage,
    StepBatch,
    StepResult,
    TokenWork,
)
from hydrainfer.costing.grid import blocks_for, pool_for, tokens_of
from hydrainfer.families import read_config
from hydrainfer.models import Model
from hydrainfer.ops import settle
from hydrainfer.planner.costs import BatchShape
from hydrainfer.processor import Picture, Pixels, image_adapter
from hydrainfer.storage import BlockStore

_STEP_LIMIT_S = 300.0
_SMALLEST = BatchShape(decodes=1, context=1)  # CUDA graphs are captured with one decode, whatever is to be run
_TEXT = 300  # some ordinary token id


class Rig:
    """One model with its runners, and caches in which each of the language batches `works` fits, one at a time. There
    are `n_pictures` pictures of each of `sizes`, in pixels. Each sequence of a batch has its own KV of all its tokens
    in every cache, even where a window would leave some out. Batches change nothing but recurrent states, and can be
    repeated. `model`: a loaded model; by default `config`'s is loaded. `priority`: the language lane's, see
    `LaneThread`. Raises `ConfigError` or `CheckpointError`."""

    def __init__(
        self,
        config: ServeConfig,
        sizes: Sequence[tuple[int, int]],
        n_pictures: int,
        works: Sequence[BatchShape],
        model: Model | None = None,
        priority: int = -1,
    ) -> None:
        self.n_threads = config.threads or torch.get_num_threads()
        self.model = model or load_whole(config)
        described, device = self.model.config, self.model.device
        self.kv, self.embed = specs_for(self.model, config)
        self._woken = threading.Event()
        self._busy = {Lane.VISION: False, Lane.LANGUAGE: False}
        stores = [_filled(spec, n, device) for spec, n in pool_for([_SMALLEST, *works], self.kv).items()]
        self._n_blocks = {store.spec.name: store.n_blocks for store in stores}
        self._pixels: dict[str, Pixels] = {}
        self._pictures: dict[int, list[LiveSequence]] = {}  # by embedding tokens
        if self.embed is not None:
            self._draw(described, self.embed, sizes, n_pictures)
            n_rows = n_pictures * self.embed.blocks_for(max(self._pictures))
            stores.append(_filled(self.embed, n_rows, device))
        settle(device)  # lanes have their own streams, which do not wait for this one
        busy = self._busy.__getitem__
        self._lanes = lanes_for(self.model, self._woken.set, self.n_threads, busy, fixed=True, priority=priority)
        by_name = {store.spec.name: store for store in stores}
        self._runners = runners_for(config, self.model, self._lanes, by_name, self._pixels.__getitem__)
        vocab, longest = described.text.vocab, max((max(tokens_of(work)) for work in works), default=0)
        self._prompt = tuple(min(_TEXT, vocab // 2) + i % min(100, vocab // 4) for i in range(longest))
        self._batches: dict[Lane, tuple[object, list]] = {}  # the latest of each lane, with what it is of

    @property
    def picture_tokens(self) -> list[int]:
        """The numbers of embedding tokens of the pictures that can be encoded, ascending."""
        return sorted(self._pictures)

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def run(self, work: BatchShape) -> float:
        """Run a batch on idle lanes. Returns the seconds from launch to result."""
        self._items(work)
        start_s = time.perf_counter()
        self._wait([self._launch(work)])
        return time.perf_counter() - start_s

    def run_ahead(self, work: BatchShape, seconds: float, least: int) -> list[float]:
        """Run a batch of decodes repeatedly for `seconds` and at least `least` times, with two in flight, as an engine
        does: the next one is launched before the result of the present one is read, and its ids are those that the
        present one samples. Returns the seconds from each result to the next."""
        flights = [self._launch(work, unknown=True) for _ in range(2)]
        took: list[float] = []
        begin_s = now = time.perf_counter()
        while now - begin_s < seconds or len(took) < least + 1:
            self._wait([flights.pop(0)])
            flights.append(self._launch(work, unknown=True))
            before_s, now = now, time.perf_counter()
            took.append(now - before_s)
        for flight in flights:
            self._wait([flight])
        return took[1:]  # the first one was waited for from its launch

    def device_times(self, work: BatchShape, least: int) -> list[float]:
        """The seconds that `least` batches take the lane's stream, by CUDA events before and after each, with two in
        flight, so that the host prepares one while the device computes the other. Empty on a CPU."""
        if self.model.device.type != "cuda":
            return []
        marks = [(_event(), _event()) for _ in range(least + 1)]
        flights: list[tuple[Lane, object]] = []
        for first, last in marks:
            if len(flights) == 2:
                self._wait([flights.pop(0)])
            self._record(work, first)
            flights.append(self._launch(work))
            recorded = self._record(work, last)
        for ticket in (*flights, recorded):  # the result of a batch may be there before the event behind it
            self._wait([ticket])
        marks[-1][1].synchronize()
        return [first.elapsed_time(last) / 1e3 for first, last in marks[1:]]

    def run_beside(
        self, vision: BatchShape, language: BatchShape, seconds: float, least: int
    ) -> tuple[list[float], list[float]]:
        """Run both batches repeatedly, each launched again as soon as it is done, for `seconds` and at least `least`
        times. Returns the seconds of each run, without the first and the last one."""
        took: dict[Lane, list[float]] = {Lane.VISION: [], Lane.LANGUAGE: []}
        works = {Lane.VISION: vision, Lane.LANGUAGE: language}
        for work in works.values():
            self._items(work)
        begin_s = time.perf_counter()
        began = dict.fromkeys(works, begin_s)
        tickets = {lane: self._launch(work) for lane, work in works.items()}
        while time.perf_counter() - begin_s < seconds or min(map(len, took.values())) < least + 1:
            for lane in self._wait(list(tickets.values())):
                now = time.perf_counter()
                took[lane].append(now - began[lane])
                began[lane], tickets[lane] = now, self._launch(works[lane])
        for ticket in tickets.values():
            self._wait([ticket])
        vision_s, language_s = (took[lane][1:] for lane in (Lane.VISION, Lane.LANGUAGE))
        return vision_s, language_s

    def close(self) -> None:
        """End the lanes and free the caches and graphs. The model stays. Safe to repeat."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        free_unused()

    # ---- inside

    def _draw(self, model: ModelConfig, spec: CacheSpec, sizes: Sequence[tuple[int, int]], n_pictures: int) -> None:
        adapter = image_adapter(model)
        assert adapter is not None, "a vision tower, but no adapter"
        rng = np.random.default_rng(0)
        for n_tokens, (width, height) in pictures_of(model, sizes).items():
            item = adapter.fit(width, height)
            n_blocks, drawn = spec.blocks_for(n_tokens), []
            for i in range(n_pictures):
                noise = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
                name = f"{n_tokens}/{i}"
                self._pixels[name] = adapter.pixels(Picture(noise, "RGB"))
                span = MediaSpan(1, n_tokens, name.encode(), name, item.grid)
                seq = _sequence(name, (1, *[model.media_tokens[0]] * n_tokens, 2), (span,))
                seq.hold.blocks = {spec.name: list(range(i * n_blocks, (i + 1) * n_blocks))}
                drawn.append(seq)
            self._pictures[n_tokens] = drawn

    def _items(self, work: BatchShape, *, unknown: bool = False) -> list:
        """The items of a batch; made once, if it is the same as the one before on its lane. `unknown`: the batch before
        samples the tokens that this one decodes."""
        lane, key = _lane_of(work), (work, unknown)
        made, items = self._batches.get(lane, (None, []))
        if made != key:
            items = self._pictured(work) if work.is_vision else self._texts(work, unknown)
            self._batches[lane] = key, items
        return items

    def _pictured(self, work: BatchShape) -> list[EncodeWork]:
        return [EncodeWork(seq, 0) for seq in self._pictures[work.tokens][: work.pictures]]

    def _texts(self, work: BatchShape, unknown: bool) -> list[TokenWork]:
        """The items of a language batch. Its sequences take the blocks of each cache one after the other."""
        items, taken = [], dict.fromkeys(self._n_blocks, 0)
        for i, n_tokens in enumerate(tokens_of(work)):
            decodes = i < work.decodes
            seq = _sequence(f"t{i}", self._prompt[: n_tokens - (decodes and unknown)])
            for spec in self.kv:
                n, first = blocks_for(spec, n_tokens), taken[spec.name]
                seq.hold.blocks[spec.name] = list(range(first, first + n))
                taken[spec.name] += n
            start = work.context if decodes else work.start
            items.append(TokenWork(seq, start, n_tokens - start, True))
        assert all(n <= self._n_blocks[name] for name, n in taken.items()), f"{work} is too large for this rig"
        return items

    def _launch(self, work: BatchShape, *, unknown: bool = False) -> tuple[Lane, object]:
        lane = _lane_of(work)
        n = work.pictures if work.is_vision else work.chunk + work.decodes
        items = self._items(work, unknown=unknown)
        self._busy[lane] = True
        return lane, self._runners[lane].launch(StepBatch(1, lane, items, n))

    def _record(self, work: BatchShape, event: torch.cuda.Event) -> tuple[Lane, object]:
        """Record an event on the stream of the batch's lane, behind what was launched there. Returns as `_launch`."""
        lane = _lane_of(work)
        mark = StepBatch(0, lane, [], 0)

        def job() -> StepResult:
            event.record()
            return StepResult(mark)

        return lane, self._lanes[lane].submit(mark, job)

    def _wait(self, tickets: list) -> list[Lane]:
        """Wait until at least one batch is done. Returns the lanes of finished ones. Raises a failed batch's error."""
        while True:
            self._woken.clear()
            done: list[Lane] = []
            for lane, ticket in tickets:
                result: StepResult | None = ticket.poll(0.0)
                if result is not None:
                    if result.error is not None or result.failed:
                        raise result.error or next(iter(result.failed.values()))
                    self._busy[lane] = False
                    done.append(lane)
            if done:
                return done
            if not self._woken.wait(_STEP_LIMIT_S):
                raise ConfigError(f"a batch did not end within {_STEP_LIMIT_S:.0f} s")


def load_whole(config: ServeConfig) -> Model:
    """The model with both towers. Raises `ConfigError` or `CheckpointError`."""
    described = read_config(model_folder(config)).by(pixel_backend(config))
    dtype = dtype_of(config, torch_device(config), described.dtype)
    return load_for(config, described, Role.parse("EPD"), dtype, config.threads or torch.get_num_threads())


def specs_for(model: Model, config: ServeConfig) -> tuple[list[CacheSpec], CacheSpec | None]:
    """The caches that a rig has for tokens, and the one for pictures, if the model takes any."""
    specs = model.cache_specs(kv_block_tokens=config.block_tokens)
    return [spec for spec in specs if Stage.DECODE in spec.stages], for_stage(specs, Stage.ENCODE)


def pictures_of(model: ModelConfig, sizes: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """The sizes, in pixels, of pictures that fit the model's context, by their embedding tokens; one of each number.
    Empty if the model takes text only. Raises `ConfigError` if none fits."""
    adapter = image_adapter(model)
    if adapter is None:
        return {}
    found: dict[int, tuple[int, int]] = {}
    for width, height in sizes:
        n_tokens = adapter.fit(width, height).n_tokens
        if n_tokens + 2 <= model.text.context:
            found.setdefault(n_tokens, (width, height))
    if not found:
        raise ConfigError(f"{model.architecture}: no picture of {sizes} fits a context of {model.text.context} tokens")
    return found


def _lane_of(work: BatchShape) -> Lane:
    return Lane.VISION if work.is_vision else Lane.LANGUAGE


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _sequence(name: str, prompt: tuple[int, ...], media: tuple[MediaSpan, ...] = ()) -> LiveSequence:
    request = Request(
        id=name, prompt_ids=prompt, sampling=SamplingParams(temperature=0.0), max_tokens=16, seed=1, media=media
    )
    return LiveSequence(request, (0.0, 0), 0.0)


def _filled(spec: CacheSpec, n_blocks: int, device: torch.device) -> BlockStore:
    """A store with every page written: reads of unwritten memory would be served from the processor's cache."""
    store = BlockStore(spec, n_blocks, device)
    store.bytes.fill_(7)  # a small number in every dtype
    return store
