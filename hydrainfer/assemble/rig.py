"""A test rig: one model on the present device with its runners, and batches to run on them without a scheduler."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import torch
from PIL import Image

from hydrainfer.assemble.model import lanes_for, load_for, runners_for
from hydrainfer.assemble.sizes import dtype_of, torch_device
from hydrainfer.cache import CacheSpec, for_stage
from hydrainfer.checkpoint import ModelConfig, model_folder, read_config
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
from hydrainfer.models import Model
from hydrainfer.planner.costs import BatchShape
from hydrainfer.processor import Picture, Pixels, image_adapter
from hydrainfer.storage import BlockStore

_STEP_LIMIT_S = 300.0
_TEXT = 300  # some ordinary token id


class Rig:
    """One model with its runners and caches. There are `n_pictures` pictures of each of `sizes`, in pixels, and
    `n_sequences` sequences of at most `n_context` tokens. Each sequence has its own KV of all its tokens in every
    cache, even where a window would leave some out. Batches change nothing but recurrent states, and can be repeated.
    `model`: a loaded model; by default `config`'s is loaded. `priority`: the language lane's, see `LaneThread`. Raises
    `ConfigError` or `CheckpointError`."""

    def __init__(
        self,
        config: ServeConfig,
        sizes: list[tuple[int, int]],
        n_pictures: int,
        n_sequences: int,
        n_context: int,
        model: Model | None = None,
        priority: int = -1,
    ) -> None:
        self.n_threads = config.threads or torch.get_num_threads()
        self.model = model or _load(config, self.n_threads)
        described, device = self.model.config, self.model.device
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self.n_context = min(n_context, described.text.context)
        specs = self.model.cache_specs(kv_block_tokens=config.block_tokens)
        self.kv = [spec for spec in specs if Stage.DECODE in spec.stages]
        self.embed = for_stage(specs, Stage.ENCODE)
        self._woken = threading.Event()
        self._busy = {Lane.VISION: False, Lane.LANGUAGE: False}
        paged = range(-(-self.n_context // config.block_tokens))
        n_blocks = {spec.name: len(paged if spec.paged else spec.span(0, self.n_context)) for spec in self.kv}
        stores = [_filled(spec, n_sequences * n_blocks[spec.name], device) for spec in self.kv]
        self._pixels: dict[str, Pixels] = {}
        self._pictures: dict[int, list[LiveSequence]] = {}  # by embedding tokens
        if self.embed is not None:
            self._draw(described, self.embed, sizes, n_pictures)
            n_rows = n_pictures * self.embed.blocks_for(max(self._pictures))
            stores.append(_filled(self.embed, n_rows, device))
        busy = self._busy.__getitem__
        lanes = lanes_for(self.model, self._woken.set, self.n_threads, busy, fixed=True, priority=priority)
        by_name = {store.spec.name: store for store in stores}
        self._runners = runners_for(config, self.model, lanes, by_name, self._pixels.__getitem__)
        vocab = described.text.vocab
        prompt = tuple(min(_TEXT, vocab // 2) + i % min(100, vocab // 4) for i in range(self.n_context))
        self.texts = [_sequence(f"t{i}", prompt) for i in range(n_sequences)]
        for i, seq in enumerate(self.texts):
            seq.blocks = {name: list(range(i * n, (i + 1) * n)) for name, n in n_blocks.items()}

    @property
    def picture_tokens(self) -> list[int]:
        """The numbers of embedding tokens of the pictures that can be encoded, ascending."""
        return sorted(self._pictures)

    def run(self, work: BatchShape) -> float:
        """Run a batch on idle lanes. Returns the seconds from launch to result."""
        start_s = time.perf_counter()
        self._wait([self._launch(work)])
        return time.perf_counter() - start_s

    def run_beside(
        self, vision: BatchShape, language: BatchShape, seconds: float, least: int
    ) -> tuple[list[float], list[float]]:
        """Run both batches repeatedly, each launched again as soon as it is done, for `seconds` and at least `least`
        times. Returns the seconds of each run, without the first and the last one."""
        took: dict[Lane, list[float]] = {Lane.VISION: [], Lane.LANGUAGE: []}
        works = {Lane.VISION: vision, Lane.LANGUAGE: language}
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
        for runner in self._runners.values():
            runner.close()

    # ---- inside

    def _draw(self, model: ModelConfig, spec: CacheSpec, sizes: list[tuple[int, int]], n_pictures: int) -> None:
        adapter = image_adapter(model)
        assert adapter is not None, "a vision tower, but no adapter"
        rng = np.random.default_rng(0)
        for width, height in sizes:
            item = adapter.fit(width, height)
            if item.n_tokens in self._pictures or item.n_tokens + 2 > self.n_context:
                continue
            n_blocks, drawn = spec.blocks_for(item.n_tokens), []
            for i in range(n_pictures):
                noise = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
                name = f"{item.n_tokens}/{i}"
                self._pixels[name] = adapter.pixels(Picture(noise, "RGB"))
                span = MediaSpan(1, item.n_tokens, name.encode(), name, item.grid)
                seq = _sequence(name, (1, *[model.media_tokens[0]] * item.n_tokens, 2), (span,))
                seq.blocks = {spec.name: list(range(i * n_blocks, (i + 1) * n_blocks))}
                drawn.append(seq)
            self._pictures[item.n_tokens] = drawn
        if not self._pictures:
            raise ConfigError(f"{model.architecture}: no picture of {sizes} fits a context of {self.n_context} tokens")

    def _launch(self, work: BatchShape) -> tuple[Lane, object]:
        if work.is_vision:
            lane, n = Lane.VISION, work.pictures
            items: list = [EncodeWork(seq, 0) for seq in self._pictures[work.tokens][:n]]
        else:
            lane, n = Lane.LANGUAGE, work.chunk + work.decodes
            texts = iter(self.texts)
            items = [TokenWork(seq, work.context, 1, True) for seq in itertools.islice(texts, work.decodes)]
            if work.chunk:
                items.append(TokenWork(next(texts), work.start, work.chunk, True))
        self._busy[lane] = True
        return lane, self._runners[lane].launch(StepBatch(1, lane, items, n))

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


def _load(config: ServeConfig, threads: int) -> Model:
    described = read_config(model_folder(config))
    dtype = dtype_of(config, torch_device(config), described.dtype)
    return load_for(config, described, Role.parse("EPD"), dtype, threads)


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
