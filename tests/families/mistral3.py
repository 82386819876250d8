"""Mistral 3, Pixtral and LightOnOCR."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from PIL import Image

from tests.checkpoints_mistral3 import MINISTRAL, make_mistral3
from tests.equivalence.reference import generate
from tests.families.chats import PICTURES, TEXTS, image, text, user
from tests.families.sample import SEEING, Sample


class Mistral3Reference:
    """transformers' model with its Pil image processor, and prompts as its processors, which need torchvision, make
    them."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.template = (path / "chat_template.jinja").read_text()
        self.pictures = transformers.PixtralImageProcessorPil.from_pretrained(path)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        c = self.model.config
        self.lighton = c.model_type == "lighton_ocr"
        self.side = c.vision_config.patch_size * getattr(c, "spatial_merge_size", 1)
        self.row = "<|image_pad|>" if self.lighton else "[IMG]"

    @torch.inference_mode()
    def greedy(self, messages: list[dict], n_new: int) -> tuple[list[int], list[int], list[float]]:
        return generate(self.model, self.inputs(messages), n_new)

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        pictures = [part["image"].convert("RGB") for m in messages for part in m["content"] if part["type"] == "image"]
        shown = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, add_generation_prompt=True, tokenize=False
        )
        found = {}
        if pictures:
            made = self.prepared(pictures)
            found = {"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]}
            for size in made["image_sizes"].tolist():
                shown = shown.replace(self.row, self.shown(*size).replace(self.row, "<one>"), 1)
        made = self.tokenizer(shown.replace("<one>", self.row), return_tensors="pt", add_special_tokens=False)
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]} | found

    def prepared(self, pictures):
        """LightOnOCR's processor leaves the size of patches to that of pictures; Pixtral's gives it the token's."""
        return self.pictures(pictures, return_tensors="pt", **({} if self.lighton else {"patch_size": self.side}))

    def shown(self, height: int, width: int) -> str:
        """The text that stands for a picture of this size in pixels."""
        rows, columns = height // self.side, width // self.side
        if self.lighton:
            return self.row * (rows * columns)
        return ((self.row * columns + "[IMG_BREAK]") * rows).removesuffix("[IMG_BREAK]") + "[IMG_END]"


def expanded(path: Path) -> Callable[[int, int], list[int] | None]:
    reference = Mistral3Reference(path)

    def ids(width: int, height: int) -> list[int] | None:
        try:
            made = reference.prepared(Image.new("RGB", (width, height)))
        except ValueError:  # nothing is left of its short side
            return None
        shown = reference.shown(*made["image_sizes"][0].tolist())
        return reference.tokenizer(shown, add_special_tokens=False)["input_ids"] or None

    return ids


CHATS = TEXTS | PICTURES | {"tiny": [user(image(0, (40, 5)), text("?"))]}  # the reference fails for a single token
LIGHTON_CHATS = CHATS | {
    "wide": [user(text("Look at"), image(2, (590, 70)), text("and say what it is."))],  # less becomes no token
    "tiny": [user(image(0, (43, 15)), text("?"))],
}
SIZES = (
    (1, 1),
    (1, 40),
    (40, 1),
    (2000, 20),
    (20, 2000),
    (1, 8000),
    (8000, 1),
    (140, 141),
    (140, 140),
    (14, 14),
    (29, 28),
)
SAMPLES = {
    "mistral3": Sample(
        make_mistral3,
        Mistral3Reference,
        CHATS,
        (*SEEING, "2E1P2D"),
        variants={
            "": {},
            "over Ministral 3": {"seed": 1, "text": MINISTRAL},
            "inner layer, biases, tied, names within transformers": {
                "seed": 2,
                "published": False,
                "vision_feature_layer": [-2],
                "multimodal_projector_bias": True,
                "text": {"tie_word_embeddings": True},
            },
            "squares of three patches": {"seed": 3, "spatial_merge_size": 3, "vision": {"patch_size": 8}},
        },
        expanded=expanded,
        sizes=SIZES,
    ),
    "ministral3, pictures": Sample(
        partial(make_mistral3, seed=1, text=MINISTRAL),
        Mistral3Reference,
        CHATS,
        ("1EPD", "1E1P1D"),
        variants={},
        compiled=True,
    ),
    "pixtral": Sample(
        partial(make_mistral3, kind="pixtral", seed=4, vision={"patch_size": 20}),
        Mistral3Reference,
        CHATS,
        (*SEEING, "2E1P2D"),
        variants={"": {}, "two layers": {"seed": 5, "vision_feature_layer": [1, -1], "published": False}},
        expanded=expanded,
        sizes=SIZES,
    ),
    "lighton": Sample(
        partial(make_mistral3, kind="lighton", seed=6, text={"tie_word_embeddings": False}),
        Mistral3Reference,
        LIGHTON_CHATS,
        (*SEEING, "2E1P2D"),
        variants={"": {}, "whole tokens only, tied": {"seed": 7, "pictures": {"patch_size": 28}, "text": {}}},
        expanded=expanded,
        sizes=SIZES,
    ),
}
