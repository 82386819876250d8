"""Tiny SmolVLM and Idefics3 checkpoints with seeded random weights, as ordinary Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints import VOCAB, byte_level_pairs, make_picture, randomise

SIDE, EDGE = 56, 224  # a tile has 4 x 4 patches, of which 2 x 2 make one of 4 tokens; up to 4 x 4 tiles
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
KINDS = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
SAMPLING = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": SIDE}}  # beside "size"
_LEARNED = 1500


def make_smolvlm_tokenizer():
    """A byte-level tokenizer with SmolVLM's special tokens."""
    import transformers

    vocab, merges = byte_level_pairs(_LEARNED, 30)
    tokenizer = transformers.GPT2TokenizerFast(vocab=dict(vocab), merges=merges, model_max_length=4096)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<|im_start|>", "<end_of_utterance>", "<pad>", AROUND, WHOLE, IMAGE, *places]
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.eos_token, tokenizer.pad_token = "<end_of_utterance>", "<pad>"
    return tokenizer


def make_smolvlm(
    out: str | Path,
    kind: str = "smolvlm",
    seed: int = 0,
    *,
    text: dict | None = None,
    vision: dict | None = None,
    pictures: dict | None = None,
    **config,
) -> Path:
    """Write a checkpoint to `out` and return it. `text`, `vision`, `pictures` and `config` override fields of their
    configurations."""
    import torch
    import transformers

    out, tokenizer, name = Path(out), make_smolvlm_tokenizer(), KINDS[kind]
    seen = {"image_size": SIDE, "patch_size": 14, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    decoder = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    decoder |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    decoder |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    decoder |= {"tie_word_embeddings": False, "rms_norm_eps": 1e-5} | (text or {})
    whole = getattr(transformers, f"{name}Config")(
        text_config=transformers.LlamaConfig(**decoder),
        vision_config=seen | {"num_attention_heads": 2} | (vision or {}),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=decoder["tie_word_embeddings"],
        **{"scale_factor": 2, **config},
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(whole).float().eval()
    randomise(model, seed)
    _scale_pictures(model, whole.vision_config.image_size)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    made = {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": SIDE}} | (pictures or {})
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**made)
    processor.save_pretrained(out)
    saved = json.loads((out / "preprocessor_config.json").read_text())
    saved["image_processor_type"] = f"{name}ImageProcessor"
    saved |= {"video_sampling": SAMPLING} if kind == "smolvlm" else {}
    (out / "preprocessor_config.json").write_text(json.dumps(saved, indent=2))
    side = whole.vision_config.image_size // whole.vision_config.patch_size // whole.scale_factor
    (out / "processor_config.json").write_text(
        json.dumps({"image_seq_len": side**2, "processor_class": f"{name}Processor"}, indent=2)
    )
    return out


def _scale_pictures(model, side: int) -> None:
    """Give rows of pictures the deviation of text embeddings, one."""
    import torch

    picture = torch.from_numpy(make_picture(99, side)).permute(2, 0, 1)[None, None].float() / 127.5 - 1.0
    with torch.no_grad():
        rows = torch.cat(list(model.get_image_features(picture, return_dict=True).pooler_output))
        model.model.connector.modality_projection.proj.weight.div_(float(rows.std()))
