"""Tiny Gemma 3 checkpoints with a vision tower and seeded random weights, as ordinary Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import VOCAB, _byte_pairs, make_picture, randomise, save_processor
from tests.checkpoints_text import GEMMA, settle_gemma

SIDE = 112  # 8 x 8 patches, of which 2 x 2 make one of 16 tokens
SPECIAL = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
TEMPLATE = (
    "{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ p['text'] | trim }}{% endif %}{% endfor %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def make_gemma_tokenizer():
    """A Llama tokenizer with Gemma's special tokens."""
    import transformers

    vocab, merges = _byte_pairs()
    tokenizer = transformers.LlamaTokenizerFast(
        vocab=vocab, merges=merges, model_max_length=4096, extra_special_tokens=SPECIAL
    )
    names = (*SPECIAL.values(), "<start_of_turn>", "<end_of_turn>", "<pad>")
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in names])
    tokenizer.pad_token = "<pad>"
    return tokenizer


def make_gemma(out: str | Path, seed: int = 0, *, text: dict | None = None, vision: dict | None = None) -> Path:
    """Write a checkpoint to `out` and return it. `text` and `vision` override fields of their configurations."""
    import torch
    import transformers

    out, tokenizer = Path(out), make_gemma_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    seen = {"image_size": SIDE, "patch_size": 14, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    seen |= {"num_attention_heads": 2, "vision_use_head": False, "hidden_act": "gelu_pytorch_tanh"}
    decoder = GEMMA | {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    decoder |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    decoder |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": tokenizer.pad_token_id}
    decoder |= {"tie_word_embeddings": False} | (text or {})
    whole = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**decoder),
        vision_config=transformers.SiglipVisionConfig(**seen | (vision or {})),
        mm_tokens_per_image=16,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        tie_word_embeddings=decoder["tie_word_embeddings"],
    )
    torch.manual_seed(seed)
    model = transformers.Gemma3ForConditionalGeneration(whole).float().eval()
    randomise(model, seed)
    settle_gemma(model)
    _scale_pictures(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(out)
    _save_processor(out, tokenizer)
    return out


def _scale_pictures(model) -> None:
    """Give rows of pictures the deviation of text embeddings, one."""
    import torch

    picture = torch.from_numpy(make_picture(99, SIDE)).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    with torch.no_grad():
        rows = model.get_image_features(pixel_values=picture, return_dict=True).pooler_output
        model.model.multi_modal_projector.mm_input_projection_weight.div_(float(rows.std()))


def _save_processor(out: Path, tokenizer) -> None:
    import transformers

    pictures = transformers.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = transformers.Gemma3Processor(
        image_processor=pictures, tokenizer=tokenizer, chat_template=TEMPLATE, image_seq_length=16
    )
    save_processor(out, processor, "Gemma3ImageProcessor")
    (out / "chat_template.jinja").write_text(TEMPLATE)
