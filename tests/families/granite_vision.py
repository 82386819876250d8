"""Granite Vision 3: LLaVA-NeXT over SigLIP, several of whose layers are used, and Granite, which multiplies its input,
pictures too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import transformers
from PIL import Image

from tests.checkpoints_next import make_llava_next
from tests.equivalence.reference import Reference
from tests.families.chats import IN_ORDER, PICTURES, TEXTS
from tests.families.sample import SEEING, Sample

GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
}
LAYERS = {"vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full"}
make = partial(make_llava_next, text="granite", siglip=True, template=IN_ORDER, config=LAYERS, text_config=GRANITE)
reference = partial(
    Reference, processor=transformers.LlavaNextProcessor, model=transformers.LlavaNextForConditionalGeneration
)


def expanded(path: Path) -> Callable[[int, int], list[int]]:
    processor = transformers.LlavaNextProcessor.from_pretrained(path, backend="pil")

    def ids(width: int, height: int) -> list[int]:
        made = processor(text="<image>", images=[Image.new("RGB", (width, height))])
        return [i for i in made["input_ids"][0] if i == processor.image_token_id]

    return ids


SAMPLES = {
    "granite vision": Sample(
        partial(make, seed=2),
        reference,
        TEXTS | PICTURES,
        SEEING,
        variants={
            "": {},
            "tied": {"seed": 3, "config": LAYERS | {"tie_word_embeddings": True}, "text_config": GRANITE},
        },
        expanded=expanded,
    ),
}
