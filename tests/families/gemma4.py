"""Gemma 4 with its vision tower: as E2B and E4B, as 31B and as 26B-A4B."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from PIL import Image

from tests.checkpoints_gemma4 import make_gemma4
from tests.equivalence.reference import generate
from tests.families.chats import PICTURES, TEXTS, image, text, user, video
from tests.families.sample import SEEING, Sample

VIDEOS = {
    "video": [user(text("What happens:\n"), video(10, 3, 90, 130, 0.03), text("Say it."))],
    "video and picture": [user(video(20, 2, 60, 60, 1.7), text("or "), image(4), text("Compare."))],
}


def shown(n_tokens: list[int], fps: float) -> str:
    """What stands in a prompt for a video of frames with so many tokens."""
    times = [divmod(int(i / fps), 60) for i in range(len(n_tokens))]
    return " ".join(f"{m:02d}:{s:02d} <|image>{'<|video|>' * n}<image|>" for (m, s), n in zip(times, n_tokens))


class Gemma4Reference:
    """As `tests.equivalence.reference.Reference`. The texts around pictures and frames are written here: transformers'
    processor of both needs torchvision."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        given = json.loads((path / "processor_config.json").read_text())
        self.pictures, self.frames = (
            transformers.Gemma4ImageProcessorPil(max_soft_tokens=given[f"{kind}_processor"]["max_soft_tokens"])
            for kind in ("image", "video")
        )
        self.template = (path / "chat_template.jinja").read_text()
        kind = transformers.Gemma4ForConditionalGeneration
        self.model = kind.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, messages: list[dict], n_new: int) -> tuple[list[int], list[int], list[float]]:
        return generate(self.model, self.inputs(messages), n_new)

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        """The arguments that the model is called with."""
        parts = [part for m in messages for part in m["content"]]
        rendered = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, add_generation_prompt=True, tokenize=False
        )
        found: dict[str, torch.Tensor] = {}
        images = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
        if images:
            made = self.pictures(images, return_tensors="pt")
            found |= {"pixel_values": made["pixel_values"], "image_position_ids": made["image_position_ids"]}
            for n in made["num_soft_tokens_per_image"]:
                rendered = rendered.replace("<|image|>", f"<|image>{'<>' * n}<image|>", 1)
        clips = [part for part in parts if part["type"] == "video"]
        if clips:
            made = [self.frames([Image.fromarray(f) for f in part["video"]], return_tensors="pt") for part in clips]
            found |= {
                "pixel_values_videos": torch.cat([one["pixel_values"] for one in made]),
                "video_position_ids": torch.cat([one["image_position_ids"] for one in made]),
                "num_frames_per_video": torch.tensor([len(part["video"]) for part in clips]),
            }
            for part, one in zip(clips, made):
                rendered = rendered.replace("<|video|>", shown(one["num_soft_tokens_per_image"], part["fps"]), 1)
        ids = self.tokenizer(rendered.replace("<>", "<|image|>"), return_tensors="pt", add_special_tokens=False)[
            "input_ids"
        ]
        c = self.model.config
        kinds = (ids == c.image_token_id).int() + 2 * (ids == c.video_token_id).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **found}


def expanded(path: Path) -> Callable[[int, int], list[int]]:
    """Only the placeholders: the prompt's text has what is around them."""
    reference = Gemma4Reference(path)

    def ids(width: int, height: int) -> list[int]:
        made = reference.pictures([Image.new("RGB", (width, height))])
        return [reference.model.config.image_token_id] * made["num_soft_tokens_per_image"][0]

    return ids


CHATS = TEXTS | PICTURES | VIDEOS
FEW = {name: CHATS[name] for name in ("text in turns", "tall", "several sizes", "turns", "video and picture")}
TIED = {"text": {"tie_word_embeddings": True}, "vision": {"use_clipped_linears": True}}
SAMPLES = {
    "gemma4, e2b": Sample(
        partial(make_gemma4, kind="e2b", seed=1),  # with most seeds its own float32 is 1e-4 from float64
        Gemma4Reference,
        CHATS,
        (*SEEING, "2E1P2D"),
        compiled=True,
        expanded=expanded,
    ),
    "gemma4, e2b, another seed": Sample(
        partial(make_gemma4, kind="e2b", seed=9, vision={"use_clipped_linears": False}),
        Gemma4Reference,
        FEW,
        ("1EPD",),
    ),
    "gemma4, 31b": Sample(
        partial(make_gemma4, kind="31b", seed=2),
        Gemma4Reference,
        FEW,
        ("1EPD", "1E1P1D", "2E1P2D"),
        variants={
            "windows longer than a picture": {"seed": 3, "text": {"sliding_window": 100}},
            "shared keys": {"text": {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 12}},
            "tied, bounds": TIED,
        },
        compiled=True,
    ),
    "gemma4, 31b, another seed": Sample(partial(make_gemma4, kind="31b"), Gemma4Reference, FEW, ("1EPD",)),
    "gemma4, 26b-a4b": Sample(
        partial(make_gemma4, kind="26b-a4b", seed=7),
        Gemma4Reference,
        FEW,
        ("1EPD", "1E1P1D"),
        variants={"": {}, "causal": {"seed": 5, "text": {"use_bidirectional_attention": None}}},
    ),
}
