"""Tiny LLaVA-1.5 checkpoints with seeded random weights, as ordinary Hugging Face directories.

    python -m tests.checkpoints OUT [--seed N] [--image-size 336]

Greedy output of a plainly initialised model is one token for ever. Here every matrix is drawn with a gain of about
one, norms and biases are perturbed, and picture embeddings are brought to the scale of text embeddings, so that the
output varies and depends on the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_LEARNED = 2000  # entries of the byte-pair vocabulary, before the added tokens
VOCAB = 2048
Pairs = tuple[dict[str, int], list[tuple[str, str]]]


@cache
def _byte_pairs() -> Pairs:
    """Vocabulary and merges of a Llama tokenizer."""

    def learner():
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
        return tokenizer, trainers.BpeTrainer(
            vocab_size=_LEARNED, special_tokens=special, limit_alphabet=200, max_token_length=16, show_progress=False
        )

    return _kept_pairs(f"bpe-{_LEARNED}", 60, learner)


@cache
def byte_level_pairs(n_learned: int, n_sources: int) -> Pairs:
    """Vocabulary and merges of a byte-level tokenizer."""

    def learner():
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        return tokenizer, trainers.BpeTrainer(vocab_size=n_learned, initial_alphabet=alphabet, show_progress=False)

    return _kept_pairs(f"byte-level-{n_learned}", n_sources, learner)


def _kept_pairs(name: str, n_sources: int, learner: Callable[[], tuple]) -> Pairs:
    """What a tokenizer learns by a trainer from sources of the standard library; kept in the temporary directory."""
    kept = Path(tempfile.gettempdir()) / f"hydrainfer-test-{name}.json"
    if not kept.exists():
        tokenizer, trainer = learner()
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:n_sources]
        tokenizer.train_from_iterator((p.read_text("utf-8", errors="ignore")[:40_000] for p in sources), trainer)
        model = json.loads(tokenizer.to_str())["model"]
        part = kept.with_suffix(f".{id(model)}")
        part.write_text(json.dumps({"vocab": model["vocab"], "merges": model["merges"]}))
        part.replace(kept)
    learned = json.loads(kept.read_text())
    return learned["vocab"], [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learned["merges"]]


def make_tokenizer(context: int = 4096):
    """A Llama tokenizer with byte fallback, `<image>` and `<pad>`."""
    import transformers

    vocab, merges = _byte_pairs()
    tokenizer = transformers.LlamaTokenizerFast(vocab=vocab, merges=merges, model_max_length=context)
    added = [transformers.AddedToken(t, special=True, normalized=False) for t in ("<image>", "<pad>")]
    tokenizer.add_tokens(added)
    tokenizer.pad_token = "<pad>"
    return tokenizer


def make_picture(seed: int, size: int) -> np.ndarray:
    """A smooth seeded picture, uint8 [size, size, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    fx, fy, phase = rng.uniform(0.5, 4, 3), rng.uniform(0.5, 4, 3), rng.uniform(0, 6.28, 3)
    waves = 127 + 100 * np.sin(6.28 * (x[..., None] * fx + y[..., None] * fy) + phase)
    return np.clip(waves + rng.normal(0, 12, waves.shape), 0, 255).astype(np.uint8)


def make_llava(
    out: str | Path,
    seed: int = 0,
    *,
    kv_heads: int = 2,
    heads: int = 2,
    head_dim: int = 32,
    hidden: int = 64,
    layers: int = 2,
    image_size: int = 56,
    vision_layers: int = 3,
    shards: int = 1,
    dtype: str = "float32",
    published_names: bool = True,
    context: int = 4096,
    text: dict | None = None,
    vision: dict | None = None,
    config: dict | None = None,
) -> Path:
    """Write a checkpoint to `out` and return it. `text`, `vision` and `config` override fields of the text, vision and
    whole configuration. `published_names`: tensor names as in llava-hf's repositories, else as transformers saves."""
    import torch
    import transformers

    out = Path(out)
    tokenizer = make_tokenizer(context)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    vision_config = transformers.CLIPVisionConfig(
        **{
            "image_size": image_size,
            "patch_size": 14,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": vision_layers,
            "num_attention_heads": 2,
            "projection_dim": 64,
            **(vision or {}),
        }
    )
    text_config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": 5 * hidden // 2,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": False,
            **(text or {}),
        }
    )
    whole = transformers.LlavaConfig(
        vision_config=vision_config, text_config=text_config, image_token_index=image_token, **(config or {})
    )
    torch.manual_seed(seed)
    model = transformers.LlavaForConditionalGeneration(whole).float().eval()
    randomise(model, seed)
    _scale_pictures(model, image_size)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model = model.to(getattr(torch, dtype))
    save_model(model, out, shards)
    if published_names:
        publish_names(out)
    _save_processor(out, tokenizer, image_size, whole)
    return out


