"""transformers' Qwen models, and LFM3-VL, on the same checkpoint and messages, fed by its Pil image processor and by
frames prepared here, independently of the product: its own processors need torchvision."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from tests.checkpoints_qwen import TEMPLATE
from tests.equivalence.reference import generate


class Reference:
    """`greedy(messages)` → prompt ids, answer ids, and per answer id the distance of the two best logits."""

    def __init__(self, path: Path, pictures=transformers.Qwen2VLImageProcessorPil) -> None:
        self.family = json.loads((path / "config.json").read_text())["model_type"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.pictures = pictures.from_pretrained(path)
        given = path / "video_preprocessor_config.json"
        self.video = json.loads(given.read_text()) if given.exists() else {}
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.config = self.model.config

    def inputs(self, messages: list[dict], size: dict | None = None) -> dict[str, torch.Tensor]:
        """Arguments of the model. Videos are frames that the caller has sampled."""
        parts = [p for m in messages if not isinstance(m["content"], str) for p in m["content"]]
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        found: dict[str, torch.Tensor] = {}
        images = [p["image"] for p in parts if p["type"] == "image"]
        if images:
            made = self.pictures(images, return_tensors="pt", **({"size": size} if size else {}))
            found |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
            for grid in found["image_grid_thw"].tolist():
                text = text.replace("<|image_pad|>", "<image>" * (math.prod(grid) // 4), 1)
        videos = [(p["video"], p.get("fps", 2.0)) for p in parts if p["type"] == "video"]
        if videos:
            patches, grids = zip(*(self.patches(frames) for frames, _ in videos))
            found |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
            if self.family == "qwen2_5_vl":
                found["second_per_grid_ts"] = torch.tensor([2 / fps for _, fps in videos])
            for (frames, fps), grid in zip(videos, grids):
                text = text.replace("<|video_pad|>", self._shown(len(frames), fps, grid), 1)
        text = text.replace("<image>", "<|image_pad|>").replace("<video>", "<|video_pad|>")
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        if self.family != "lfm3_vl":  # whose positions are plain
            kinds = (ids == self.config.image_token_id).int() + 2 * (ids == self.config.video_token_id).int()
            found["mm_token_type_ids"] = kinds
        return {"input_ids": ids, **found}

    def _shown(self, n: int, fps: float, grid: tuple[int, int, int]) -> str:
        each = "<video>" * (grid[1] * grid[2] // 4)
        if self.family.startswith("qwen2"):
            return each * grid[0]
        at = [i / fps for i in [*range(n), n - 1]]
        times = [(at[2 * i] + at[2 * i + 1]) / 2 for i in range(grid[0])]
        return "".join(f"<{t:.1f} seconds><|vision_start|>{each}<|vision_end|>" for t in times)

    def patches(self, frames: np.ndarray) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Resized, normalised, cut: [rows, 3 * 2 * patch ** 2], and (t, h, w) in patches."""
        p = self.pictures.patch_size
        h, w = self.target(*frames.shape[:3])
        made = [np.asarray(Image.fromarray(f).resize((w, h), Image.Resampling.BICUBIC)) for f in frames]
        made += [made[-1]] * (len(made) % 2)
        x = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.pictures.image_mean, self.pictures.image_std))
        x = ((x - mean) / std).unfold(2, 2 * p, 2 * p).unfold(3, 2 * p, 2 * p)  # [frames, 3, rows, columns, 2p, 2p]
        x = x.unfold(4, p, p).unfold(5, p, p).unflatten(0, (-1, 2))  # [t, 2, 3, rows, columns, 2, 2, p, p]
        flat = x.permute(0, 3, 4, 5, 6, 2, 1, 7, 8).reshape(-1, 6 * p * p)
        return flat, (len(made) // 2, h // p, w // p)

    def target(self, n: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self.video.get("size") or self.pictures.size
        least, most = size["shortest_edge"], size["longest_edge"]
        factor = 2 * self.pictures.patch_size
        if self.family.startswith("qwen2"):
            return smart_resize(height, width, factor, least, most)
        h, w, t = round(height / factor) * factor, round(width / factor) * factor, round(n / 2) * 2
        if t * h * w > most:
            beta = math.sqrt(n * height * width / most)
            return (max(factor, math.floor(x / beta / factor) * factor) for x in (height, width))
        if t * h * w < least:
            beta = math.sqrt(least / (n * height * width))
            return (math.ceil(x * beta / factor) * factor for x in (height, width))
        return h, w

    @torch.inference_mode()
    def greedy(self, messages: list[dict], n_new: int, **options) -> tuple[list[int], list[int], list[float]]:
        self.model.model.rope_deltas = None
        return generate(self.model, self.inputs(messages, **options), n_new)
