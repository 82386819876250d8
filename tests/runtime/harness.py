"""A minimal driver of runners: one request or several, chunks of any size, no scheduler."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from hydrainfer.cache import CacheSet
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
from hydrainfer.models import load_model
from hydrainfer.runtime import LaneThread, LanguageRunner, VisionRunner
from hydrainfer.storage import BlockStore
from tests.checkpoints import make_picture
from tests.pillow import configured

IMAGE = -1
"""Stands for one picture in a prompt written as a list."""


@dataclass
class Prompt:
    """`parts`: token ids, with `IMAGE` where a picture goes; pictures are seeded by `pictures`."""

    parts: list[int]
    pictures: list[int]


class Rig:
    """Model, stores and runners of one EPD instance. Pictures are normalised as Pillow's are."""

    def __init__(self, path: Path, dtype: str = "float32", kv_blocks: int = 256, ops=None, capture=None) -> None:
        self.model = load_model(path, Role.parse("EPD"), "cpu", dtype, ops=ops, config=configured(path))
        self.config = self.model.config
        embed, *kept = self.model.cache_specs(kv_block_tokens=4, embed_block_tokens=8)
        self.caches = CacheSet({embed: 64, **dict.fromkeys(kept, kv_blocks)})
        self.leases = {}
        self.embeds, self.kv, *more = [
            BlockStore(spec, self.caches.pools[spec.name].n_blocks) for spec in (embed, *kept)
        ]
        self.pixels: dict[str, np.ndarray] = {}
        self.wake = threading.Event()
        vision, language = (LaneThread(lane, self.model.device, self.wake.set) for lane in Lane)
        self.vision = VisionRunner(self.model, self.embeds, self.pixels.__getitem__, vision)
        self.language = LanguageRunner(self.model, (self.kv, *more, self.embeds), language, capture=capture)
        self.n_batches = 0

    def close(self) -> None:
        self.vision.close()
        self.language.close()

    def sequence_ids(self, prompt: Prompt) -> list[int]:
        """The prompt's ids with every picture expanded to its placeholders."""
        image = [self.config.media_tokens[0]] * self.config.vision.tokens
        return [i for part in prompt.parts for i in (image if part == IMAGE else [part])]

    def sequence(self, prompt: Prompt, n_new: int, sampling: SamplingParams | None = None, **fields) -> LiveSequence:
        """A sequence with its blocks reserved; `fields` go to the request."""
        name = f"r{self.n_batches}-{len(self.pixels)}-{len(self.leases)}"
        n, ids, media = self.config.vision.tokens, [], []
        for part in prompt.parts:
            if part != IMAGE:
                ids.append(part)
                continue
            key = f"{name}/{len(media)}"
            self.pixels[key] = make_picture(prompt.pictures[len(media)], self.config.vision.image_size)
            media.append(MediaSpan(len(ids), n, key.encode(), key))
            ids += [self.config.media_tokens[0]] * n
        request = Request(
            id=name,
            prompt_ids=tuple(ids),
            sampling=sampling or SamplingParams(temperature=0.0),
            max_tokens=n_new,
            seed=fields.pop("seed", 0),
            media=tuple(media),
            **fields,
        )
        seq = LiveSequence(request, (0.0, 0), 0.0)
        need = {s.name: s.need(request, 0, len(ids) + n_new) for s in (self.embeds.spec, self.kv.spec)}
        lease = self.caches.reserve(name, need)
        assert lease is not None, "the rig's pools are too small"
        seq.hold.blocks, self.leases[name] = lease.blocks, lease
        return seq

    def release(self, seq: LiveSequence) -> None:
        self.caches.release(self.leases.pop(seq.id))

    def wait(self, ticket) -> StepResult:
        while (result := ticket.poll(0.0)) is None:
            assert self.wake.wait(60), "the lane did not answer"
            self.wake.clear()
        return result

    def encode(self, seqs: list[LiveSequence]) -> StepResult:
        work = [EncodeWork(s, i) for s in seqs for i in range(len(s.request.media))]
        self.n_batches += 1
        return self.wait(self.vision.launch(StepBatch(self.n_batches, Lane.VISION, work, len(work))))

    def step(self, work: list[TokenWork]) -> StepResult:
        """One language batch; cursors advance and sampled tokens are appended."""
        self.n_batches += 1
        batch = StepBatch(self.n_batches, Lane.LANGUAGE, work, sum(w.count for w in work))
        result = self.wait(self.language.launch(batch))
        if result.error is None:
            sampled = iter(result.tokens)
            for w in work:
                w.seq.n_computed += w.count
                if w.sample:
                    w.seq.tokens.append(next(sampled))
        return result

    def run(self, seqs: list[LiveSequence], chunk: int = 10_000) -> list[list[int]]:
        """Encode, then prefill in chunks beside whatever decodes already, to the end of every request."""
        if any(s.request.media for s in seqs):
            assert self.encode([s for s in seqs if s.request.media]).error is None
        for _ in range(10_000):
            work = []
            for s in seqs:
                if s.n_produced < s.request.max_tokens:
                    count = min(chunk, len(s.tokens) - s.n_computed)
                    work.append(TokenWork(s, s.n_computed, count, s.n_computed + count == len(s.tokens)))
            if not work:
                break
            result = self.step(work)
            assert result.error is None, result.error
        outputs = [s.tokens[s.request.n_prompt :] for s in seqs]
        for s in seqs:
            self.release(s)
        self.caches.check(idle=True)
        return outputs


class Reference:
    """transformers' own LLaVA on the same checkpoint."""

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        kind = transformers.LlavaForConditionalGeneration
        self.model = kind.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
        c = self.model.config.vision_config
        self.size = c.image_size
        self.mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
        self.std = torch.tensor([0.26862954, 0.26130258, 0.27577711])

    def pixels(self, seeds: list[int]) -> dict[str, torch.Tensor]:
        """The keyword argument with [pictures, 3, size, size] normalised pixels, if there are pictures."""
        if not seeds:
            return {}
        pictures = torch.from_numpy(np.stack([make_picture(s, self.size) for s in seeds])).float() / 255
        pixels = ((pictures - self.mean) / self.std).permute(0, 3, 1, 2)
        return {"pixel_values": pixels.to(self.model.dtype)}

    @torch.inference_mode()
    def logits(self, ids: list[int], pictures: list[int]) -> torch.Tensor:
        """Teacher-forced float32 [len(ids), vocab]."""
        return self.model(input_ids=torch.tensor([ids]), **self.pixels(pictures)).logits[0].float()

    def greedy(self, ids: list[int], pictures: list[int], n_new: int) -> tuple[list[int], list[float]]:
        """`n_new` ids and, for each, the gap between the two best logits."""
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=torch.tensor([ids]),
                **self.pixels(pictures),
                max_new_tokens=n_new,
                min_new_tokens=0,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(out.logits).float().topk(2, dim=-1).values
        return out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist()
