"""Tiny checkpoints with Pixtral's tower and seeded random weights, as ordinary Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints import VOCAB, _byte_pairs, make_picture, randomise, rename_tensors
from tests.checkpoints_qwen import make_tokenizer as make_qwen_tokenizer

EDGE, PATCH = 140, 14
SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '[IMG]' }}{% else %}{{ p['text'] }}{% endif %}{% endfor %}{{ '[/INST]' }}"
    "{% else %}{{ m['content'][0]['text'] + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '<|image_pad|>' }}{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MINISTRAL = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 48,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
CLASSES = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "pixtral": "LlavaForConditionalGeneration",
    "lighton": "LightOnOcrForConditionalGeneration",
}


def make_mistral_tokenizer():
    import transformers

    vocab, merges = _byte_pairs()
    tokenizer = transformers.LlamaTokenizerFast(vocab=vocab, merges=merges, model_max_length=4096)
    names = (*SPECIAL, "[INST]", "[/INST]", "<pad>")
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in names])
    tokenizer.pad_token = "<pad>"
    return tokenizer


def make_mistral3(
    out: str | Path,
    seed: int = 0,
    *,
    kind: str = "mistral3",
    text: dict | None = None,
    vision: dict | None = None,
    pictures: dict | None = None,
    published: bool = True,
    **config,
) -> Path:
    """Write a checkpoint to `out` and return it. `text`, `vision`, `pictures` and `config` override fields of the
    configurations and of the preprocessing. `published`: tensors have the names of the published files, else those
    within transformers' classes."""
    import torch
    import transformers

    out, lighton = Path(out), kind == "lighton"
    tokenizer = make_qwen_tokenizer() if lighton else make_mistral_tokenizer()
    decoder = {"model_type": "qwen3" if lighton else "mistral", "vocab_size": VOCAB, "hidden_size": 64}
    decoder |= {"intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    decoder |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None, "head_dim": 16}
    decoder |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    decoder |= {"pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": lighton} | (text or {})
    seen = {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    seen |= {"num_attention_heads": 4, "patch_size": PATCH, "image_size": EDGE, "hidden_act": "silu"} | (vision or {})
    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>" if lighton else "[IMG]")
    config |= {"image_token_id" if lighton else "image_token_index": placeholder}
    if kind == "pixtral":
        config = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} | config
    model_class = getattr(transformers, CLASSES[kind])
    whole = model_class.config_class(
        text_config=decoder, vision_config=seen, tie_word_embeddings=decoder["tie_word_embeddings"], **config
    )
    torch.manual_seed(seed)
    model = model_class(whole).float().eval()
    randomise(model, seed)
    if kind == "pixtral":
        _calm_tower(model)
    _scale_pictures(model, kind)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(out)
    names = {name: name for name in model.state_dict()}
    if not published:
        rename_tensors(out, lambda name: _within(name, names))
    tokenizer.save_pretrained(out)
    _save_processors(out, kind, seen["patch_size"], getattr(whole, "spatial_merge_size", 1), pictures or {})
    (out / "chat_template.jinja").write_text(CHATML if lighton else TEMPLATE)
    return out


def _within(name: str, names: dict[str, str]) -> str:
    """The name of a published tensor in the model of transformers."""
    for old, new in (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")):
        if name.startswith(old):
            return name.replace(old, new, 1)
    return name if name in names else f"model.{name}"


def _save_processors(out: Path, kind: str, patch: int, merge: int, given: dict) -> None:
    """The files of the processors as published: `patch_size` is an object, and counts for LightOnOCR only."""
    import transformers

    side = {"height": patch, "width": patch}
    pictures = transformers.PixtralImageProcessorPil(**{"size": {"longest_edge": EDGE}, "patch_size": side} | given)
    pictures.save_pretrained(out)
    saved = json.loads((out / "preprocessor_config.json").read_text())
    saved["image_processor_type"] = "PixtralImageProcessor"
    (out / "preprocessor_config.json").write_text(json.dumps(saved, indent=2))
    processor = {"processor_class": "PixtralProcessor", "patch_size": patch, "image_token": "[IMG]"}
    if merge > 1:
        processor["spatial_merge_size"] = merge
    (out / "processor_config.json").write_text(json.dumps(processor, indent=2))


def _calm_tower(model) -> None:
    """Less sharp attention in the tower. Otherwise float32 alone, of whatever code, moves logits by almost 1e-4."""
    import torch

    with torch.no_grad():
        for name, weight in model.model.vision_tower.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(0.75)


def _scale_pictures(model, kind: str) -> None:
    """Give rows of pictures the deviation of text embeddings, one."""
    import torch

    side = EDGE // 28 * 28
    picture = torch.from_numpy(make_picture(99, side)).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    projector = model.model.vision_projection if kind == "lighton" else model.model.multi_modal_projector
    with torch.no_grad():
        made = model.get_image_features(picture, image_sizes=torch.tensor([[side, side]]), return_dict=True)
        deviation = float(torch.cat(list(made.pooler_output)).std())
        for weight in projector.linear_2.parameters():
            weight.div_(deviation)