def save_model(model, out: Path, shards: int) -> None:
    """Save the weights in so many files, about."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(out, max_shard_size=f"{max(1, math.ceil(total / shards / 1000))}KB" if shards > 1 else "50GB")


def randomise(model, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings  # one matrix then serves as table and as head
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if "embed_tokens" in name and not tied:
                scale = 1.0
            elif "lm_head" in name or "embed_tokens" in name:
                scale = 3.0 / math.sqrt(p.shape[1])
            elif any(part in name for part in ("position_embedding", "class_embedding", "pos_embed")):
                scale = 0.5
            elif p.ndim == 1:
                scale = 0.1
            elif ".experts." in name and p.ndim == 3:  # all of them in one tensor
                scale = 1.0 / math.sqrt(p.shape[-1])
            else:
                scale = (1.6 if "q_proj" in name or "k_proj" in name else 1.0) / math.sqrt(p[0].numel())
            norm = p.ndim == 1 and name.endswith("weight") and "class" not in name
            p.copy_(noise * scale + (1.0 if norm else 0.0))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
        model.tie_weights()


def _scale_pictures(model, image_size: int) -> None:
    """Centre the projector's output and give it the deviation of text embeddings, one."""
    import torch

    projector = model.model.multi_modal_projector.linear_2
    picture = torch.from_numpy(make_picture(99, image_size)).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    with torch.no_grad():
        rows = torch.cat(list(model.get_image_features(pixel_values=picture).pooler_output)).flatten(0, -2)
        scale = 1.0 / float((rows - rows.mean(0)).std())
        projector.weight.mul_(scale)
        if projector.bias is not None:
            projector.bias.sub_(rows.mean(0)).mul_(scale)


def publish_names(out: Path) -> None:
    """Rename what transformers saved to the names of the published repositories."""

    def published(name: str) -> str:
        head = "vision_tower."
        if name.startswith(head) and not name.startswith(head + "vision_model."):
            return head + "vision_model." + name[len(head) :]
        return name

    rename_tensors(out, published)


def rename_tensors(out: Path, new_name: Callable[[str], str], change: Callable[[dict], dict] = dict) -> None:
    """Rename all tensors of a checkpoint; `change` is applied to those of each file, by their new names."""
    from safetensors.torch import load_file, save_file

    for file in out.glob("*.safetensors"):
        save_file(change({new_name(k): v for k, v in load_file(file).items()}), file, metadata={"format": "pt"})
    index = out / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {new_name(k): v for k, v in content["weight_map"].items()}
        index.write_text(json.dumps(content))


def _save_processor(out: Path, tokenizer, image_size: int, config) -> None:
    """Tokenizer, chat template, preprocessor_config.json and processor_config.json, as published repositories have."""
    import transformers

    pil = hasattr(transformers, "CLIPImageProcessorPil")  # needs no torchvision
    kind = transformers.CLIPImageProcessorPil if pil else transformers.CLIPImageProcessor
    pictures = kind(size={"shortest_edge": image_size}, crop_size={"height": image_size, "width": image_size})
    processor = transformers.LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    save_processor(out, processor, "CLIPImageProcessor")
    (out / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def save_processor(out: Path, processor, published: str) -> None:
    """Save a processor, and that of its pictures by itself, whose class has the name `published` in the
    repositories."""
    processor.save_pretrained(out)
    processor.image_processor.save_pretrained(out)
    saved = json.loads((out / "preprocessor_config.json").read_text())
    saved["image_processor_type"] = published
    (out / "preprocessor_config.json").write_text(json.dumps(saved, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny LLaVA-1.5 checkpoint.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--image-size", type=int, default=336)
    parser.add_argument("--kv-heads", type=int, default=2)
    a = parser.parse_args()
    made = make_llava(a.out, a.seed, image_size=a.image_size, kv_heads=a.kv_heads)
    print(f"{made}: {', '.join(sorted(p.name for p in made.iterdir()))}")


if __name__ == "__main__":
    main()
