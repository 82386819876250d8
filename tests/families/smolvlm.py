"""SmolVLM and Idefics3."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.smolvlm import processing_smolvlm as processing
from transformers.video_utils import VideoMetadata

from tests.checkpoints import make_picture
from tests.checkpoints_smolvlm import AROUND, IMAGE, KINDS, SIDE, TEMPLATE, WHOLE, make_smolvlm
from tests.equivalence.reference import generate
from tests.families.chats import PICTURES, TEXTS, image, text, user
from tests.families.sample import SEEING, Sample

VIDEO = "<video>"
WORDS = {
    **dict(enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)),
    11: "eleven",
    12: "twelve",
    24: "twenty-four",
}
"""Numbers as num2words, which transformers needs, writes them."""


def video(seed: int, n: int, height: int, width: int, fps: float) -> dict:
    """Frames that the caller has sampled."""
    frames = np.stack([make_picture(seed + i, max(height, width))[:height, :width] for i in range(n)])
    return {"type": "video", "video": frames, "fps": fps}


VIDEOS = {
    "video": [user(text("What happens:"), video(10, 3, 90, 130, 0.03), text("Say it."))],
    "video first": [user(video(30, 1, 40, 300, 2.0), text(" And?"))],
    "videos": [user(video(20, 2, 60, 60, 1.7), text(" or "), image(4), text("or"), video(40, 4, 31, 9, 25.0))],
}


class SmolReference:
    """transformers' model with its Pil image processor, and prompts as its processor, which needs torchvision, makes
    them. A frame is as a picture that is not split."""

    def __init__(self, path: Path, kind: str = "smolvlm") -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.pictures = getattr(transformers, f"{KINDS[kind]}ImageProcessorPil").from_pretrained(path)
        self.frames = type(self.pictures).from_pretrained(path, do_image_splitting=False)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        c = self.model.config
        self.rows = (c.vision_config.image_size // c.vision_config.patch_size // c.scale_factor) ** 2

    @torch.inference_mode()
    def greedy(self, messages: list[dict], n_new: int) -> tuple[list[int], list[int], list[float]]:
        return generate(self.model, self.inputs(messages), n_new)

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        media = [part for m in messages for part in m["content"] if part["type"] != "text"]
        clips = any(part["type"] == "video" for part in media)
        written = self.tokenizer.apply_chat_template(
            messages,
            chat_template=processing.DEFAULT_CHAT_TEMPLATE if clips else TEMPLATE,
            add_generation_prompt=True,
            tokenize=False,
        )
        made = [self._image(part["image"]) if part["type"] == "image" else self._video(**part) for part in media]
        texts = iter([one for one, _ in made])
        found = dict(self.tokenizer(re.sub(f"{IMAGE}|{VIDEO}", lambda _: next(texts), written), return_tensors="pt"))
        if made:
            pixels = torch.cat([one for _, one in made], dim=1)  # [1, tiles, rgb, height, width]
            found |= {"pixel_values": pixels, "pixel_attention_mask": torch.ones_like(pixels[:, :, 0]).long()}
        return found

    def _image(self, picture: Image.Image) -> tuple[str, torch.Tensor]:
        """What stands for a picture in a prompt, and its tiles."""
        made = self.pictures([[picture.convert("RGB")]], return_tensors="pt", return_row_col_info=True)
        return self.shown(made["rows"][0][0], made["cols"][0][0]), made["pixel_values"]

    def _video(self, video: np.ndarray, fps: float, **_: str) -> tuple[str, torch.Tensor]:
        """What stands for a video in a prompt, and its frames."""
        n = len(video)
        pixels = self.frames([[Image.fromarray(frame) for frame in video]], return_tensors="pt")["pixel_values"]
        facts = VideoMetadata(total_num_frames=n, fps=fps, duration=n / fps, frames_indices=list(range(n)))
        names = {"image_seq_len": self.rows, "fake_image_token": AROUND, "image_token": IMAGE}
        with patch.object(processing, "num2words", WORDS.get):
            shown = processing.SmolVLMProcessor.replace_video_token(
                SimpleNamespace(**names, global_image_token=WHOLE),
                {"pixel_values": pixels, "video_metadata": [facts]},
                0,
            )
        return shown, pixels

    def shown(self, rows: int, columns: int) -> str:
        """The text that stands for a picture."""
        return processing.get_image_prompt_string(rows, columns, self.rows, AROUND, IMAGE, WHOLE)


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
        TEXTS | PICTURES | VIDEOS,
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
