"""SmolVLM and Idefics3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.checkpoints_smolvlm import AROUND, IMAGE, KINDS, SIDE, TEMPLATE, WHOLE, make_smolvlm
from tests.equivalence.reference import generate
from tests.families.chats import PICTURES, TEXTS
from tests.families.sample import SEEING, Sample


class SmolReference:
    """transformers' model with its Pil image processor, and prompts as its processor, which needs torchvision, makes
    them."""

    def __init__(self, path: Path, kind: str = "smolvlm") -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.pictures = getattr(transformers, f"{KINDS[kind]}ImageProcessorPil").from_pretrained(path)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        c = self.model.config
        self.rows = (c.vision_config.image_size // c.vision_config.patch_size // c.scale_factor) ** 2

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
            made = self.pictures([pictures], return_tensors="pt", return_row_col_info=True)
            found = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
            for rows, columns in zip(made["rows"][0], made["cols"][0]):
                text = text.replace(IMAGE, self.shown(rows, columns).replace(IMAGE, "<one>"), 1)
        return dict(self.tokenizer(text.replace("<one>", IMAGE), return_tensors="pt")) | found

    def shown(self, rows: int, columns: int) -> str:
        """The text that stands for a picture."""
        return get_image_prompt_string(rows, columns, self.rows, AROUND, IMAGE, WHOLE)


def expanded(path: Path, kind: str) -> Callable[[int, int], list[int]]:
    reference = SmolReference(path, kind)

    def ids(width: int, height: int) -> list[int]:
        made = reference.pictures([[Image.new("RGB", (width, height))]], return_row_col_info=True)
        return reference.tokenizer(reference.shown(made["rows"][0][0], made["cols"][0][0]))["input_ids"]

    return ids


SAMPLES = {
    "smolvlm": Sample(
        make_smolvlm,
        SmolReference,
        TEXTS | PICTURES,
        (*SEEING, "2E1P2D"),
        variants={"": {}, "bare": {"seed": 3, "pictures": {"do_image_splitting": False}}},
        expanded=partial(expanded, kind="smolvlm"),
    ),
    "idefics3": Sample(
        partial(make_smolvlm, kind="idefics3", seed=1),
        partial(SmolReference, kind="idefics3"),
        TEXTS | PICTURES,
        ("1EPD", "1E1P1D"),
        variants={"tied, squares of three": {"text": {"tie_word_embeddings": True}, "scale_factor": 4}},
        expanded=partial(expanded, kind="idefics3"),
        sizes=((SIDE, SIDE), (SIDE + 1, SIDE), (1, 40), (2000, 20), (20, 2000)),
    ),
}
