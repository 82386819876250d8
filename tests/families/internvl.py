"""InternVL: tiny checkpoints with seeded random weights, as transformers has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from PIL import Image
from transformers.models.internvl.processing_internvl import InternVLProcessor

from tests.checkpoints import VOCAB, byte_level_pairs, make_picture, randomise, save_model
from tests.checkpoints_text import KINDS, settle_mixers
from tests.equivalence.reference import Frames, Reference
from tests.families.chats import PICTURES, SQUARE_VIDEOS, TEXTS
from tests.families.sample import SEEING, Sample

SIDE = 56  # of a tile: 4 x 4 patches, of which 2 x 2 make one of 4 tokens
MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif p['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
VISION = {"image_size": [SIDE, SIDE], "patch_size": [14, 14], "hidden_size": 64, "intermediate_size": 96}
VISION |= {"num_hidden_layers": 3, "num_attention_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}


def make_tokenizer():
    """A byte-level tokenizer with InternVL's special tokens."""
    vocab, merges = byte_level_pairs(1900, 60)
    tokenizer = transformers.Qwen2TokenizerFast(
        vocab=vocab, merges=merges, model_max_length=4096, extra_special_tokens=MARKS
    )
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS.values())
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in names])
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|im_end|>"
    return tokenizer


def make_internvl(
    out: str | Path,
    seed: int = 0,
    *,
    kind: str = "qwen2",
    text: dict | None = None,
    vision: dict | None = None,
    config: dict | None = None,
    pictures: dict | None = None,
) -> Path:
    """Write a checkpoint to `out` and return it. `kind`: the type of the text model. `text`, `vision`, `config` and
    `pictures` override fields of the configurations and of the preprocessing."""
    out, tokenizer = Path(out), make_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>", "<IMG_CONTEXT>")}
    decoder = TEXT | {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]} | (text or {})
    whole = transformers.InternVLConfig(
        text_config=transformers.AutoConfig.for_model(kind, **decoder),
        vision_config=transformers.InternVLVisionConfig(**VISION | (vision or {})),
        image_token_id=ids["<IMG_CONTEXT>"],
        **{"image_seq_length": 4, "tie_word_embeddings": False} | (config or {}),
    )
    torch.manual_seed(seed)
    model = transformers.InternVLForConditionalGeneration(whole).float().eval()
    randomise(model, seed)
    settle_mixers(model)
    _scale(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=ids["<|im_end|>"], do_sample=False)
    save_model(model, out, 1)
    tokenizer.save_pretrained(out)
    given = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.485, 0.456, 0.406]} | (pictures or {})
    transformers.GotOcr2ImageProcessorPil(**given).save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    (out / "processor_config.json").write_text(json.dumps({"processor_class": "InternVLProcessor"}))
    return out


def _scale(model) -> None:
    """Vary what the class row and the positions add, and give rows of pictures the scale of text embeddings."""
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector.linear_2
    generator = torch.Generator().manual_seed(5)
    picture = torch.from_numpy(make_picture(99, SIDE)).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    with torch.no_grad():
        for table in (tower.embeddings.cls_token, tower.embeddings.position_embeddings):
            if table is not None:
                table.copy_(torch.randn(table.shape, generator=generator) * 0.5)
        rows = model.get_image_features(pixel_values=picture).pooler_output.flatten(0, -2)
        scale = 1.0 / float((rows - rows.mean(0)).std())
        projector.weight.mul_(scale)
        projector.bias.sub_(rows.mean(0)).mul_(scale)


class Processor(InternVLProcessor):
    """transformers' own, but for the processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        pass

    @classmethod
    def from_pretrained(cls, path: Path, backend: str = "pil") -> Processor:
        assert backend == "pil"
        pictures = transformers.GotOcr2ImageProcessorPil.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        n_tokens = json.loads((path / "config.json").read_text())["image_seq_length"]
        frames = Frames(pictures, crop_to_patches=False)
        return cls(pictures, tokenizer, frames, image_seq_length=n_tokens, chat_template=TEMPLATE)


internvl_reference = partial(Reference, processor=Processor, model=transformers.InternVLForConditionalGeneration)


def expanded(path: Path) -> Callable[[int, int], list[int]]:
    processor = Processor.from_pretrained(path)

    def ids(width: int, height: int) -> list[int]:
        made = processor(text="<IMG_CONTEXT>", images=[Image.new("RGB", (width, height))])
        return list(made["input_ids"][0])

    return ids


CHATS = TEXTS | PICTURES | SQUARE_VIDEOS
SAMPLES = {
    "internvl": Sample(
        make_internvl,
        internvl_reference,
        CHATS,
        SEEING,
        variants={
            "": {},
            "norms of queries and keys, RMS, biases": {
                "seed": 1,
                "vision": {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True},
            },
            "norm of the last layer": {"seed": 2, "vision": {"use_mean_pooling": False}},
            "inner layer, tied": {"seed": 3, "config": {"vision_feature_layer": -2, "tie_word_embeddings": True}},
            "no positions, fewer tiles": {
                "seed": 4,
                "vision": {"use_absolute_position_embeddings": False},
                "pictures": {"min_patches": 2, "max_patches": 5},
            },
            "over qwen3": {"seed": 5, "kind": "qwen3"},
            "over gpt-oss": {"seed": 6, "kind": "gpt_oss", "text": KINDS["gpt_oss"][1]},
        },
        compiled=True,
        expanded=expanded,
        sizes=(
            (1, 1),
            (1, 40),
            (40, 1),
            (2000, 20),
            (20, 2000),
            (112, 56),
            (56, 112),
            (784, 56),
            (168, 168),
            (640, 480),
        ),
    ),
    "internvl, experts": Sample(
        partial(make_internvl, seed=6, kind="qwen3_moe", text=EXPERTS),
        internvl_reference,
        CHATS,
        ("1EPD", "1E1P1D", "2E1P2D"),
    ),
}
