"""Mistral 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from PIL import Image

from tests.checkpoints_mistral3 import EDGE, MINISTRAL, PATCH, TEMPLATE, make_mistral3
from tests.equivalence.reference import generate
from tests.families.chats import PICTURES, TEXTS, image, text, user
from tests.families.sample import SEEING, Sample


class Mistral3Reference:
    """transformers' model with its Pil image processor, and prompts as its processor, which needs torchvision, makes
    them."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.pictures = transformers.PixtralImageProcessorPil.from_pretrained(path)
        self.model = transformers.Mistral3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self.factor = PATCH * self.model.config.spatial_merge_size

    @torch.inference_mode()
    def greedy(self, messages: list[dict], n_new: int) -> tuple[list[int], list[int], list[float]]:
        return generate(self.model, self.inputs(messages), n_new)

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        pictures = [part["image"].convert("RGB") for m in messages for part in m["content"] if part["type"] == "image"]
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        found = {}
        if pictures:
            made = self.pictures(pictures, return_tensors="pt", patch_size=self.factor)
            found = {"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]}
            for size in made["image_sizes"].tolist():
                text = text.replace("[IMG]", self.shown(*size).replace("[IMG]", "<one>"), 1)
        made = self.tokenizer(text.replace("<one>", "[IMG]"), return_tensors="pt", add_special_tokens=False)
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]} | found

    def shown(self, height: int, width: int) -> str:
        """The text that stands for a picture of this size in pixels."""
        row = "[IMG]" * (width // self.factor) + "[IMG_BREAK]"
        return (row * (height // self.factor)).removesuffix("[IMG_BREAK]") + "[IMG_END]"


def expanded(path: Path) -> Callable[[int, int], list[int]]:
    reference = Mistral3Reference(path)

    def ids(width: int, height: int) -> list[int]:
        least = math.ceil(max(width, height) / EDGE)  # of a narrower picture the reference would leave nothing
        picture = Image.new("RGB", (max(width, least), max(height, least)))
        made = reference.pictures(picture, patch_size=reference.factor)
        shown = reference.shown(*made["image_sizes"][0])
        return reference.tokenizer(shown, add_special_tokens=False)["input_ids"]

    return ids


CHATS = TEXTS | PICTURES | {"tiny": [user(image(0, (40, 5)), text("?"))]}  # the reference fails for a single token
SAMPLES = {
    "mistral3": Sample(
        make_mistral3,
        Mistral3Reference,
        CHATS,
        (*SEEING, "2E1P2D"),
        variants={
            "": {},
            "over Ministral 3": {"seed": 1, "text": MINISTRAL},
            "inner layer, biases, tied": {
                "seed": 2,
                "vision_feature_layer": -2,
                "multimodal_projector_bias": True,
                "text": {"tie_word_embeddings": True},
            },
        },
        expanded=expanded,
    ),
    "ministral3, pictures": Sample(
        partial(make_mistral3, seed=1, text=MINISTRAL),
        Mistral3Reference,
        CHATS,
        ("1EPD", "1E1P1D"),
        variants={},
        compiled=True,
    ),
}
