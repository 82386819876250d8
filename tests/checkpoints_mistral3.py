"""Tiny Mistral 3 checkpoints with seeded random weights, as ordinary Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints import VOCAB, _byte_pairs, make_picture, randomise

EDGE, PATCH = 140, 14
SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '[IMG]' }}{% else %}{{ p['text'] }}{% endif %}{% endfor %}{{ '[/INST]' }}"
    "{% else %}{{ m['content'][0]['text'] + eos_token }}{% endif %}{% endfor %}"
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


def make_mistral3(
    out: str | Path, seed: int = 0, *, text: dict | None = None, vision: dict | None = None, **config
) -> Path:
    """Write a checkpoint to `out` and return it. `text`, `vision` and `config` override fields."""
    import torch
    import transformers

    out = Path(out)
    vocab, merges = _byte_pairs()
    tokenizer = transformers.LlamaTokenizerFast(vocab=vocab, merges=merges, model_max_length=4096)
    names = (*SPECIAL, "[INST]", "[/INST]", "<pad>")
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in names])
    tokenizer.pad_token = "<pad>"
    decoder = {"model_type": "mistral", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160}
    decoder |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    decoder |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None}
    decoder |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": tokenizer.pad_token_id}
    decoder |= {"tie_word_embeddings": False} | (text or {})
    seen = {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    seen |= {"num_attention_heads": 4, "patch_size": PATCH, "image_size": EDGE, "hidden_act": "silu"} | (vision or {})
    whole = transformers.Mistral3Config(
        text_config=decoder,
        vision_config=seen,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=decoder["tie_word_embeddings"],
        **config,
    )
    torch.manual_seed(seed)
    model = transformers.Mistral3ForConditionalGeneration(whole).float().eval()
    randomise(model, seed)
    _scale_pictures(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(out)
    pictures = transformers.PixtralImageProcessorPil(size={"longest_edge": EDGE}, patch_size=PATCH)
    tokenizer.save_pretrained(out)
    pictures.save_pretrained(out)
    saved = json.loads((out / "preprocessor_config.json").read_text())
    saved["image_processor_type"] = "PixtralImageProcessor"
    (out / "preprocessor_config.json").write_text(json.dumps(saved, indent=2))
    processor = {"processor_class": "PixtralProcessor", "patch_size": PATCH}
    processor |= {"spatial_merge_size": whole.spatial_merge_size, "image_token": "[IMG]"}
    (out / "processor_config.json").write_text(json.dumps(processor, indent=2))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


def _scale_pictures(model) -> None:
    """Give rows of pictures the deviation of text embeddings, one."""
    import torch

    picture = torch.from_numpy(make_picture(99, EDGE)).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    with torch.no_grad():
        made = model.get_image_features(picture, image_sizes=[(EDGE // 28 * 28,) * 2], return_dict=True)
        model.model.multi_modal_projector.linear_2.weight.div_(float(torch.cat(list(made.pooler_output)).std()))
