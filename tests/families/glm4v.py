"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR, with tiny checkpoints whose weights are random."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from PIL import Image

from tests.checkpoints import byte_level_pairs, randomise, save_model
from tests.equivalence import qwen_reference
from tests.families.chats import PICTURES, TEXTS, text, user, video
from tests.families.sample import SEEING, Sample

SPECIAL = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
)
_LEARNED, VOCAB = 1900, 2048
TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% elif part['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SIZE = {"shortest_edge": 8 * 28 * 28, "longest_edge": 2 * 40 * 28 * 28}
_CLASSES = {
    "glm4v": "Glm4vForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm_ocr": "GlmOcrForConditionalGeneration",
}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2}
_TEXTS = {
    "glm4v_moe": _EXPERTS | {"head_dim": 16, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    "glm_ocr": {"head_dim": 32},
}
_ADDED = ("attn.proj", "o_proj", "down_proj", "post_self_attn_layernorm", "post_mlp_layernorm")


def make_tokenizer(context: int = 4096):
    """A tokenizer like GLM's: byte-level, with the special tokens behind the vocabulary."""
    vocab, merges = byte_level_pairs(_LEARNED, 60)
    tokenizer = transformers.Qwen2TokenizerFast(vocab=vocab, merges=merges, model_max_length=context)
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|endoftext|>"
    return tokenizer


def make_glm(
    kind: str,
    out: str | Path,
    seed: int = 0,
    *,
    newer: bool = False,
    text: dict | None = None,
    vision: dict | None = None,
    tied: bool = False,
    shards: int = 1,
) -> Path:
    """Write a checkpoint to `out` and return it. `newer`: with GLM-4.6V's processors. `text` and `vision` override
    fields of the configurations."""
    out, tokenizer = Path(out), make_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    if kind == "glm_ocr":
        rope |= {"partial_rotary_factor": 1.0, "mrope_section": [4, 6, 6]}
    text_fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "eos_token_id": [ids["<|endoftext|>"], ids["<|user|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        **_TEXTS.get(kind, {}),
        **(text or {}),
    }
    vision_fields = {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "image_size": 84,
        "out_hidden_size": 64,
        "intermediate_size": 72,
        **(vision or {}),
    }
    model_class = getattr(transformers, _CLASSES[kind])
    whole = model_class.config_class(
        text_config=text_fields,
        vision_config=vision_fields,
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model = model_class(whole).float().eval()
    randomise(model, seed)
    _settle(model)
    eos = text_fields["eos_token_id"]
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, do_sample=False)
    save_model(model, out, shards)
    tokenizer.save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    _save_preprocessors(out, "Glm46V" if newer else "Glm4v")
    return out


def _settle(model) -> None:
    """Give the rows of pictures the deviation of text embeddings, one. What a layer adds is small beside what it adds
    it to, as after training: else errors of rounding grow from layer to layer."""
    visual = model.model.visual
    patches = torch.randn((8 * 8, 3 * 2 * 14**2), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in _ADDED):
                weight.mul_(0.4)
        rows = visual(patches, grid_thw=torch.tensor([[1, 8, 8]])).pooler_output
        visual.merger.down_proj.weight.div_(float(rows.std()))


def _save_preprocessors(out: Path, name: str) -> None:
    """The preprocessor files as published."""
    common = {"size": SIZE, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    common["processor_class"] = f"{name}Processor"
    pictures = common | {"image_processor_type": f"{name}ImageProcessor"}
    videos = common | {"size": SIZE | {"longest_edge": 200 * 28 * 28}}
    videos |= {"video_processor_type": f"{name}VideoProcessor", "fps": 2}
    (out / "preprocessor_config.json").write_text(json.dumps(pictures))
    (out / "video_preprocessor_config.json").write_text(json.dumps(videos))


class Reference(qwen_reference.Reference):
    """transformers' model, fed by its Pil processor of pictures, and by frames that are prepared here: its processors
    of videos, with which `tests/processor/pictures/test_glm.py` compares ours, need torchvision."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.pictures = transformers.Glm4vImageProcessorPil.from_pretrained(path)
        self.video = json.loads((path / "video_preprocessor_config.json").read_text())
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def inputs(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        parts = [part for m in messages for part in m["content"]]
        shown = self.tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        found: dict[str, torch.Tensor] = {}
        images = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
        if images:
            made = self.pictures(images, return_tensors="pt")
            found |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
            for grid in made["image_grid_thw"].tolist():
                shown = shown.replace("<|image|>", "<row>" * (math.prod(grid) // 4), 1)
        videos = [part for part in parts if part["type"] == "video"]
        if videos:
            patches, grids = zip(*(self.patches(part["video"]) for part in videos))
            found |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
            for part, grid in zip(videos, grids):
                frames = [self._frame(2 * i / part["fps"], grid[1] * grid[2] // 4) for i in range(grid[0])]
                shown = shown.replace("<|video|>", "".join(frames), 1)
        shown = shown.replace("<row>", "<|image|>")
        ids = self.tokenizer(shown, return_tensors="pt", add_special_tokens=False)["input_ids"]
        start, end, row = map(self.tokenizer.convert_tokens_to_ids, SPECIAL[8:11])
        in_video = (ids == start).cumsum(1) > (ids == end).cumsum(1)
        return {"input_ids": ids, **found, "mm_token_type_ids": (ids == row).int() * (1 + in_video.int())}

    def _frame(self, second: float, n: int) -> str:
        newer = self.video["processor_class"] == "Glm46VProcessor"
        told = f"{second:.1f} seconds" if newer else str(int(second))
        return f"<|begin_of_image|>{'<row>' * n}<|end_of_image|>{told}"

    def target(self, n: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

        size = self.video["size"]
        return smart_resize(n, height, width, 2, 28, size["shortest_edge"], size["longest_edge"])


def expanded(path: Path) -> Callable[[int, int], list[int] | None]:
    processor = transformers.Glm4vImageProcessorPil.from_pretrained(path)
    row = transformers.AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<|image|>")

    def ids(width: int, height: int) -> list[int] | None:
        try:
            made = processor(Image.new("RGB", (width, height)), return_tensors="np")
        except ValueError:  # too narrow
            return None
        return [row] * (int(made["image_grid_thw"].prod()) // 4)

    return ids


VIDEOS = {
    "video": [user(text("What happens:"), video(10, 6, 90, 130, 2.0), text("Say it."))],
    "videos": [user(video(20, 5, 60, 60, 0.7), text("or"), video(30, 2, 112, 56, 3.3), text("Compare."))],
}
CHATS = TEXTS | PICTURES | VIDEOS
SIZES = ((1, 1), (1, 200), (200, 1), (27, 28), (5600, 28), (28, 5600), (3000, 16), (1, 201), (5700, 28), (2000, 20))
SAMPLES = {
    "glm4v": Sample(
        partial(make_glm, "glm4v"),
        Reference,
        CHATS,
        SEEING,
        variants={"": {}, "another seed, 4.6V's times, tied": {"seed": 1, "newer": True, "tied": True, "shards": 3}},
        expanded=expanded,
        sizes=SIZES,
    ),
    "glm4v_moe": Sample(
        partial(make_glm, "glm4v_moe", seed=2),
        Reference,
        CHATS,
        SEEING,
        variants={"": {}, "another seed, 4.6V's times": {"seed": 3, "newer": True, "text": {"attention_bias": False}}},
        expanded=expanded,
        sizes=SIZES,
    ),
    "glm_ocr": Sample(
        partial(make_glm, "glm_ocr", seed=4, newer=True),
        Reference,
        CHATS,
        SEEING,
        variants={"": {}, "another seed, without biases": {"seed": 5, "vision": {"attention_bias": False}}},
        expanded=expanded,
        sizes=SIZES,
    ),
}
