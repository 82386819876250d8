"""One model behind its runners, without engine and scheduler: seconds of its steps, for any family."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import torch

from hydrainfer.cache import CacheSpec, EmbedSpec
from hydrainfer.config.schema import Quantization
from hydrainfer.core import (
    EncodeWork,
    Lane,
    LiveSequence,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    StepBatch,
    StepResult,
    TokenWork,
)
from hydrainfer.families import read_config
from hydrainfer.models import Model, load_model
from hydrainfer.ops import OpSet, select_ops
from hydrainfer.planner.inputs import shape_of
from hydrainfer.runtime import LaneThread, LanguageRunner, ThreadCount, VisionRunner
from hydrainfer.storage import BlockStore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEP_LIMIT_S = 120.0


class Stages:
    """Requests of `prompt_tokens` each, whose caches hold noise, so that none of it comes from a page that was never
    written. They begin with a picture if all pictures of this model have one size (`picture_tokens`), which is not 0
    then. `ops`: instead of those that are chosen, with the compiled kernels if `native`."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        n_requests: int,
        prompt_tokens: int,
        threads: int,
        *,
        native: bool = True,
        quantization: Quantization = "none",
        ops: OpSet | None = None,
        device: str = "cpu",
    ) -> None:
        config = read_config(path)
        ops = ops or select_ops(
            device,
            DTYPES[dtype],
            config.text.head_dim,
            use_native=native,
            threads=threads,
            quantization=quantization,
        )
        if native and f"native-{device}" not in dict(ops.describe()).values():
            raise SystemExit("; ".join(ops.notes) or "the compiled kernels do not support this")
        side = getattr(config.vision, "image_size", 0)
        self.picture_tokens, self.picture_bytes = config.vision.tokens if side else 0, 3 * side**2
        self.model: Model = load_model(path, Role.parse("EPD" if side else "PD"), device, dtype, ops=ops)
        self.shape = shape_of(str(path), dtype, quantization)
        self._prompt_tokens = prompt_tokens
        n_blocks = {spec: self._blocks_of(spec) for spec in self.model.cache_specs()}
        stores = [BlockStore(spec, max(1, n_requests * n), device) for spec, n in n_blocks.items()]
        for part in (part for store in stores for layer in store.layers for part in layer.values()):
            part.normal_()
        draw = np.random.default_rng(0)
        pixels = {str(i): draw.integers(0, 256, (side, side, 3), dtype=np.uint8) for i in range(n_requests)}
        self._woken = threading.Event()

        def thread(lane: Lane) -> LaneThread:
            return LaneThread(lane, self.model.device, self._woken.set, ThreadCount(lambda: threads, fixed=True))

        self._vision = None
        if side:
            embeds = next(store for store in stores if isinstance(store.spec, EmbedSpec))
            self._vision = VisionRunner(self.model, embeds, pixels.__getitem__, thread(Lane.VISION))
        self._language = LanguageRunner(self.model, stores, thread(Lane.LANGUAGE))
        self._requests = [self._sequence(i, n_blocks) for i in range(n_requests)]

    def _blocks_of(self, spec: CacheSpec) -> int:
        """The blocks a request holds; of a window all of them, so that a batch can be repeated at any length."""
        if isinstance(spec, EmbedSpec):
            return spec.blocks_for(self.picture_tokens)
        return spec.blocks_for(self._prompt_tokens) if spec.paged else int(spec.most(2))

    def _sequence(self, i: int, n_blocks: dict[CacheSpec, int]) -> LiveSequence:
        n, vocab = self.picture_tokens, self.model.config.text.vocab
        text = (300 + k % (vocab - 300) for k in range(self._prompt_tokens - n - 1))
        shown = (MediaSpan(1, n, b"%d" % i, str(i), whole=bool(self.model.config.sees_whole)),) if n else ()
        request = Request(
            id=f"r{i}",
            prompt_ids=(1, *self.model.config.media_tokens[:1] * n, *text),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=16,
            seed=1,
            media=shown,
        )
        seq = LiveSequence(request, (0.0, i), 0.0)
        seq.hold.blocks = {spec.name: list(range(i * n, (i + 1) * n)) for spec, n in n_blocks.items()}
        return seq

    def _run(self, lane: Lane, work: list) -> float:
        """Seconds from launch to result. The sequences stay as they are, so that a batch can be repeated."""
        runner = self._vision if lane is Lane.VISION else self._language
        assert runner is not None, "a model without pictures of one size"
        n = len(work) if lane is Lane.VISION else sum(item.count for item in work)
        start_s = time.perf_counter()
        ticket = runner.launch(StepBatch(1, lane, work, n))
        result: StepResult | None
        while (result := ticket.poll(0.0)) is None:
            if not self._woken.wait(STEP_LIMIT_S):
                raise SystemExit(f"a {lane.value} batch did not end within {STEP_LIMIT_S:.0f} s")
            self._woken.clear()
        took_s = time.perf_counter() - start_s
        if result.error is not None:
            raise result.error
        return took_s

    def encode(self, n: int) -> float:
        return self._run(Lane.VISION, [EncodeWork(seq, 0) for seq in self._requests[:n]])

    def prefill(self, n: int) -> float:
        return self._run(Lane.LANGUAGE, [TokenWork(seq, 0, self._prompt_tokens, True) for seq in self._requests[:n]])

    def decode(self, n: int) -> float:
        last = self._prompt_tokens - 1
        return self._run(Lane.LANGUAGE, [TokenWork(seq, last, 1, True) for seq in self._requests[:n]])

    def verify(self, n_rows: int, n: int = 1) -> float:
        """A decode of each of `n` requests with `n_rows - 1` drafts."""
        first = self._prompt_tokens - n_rows
        work = [TokenWork(s, first, n_rows, True, tuple(s.tokens[first + 1 :])) for s in self._requests[:n]]
        return self._run(Lane.LANGUAGE, work)

    def close(self) -> None:
        if self._vision is not None:
            self._vision.close()
        self._language.close()
