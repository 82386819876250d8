"""Gemma 3 with a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import transformers
from PIL import Image

from tests.checkpoints_gemma import make_gemma
from tests.equivalence.reference import Reference
from tests.families.chats import PICTURES, TEXTS
from tests.families.sample import SEEING, Sample

gemma_reference = partial(
    Reference, processor=transformers.Gemma3Processor, model=transformers.Gemma3ForConditionalGeneration
)


def expanded(path: Path) -> Callable[[int, int], list[int]]:
    """Only the placeholders: the chat template and the processor write what is around them."""
    processor = transformers.Gemma3Processor.from_pretrained(path, backend="pil")
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image_soft_token>")

    def ids(width: int, height: int) -> list[int]:
        made = processor(text=processor.boi_token, images=[Image.new("RGB", (width, height))])
        return [i for i in made["input_ids"][0] if i == placeholder]

    return ids


SAMPLES = {
    "gemma3": Sample(
        make_gemma,
        gemma_reference,
        TEXTS | PICTURES,
        SEEING,
        variants={"": {}, "short windows": {"seed": 1, "text": {"sliding_window": 11}}},
        compiled=True,
        expanded=expanded,
    ),
    "gemma3, windows shorter than a picture": Sample(
        partial(make_gemma, seed=1, text={"sliding_window": 11}),
        gemma_reference,
        TEXTS | PICTURES,
        ("1EPD", "1E1P1D"),
        variants={},
        compiled=True,
    ),
}
