"""Tiny LLaVA-NeXT checkpoints with seeded random weights, over a Mistral, Llama or Qwen2 decoder."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints import TEMPLATE, VOCAB, make_picture, make_tokenizer, publish_names, randomise, save_processor

SIDE = 42  # of the vision tower's square: 3 x 3 patches, so that paddings are odd and even
PINPOINTS = [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]]  # as the published ones, in squares


def make_llava_next(
    out: str | Path,
    text: str = "mistral",
    seed: int = 0,
    *,
    published_names: bool = True,
    template: str = TEMPLATE,
    config: dict | None = None,
    text_config: dict | None = None,
    siglip: bool = False,
) -> Path:
    """Write a checkpoint to `out` and return it. `config` and `text_config` override fields. `siglip`: over SigLIP, as
    Granite Vision, not CLIP."""
    import torch
    import transformers

    out, tokenizer = Path(out), make_tokenizer()
    seen = {"image_size": SIDE, "patch_size": 14, "hidden_size": 64, "intermediate_size": 128}
    seen |= {"num_hidden_layers": 3, "num_attention_heads": 2}
    own = {"vision_use_head": False} if siglip else {"projection_dim": 64}
    vision = getattr(transformers, "SiglipVisionConfig" if siglip else "CLIPVisionConfig")(**seen | own)
    decoder = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        **({"sliding_window": None} if text == "mistral" else {}),
        **(text_config or {}),
    }
    whole = transformers.LlavaNextConfig(
        vision_config=vision,
        text_config=transformers.AutoConfig.for_model(text, **decoder),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        **(config or {}),
    )
    torch.manual_seed(seed)
    model = transformers.LlavaNextForConditionalGeneration(whole).float().eval()
    randomise(model, seed)
    _scale(model, seed)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(out)
    if published_names:
        publish_names(out)
    _save_processor(out, tokenizer, template, whole)
    return out


def _scale(model, seed: int) -> None:
    """Give rows of pictures, and the newline, the scale of text embeddings."""
    import torch

    picture = torch.from_numpy(make_picture(99, 2 * SIDE)).permute(2, 0, 1).float() / 127.5 - 1.0
    squares = picture.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE).permute(1, 2, 0, 3, 4).flatten(0, 1)
    pixels = torch.cat((picture[None, :, ::2, ::2], squares))[None]
    projector = model.model.multi_modal_projector.linear_2
    with torch.no_grad():
        sizes = torch.tensor([[2 * SIDE, 2 * SIDE]])
        (rows,) = model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output
        rows = rows[: (SIDE // 14) ** 2]
        scale = 1.0 / float((rows - rows.mean(0)).std())
        projector.weight.mul_(scale)
        projector.bias.sub_(rows.mean(0)).mul_(scale)
        newline = model.model.image_newline
        newline.copy_(torch.randn(newline.shape, generator=torch.Generator().manual_seed(seed)))


def _save_processor(out: Path, tokenizer, template: str, config) -> None:
    """Tokenizer, chat template, preprocessor_config.json and processor_config.json, as published repositories have."""
    import transformers

    pictures = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=int(config.vision_config.model_type == "clip_vision_model"),
        chat_template=template,
    )
    save_processor(out, processor, "LlavaNextImageProcessor")
    (out / "chat_template.json").write_text(json.dumps({"chat_template": template}))
