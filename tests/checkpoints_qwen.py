"""Tiny Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 checkpoints, the last two with experts too, and LFM3-VL's, whose
pictures and videos are prepared alike, with seeded random weights, as ordinary Hugging Face directories.

    python -m tests.checkpoints_qwen FAMILY OUT [--seed N]

As in `tests.checkpoints`, gains are such that greedy output varies and depends on the picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.checkpoints import byte_level_pairs, randomise, rename_tensors, save_model
from tests.checkpoints_text import DELTA, LFM3, settle_mixers

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe", "lfm3_vl")
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_LEARNED = 1900
VOCAB = 2048
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
EXPERTS = {
    "qwen3_vl_moe": _EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_5_moe": _EXPERTS | {"shared_expert_intermediate_size": 40},
}
_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "lfm3_vl": "Lfm3VlForConditionalGeneration",
}


def make_tokenizer(context: int = 4096):
    """A tokenizer like Qwen2's: byte-level, one digit a token, the special tokens behind the vocabulary."""
    import transformers

    vocab, merges = byte_level_pairs(_LEARNED, 60)
    tokenizer = transformers.Qwen2TokenizerFast(vocab=vocab, merges=merges, model_max_length=context)
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|im_end|>"
    return tokenizer


def make_qwen(
    family: str,
    out: str | Path,
    seed: int = 0,
    *,
    tied: bool = False,
    shards: int = 1,
    published: bool = True,
    pixels: tuple[int, int] = (4 * 28 * 28, 40 * 28 * 28),
    context: int = 4096,
    text: dict | None = None,
    vision: dict | None = None,
) -> Path:
    """Write a checkpoint to `out` and return it. `text` and `vision` override fields of the configurations. `pixels`:
    least and most of a picture. `published`: config.json and tensor names as in Qwen's own repositories, else as
    transformers saves them."""
    import torch
    import transformers

    out = Path(out)
    tokenizer = make_tokenizer(context)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    qwen3, dense, lfm3 = not family.startswith("qwen2"), family.removesuffix("_moe"), family == "lfm3_vl"
    sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True} if qwen3 else {"mrope_section": [2, 3, 3]}
    text_fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **sections},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        **({"head_dim": 16} if qwen3 else {}),
        **(DELTA if dense == "qwen3_5" else {}),
        **(LFM3 if lfm3 else {}),
        **EXPERTS.get(family, {}),
        **(text or {}),
    }
    vision_fields = {
        "qwen2_vl": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 4},
        "qwen2_5_vl": {"hidden_size": 32, "intermediate_size": 72, "depth": 4, "out_hidden_size": 64,
                       "fullatt_block_indexes": [1, 3], "tokens_per_second": 2},
        "qwen3_vl": {"hidden_size": 32, "intermediate_size": 72, "depth": 4, "out_hidden_size": 64,
                     "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
        "qwen3_5": {"hidden_size": 32, "intermediate_size": 72, "depth": 3, "out_hidden_size": 64,
                    "num_position_embeddings": 64},
        "lfm3_vl": {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4,
                    "num_key_value_heads": 2},
    }[dense] | ({} if lfm3 else {"num_heads": 2}) | (vision or {})  # fmt: skip
    kind = getattr(transformers, _CLASSES[family])
    whole = kind.config_class(
        text_config=text_fields,
        vision_config=vision_fields,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
        **({"projector_hidden_size": 80} if lfm3 else {}),
    )
    torch.manual_seed(seed)
    model = kind(whole).float().eval()
    randomise(model, seed)
    settle_mixers(model)
    _scale_pictures(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=ids["<|im_end|>"], do_sample=False)
    save_model(model, out, shards)
    tokenizer.save_pretrained(out)
    (out / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    _save_preprocessor(family, out, pixels)
    _rename(out, family, published)
    if published and not qwen3:
        _flatten_config(out)
    return out


def _scale_pictures(model) -> None:
    """Centre what the mergers make and give it the deviation of text embeddings, one; for DeepStack, a half."""
    import torch

    projector = getattr(model.model, "multi_modal_projector", None)  # LFM3-VL's
    visual = model.model.visual if projector is None else model.model.vision_tower
    c = visual.config
    generator = torch.Generator().manual_seed(7)
    patches = torch.randn((8 * 8, 3 * c.temporal_patch_size * c.patch_size**2), generator=generator)
    with torch.no_grad():
        made = visual(patches, grid_thw=torch.tensor([[1, 8, 8]]))
        if projector is None:
            last = visual.merger.linear_fc2 if hasattr(visual.merger, "linear_fc2") else visual.merger.mlp[2]
            pairs = [(last, made.pooler_output, 1.0)]
        else:
            pairs = [(projector.linear_2, projector(made.last_hidden_state), 1.0)]
        for merger, rows in zip(getattr(visual, "deepstack_merger_list", ()), getattr(made, "deepstack_features", ())):
            pairs.append((merger.linear_fc2, rows, 0.5))
        for linear, rows, deviation in pairs:
            scale = deviation / float((rows - rows.mean(0)).std())
            linear.weight.mul_(scale)
            linear.bias.sub_(rows.mean(0)).mul_(scale)


def _save_preprocessor(family: str, out: Path, pixels: tuple[int, int]) -> None:
    """Write preprocessor_config.json as published: pixel bounds by name, for Qwen3-VL as a size, and one more for
    videos."""
    least, most = pixels
    common = {"temporal_patch_size": 2, "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
    if not family.startswith("qwen2"):
        half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
        size = {"shortest_edge": least, "longest_edge": most}
        given = {"size": size, "patch_size": 16, **common, **half}
        video = {"size": {"shortest_edge": 4096, "longest_edge": 6 * most}, "fps": 2, "min_frames": 4,
                 "max_frames": 768, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
                 "video_processor_type": "Qwen3VLVideoProcessor", **half}  # fmt: skip
        (out / "video_preprocessor_config.json").write_text(json.dumps(video))
    else:
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        given = {"min_pixels": least, "max_pixels": most, "patch_size": 14, **common, "image_mean": mean,
                 "image_std": std}  # fmt: skip
    (out / "preprocessor_config.json").write_text(json.dumps(given))


def _rename(out: Path, family: str, published: bool) -> None:
    """Tensor names: as published, or as transformers' own modules are called."""

    def name(n: str) -> str:
        n = n.removeprefix("model.") if not n.startswith("lm_head.") else n
        visual = n.startswith(("visual.", "vision_tower.", "multi_modal_projector."))
        rest = n.removeprefix("language_model.")
        if n.startswith("lm_head."):
            return n
        if published and family == "lfm3_vl":
            rest = rest.replace(".g_proj.", ".gate_proj.")
            n = n.replace(".patch_embed.", ".patchifier.").replace("q_norm", "q_layernorm")
        if published and family.startswith("qwen2"):
            return n if visual else f"model.{rest}"
        return f"model.{n}" if visual else f"model.language_model.{rest}"

    def change(tensors: dict) -> dict:
        if published and family == "qwen3_5_moe":
            return _stack(tensors)
        if published and family == "qwen3_vl_moe":  # by [in, out]
            return {k: v.mT.contiguous() if ".experts." in k else v for k, v in tensors.items()}
        return tensors

    rename_tensors(out, name, change)


def _stack(tensors: dict) -> dict:
    """The experts of each layer in two tensors, as published with Qwen3.5."""
    import torch

    found, count = dict(tensors), EXPERTS["qwen3_5_moe"]["num_experts"]
    for first in [n for n in tensors if n.endswith(".experts.0.down_proj.weight")]:
        prefix = first.removesuffix(".0.down_proj.weight")
        gate, up, down = (
            torch.stack([found.pop(f"{prefix}.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return found


def _flatten_config(out: Path) -> None:
    """config.json as published with Qwen2-VL and Qwen2.5-VL: the text model's fields at the top."""
    saved = json.loads((out / "config.json").read_text())
    text = saved.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "layer_types", "dtype"):
        text.pop(name, None)
    flat = {**text, **saved, "rope_theta": rope["rope_theta"], "torch_dtype": saved.pop("dtype", "float32")}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "use_sliding_window": False}
    flat |= {"sliding_window": 4096, "max_window_layers": 2}
    flat.pop("dtype", None)
    flat["vision_config"].pop("dtype", None)
    flat["vision_config"]["model_type"] = saved["model_type"]
    (out / "config.json").write_text(json.dumps(flat, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Qwen-VL checkpoint.")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    print(make_qwen(a.family, a.out, a.seed))


if __name__ == "__main__":
    main()
