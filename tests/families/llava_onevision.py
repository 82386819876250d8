"""LLaVA-OneVision: tiny checkpoints with seeded random weights, as transformers has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from tests.checkpoints import VOCAB, byte_level_pairs, make_picture, randomise, save_model
from tests.equivalence.reference import Frames, Reference
from tests.families.chats import PICTURES, SQUARE_VIDEOS, TEXTS
from tests.families.sample import SEEING, Sample

SIDE = 42  # of a tile: 3 x 3 patches
PINPOINTS = [[SIDE * h, SIDE * w] for h in range(1, 5) for w in range(1, 5)]
LIMIT = "anyres_max_4"  # most pictures of the tests have more tiles than this
MARKS = ("<image>", "<video>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}{{ '<' + p['type'] + '>\n' }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
VISION = {"image_size": SIDE, "patch_size": 14, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
VISION |= {"num_attention_heads": 2, "vision_use_head": False}


def make_tokenizer():
    vocab, merges = byte_level_pairs(1900, 60)
    tokenizer = transformers.Qwen2TokenizerFast(vocab=vocab, merges=merges, model_max_length=4096)
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS)
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in names])
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|im_end|>"
    return tokenizer


def make_onevision(
    out: str | Path, seed: int = 0, *, text: dict | None = None, vision: dict | None = None, config: dict | None = None
) -> Path:
    """Write a checkpoint to `out` and return it. `text`, `vision` and `config` override fields."""
    out, tokenizer = Path(out), make_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>", *MARKS)}
    decoder = TEXT | {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]} | (text or {})
    whole = transformers.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**decoder),
        vision_config=transformers.SiglipVisionConfig(**VISION | (vision or {})),
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        **{"image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": LIMIT} | (config or {}),
    )
    torch.manual_seed(seed)
    model = transformers.LlavaOnevisionForConditionalGeneration(whole).float().eval()
    randomise(model, seed)
    _scale(model, seed)
    model.generation_config = transformers.GenerationConfig(eos_token_id=ids["<|im_end|>"], do_sample=False)
    save_model(model, out, 1)
    tokenizer.save_pretrained(out)
    transformers.LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS, image_mean=[0.5, 0.4, 0.6]
    ).save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


def _scale(model, seed: int) -> None:
    """Give rows of pictures, and the newline, the scale of text embeddings."""
    picture = torch.from_numpy(make_picture(99, SIDE)).permute(2, 0, 1)[None, None].float() / 127.5 - 1.0
    projector, newline = model.model.multi_modal_projector.linear_2, model.model.image_newline
    with torch.no_grad():
        some = model.get_image_features(picture, torch.tensor([[SIDE, SIDE]]), batch_num_images=torch.tensor([2]))
        rows = some.pooler_output[0][:-1]
        scale = 1.0 / float((rows - rows.mean(0)).std())
        projector.weight.mul_(scale)
        projector.bias.sub_(rows.mean(0)).mul_(scale)
        newline.copy_(torch.randn(newline.shape, generator=torch.Generator().manual_seed(seed)))


class Processor(LlavaOnevisionProcessor):
    """transformers' own, but for the processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        pass

    @classmethod
    def from_pretrained(cls, path: Path, backend: str = "pil") -> Processor:
        assert backend == "pil"
        config = json.loads((path / "config.json").read_text())
        pictures = transformers.LlavaOnevisionImageProcessorPil.from_pretrained(path)
        frames = transformers.CLIPImageProcessorPil(
            size=pictures.size, do_center_crop=False, image_mean=pictures.image_mean, image_std=pictures.image_std
        )
        return cls(
            pictures,
            transformers.AutoTokenizer.from_pretrained(path),
            Frames(frames),
            num_image_tokens=(config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]) ** 2,
            vision_feature_select_strategy="full",
            vision_aspect_ratio=config["vision_aspect_ratio"],
            chat_template=TEMPLATE,
        )


class OnevisionReference(Reference):
    """The pictures of a chat belong to one prompt, as transformers' chat template has them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Processor, transformers.LlavaOnevisionForConditionalGeneration)

    def inputs(self, messages: list[dict]) -> dict[str, Any]:
        parts = [part for m in messages for part in m["content"]]
        pictures = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
        videos = [part["video"] for part in parts if part["type"] == "video"]
        text = self.processor.apply_chat_template(messages, chat_template=self.template, add_generation_prompt=True)
        given = {"videos": videos} if videos else {}
        return self.processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt", **given)


def expanded(path: Path) -> Callable[[int, int], list[int]]:
    processor = Processor.from_pretrained(path)

    def ids(width: int, height: int) -> list[int]:
        return list(processor(text=["<image>"], images=[[Image.new("RGB", (width, height))]])["input_ids"][0])

    return ids


SAMPLES = {
    "llava-onevision": Sample(
        make_onevision,
        OnevisionReference,
        TEXTS | PICTURES | SQUARE_VIDEOS,
        (*SEEING, "2E1P2D"),
        variants={
            "": {},
            "two layers, no limit reached": {
                "seed": 1,
                "config": {"vision_feature_layer": [-2, -1], "vision_aspect_ratio": "anyres_max_16"},
            },
            "tied": {"seed": 2, "config": {"tie_word_embeddings": True}, "text": {"tie_word_embeddings": True}},
        },
        expanded=expanded,
        sizes=((1, 1), (1, 40), (40, 1), (2000, 20), (20, 2000), (168, 168), (126, 84), (42, 42), (1920, 1080)),
    ),
}
