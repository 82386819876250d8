"""Tiny Gemma 4 checkpoints with a vision tower and seeded random weights, as ordinary Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.checkpoints import VOCAB, _byte_pairs, make_picture, randomise
from tests.checkpoints_text import GEMMA4, GEMMA4_EXPERTS, GEMMA4_LARGE, GEMMA4_SMALL, settle_gemma

SPECIAL = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "video_token": "<|video|>",
    "audio_token": "<|audio|>",
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '<|image|>' }}{% elif p['type'] == 'video' %}{{ '<|video|>' }}"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
BUDGET = 70
FEW = {"num_hidden_layers": 4, "layer_types": [f"{'full' if i == 3 else 'sliding'}_attention" for i in range(4)]}
SMALL, LARGE = GEMMA4 | GEMMA4_SMALL, GEMMA4 | GEMMA4_LARGE | {"use_bidirectional_attention": "vision"}
KINDS: dict[str, tuple[dict, dict]] = {  # what the configurations of text and tower say
    "e2b": (SMALL, {"use_clipped_linears": True}),
    "31b": (LARGE, {"standardize": True}),
    "26b-a4b": (LARGE | GEMMA4_EXPERTS | FEW, {"standardize": True}),
}


def make_gemma4_tokenizer(context: int = 4096):
    """Gemma's: BPE over whole texts, in which spaces are replaced; the special tokens behind the vocabulary."""
    import transformers

    vocab, merges = _byte_pairs()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<unk>"}
    tokenizer = transformers.GemmaTokenizer(
        vocab=dict(vocab), merges=merges, model_max_length=context, extra_special_tokens=SPECIAL, **ends
    )
    names = ("<pad>", *SPECIAL.values(), "<|turn>", "<turn|>")
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in names])
    return tokenizer


def make_gemma4(
    out: str | Path, kind: str, seed: int = 0, *, text: dict | None = None, vision: dict | None = None
) -> Path:
    """Write a checkpoint of one of `KINDS` to `out` and return it. `text` and `vision` override fields of their
    configurations."""
    import torch
    import transformers

    out, tokenizer = Path(out), make_gemma4_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    own_text, own_vision = KINDS[kind]
    decoder: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160}
    decoder |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    decoder |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": tokenizer.pad_token_id}
    decoder |= {"tie_word_embeddings": False} | own_text | (text or {})
    seen = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    seen |= {"num_attention_heads": 4, "num_key_value_heads": 4, "position_embedding_size": 3360}
    whole = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**decoder),
        vision_config=transformers.Gemma4VisionConfig(**seen | own_vision | (vision or {})),
        tie_word_embeddings=decoder["tie_word_embeddings"],
        audio_config=None,
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_token_id=ids["audio_token"],
        boi_token_id=ids["boi_token"],
        eoi_token_id=ids["eoi_token"],
    )
    torch.manual_seed(seed)
    model = transformers.Gemma4ForConditionalGeneration(whole).float().eval()
    randomise(model, seed)
    settle_gemma(model)
    _settle_tower(model, seed)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    pictures = transformers.Gemma4ImageProcessorPil(max_soft_tokens=BUDGET).to_dict()
    pictures["image_processor_type"] = "Gemma4ImageProcessor"
    videos = {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": BUDGET, "num_frames": 32}
    both = {"image_processor": pictures, "video_processor": videos, "processor_class": "Gemma4Processor"}
    (out / "processor_config.json").write_text(json.dumps(both, indent=2, default=str))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


def _settle_tower(model, seed: int) -> None:
    """Bounds that numbers reach, a deviation that is not one, and rows of pictures with that of text embeddings."""
    import torch
    import transformers

    generator = torch.Generator().manual_seed(seed)
    tower = model.model.vision_tower
    with torch.no_grad():
        for name, buffer in sorted(tower.named_buffers()):
            noise = torch.rand(buffer.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                buffer.copy_((0.8 + noise) * (1.0 if name.endswith("_max") else -1.0))
            elif name.endswith("std_bias"):
                buffer.copy_(4.0 * noise - 2.0)
            elif name.endswith("std_scale"):
                buffer.copy_(0.2 + noise)
        for module in tower.modules():
            if type(module).__name__ == "Gemma4VisionAttention":  # as after training, because scores are not scaled
                module.q_norm.weight.mul_(module.head_dim**-0.5)
        picture = transformers.Gemma4ImageProcessorPil(max_soft_tokens=BUDGET)(
            [make_picture(99, 100)], return_tensors="pt"
        )
        rows = model.get_image_features(picture["pixel_values"], picture["image_position_ids"], return_dict=True)
        model.model.embed_vision.embedding_projection.weight.div_(float(torch.cat(rows.pooler_output).std()))
