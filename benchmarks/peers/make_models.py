"""Makes LLaVA-1.5 checkpoints with seeded random weights, as float32 safetensors under published tensor names.

    python benchmarks/peers/make_models.py --out .cache/models --only llava-small

`llava-tiny` has 4.4M parameters, `llava-mid` 39M (vision 5M), `llava-small` 164M (vision 38M). Every linear layer is
drawn from N(0, gain²/fan_in), and picture embeddings are centred and rescaled to the scale of text embeddings, so that
greedy output varies and depends on the picture. The tokenizer is trained on the text files of the running Python.
"""

import argparse
import json
import math
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from common import draw_image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

VOCAB = 32000
SIZES: dict[str, dict[str, Any]] = {
    "llava-tiny": {
        "seed": 11,
        "vision": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2},
        "text": {
            "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 32,
        },
    },
    "llava-mid": {
        "seed": 13,
        "vision": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4},
        "text": {
            "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 64,
        },
    },
    "llava-small": {
        "seed": 12,
        "vision": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8},
        "text": {
            "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
            "num_key_value_heads": 4, "head_dim": 64,
        },
    },
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def corpus(limit: int = 14_000_000) -> Iterator[str]:
    """Text of the standard library and the installed packages, `limit` characters at most."""
    total = 0
    for key in ("stdlib", "purelib"):
        for pattern in ("*.txt", "*.md", "*.rst", "*.py"):
            of_kind = 0
            for path in sorted(pathlib.Path(sysconfig.get_paths()[key]).rglob(pattern)):
                if total >= limit or of_kind > limit // 4:
                    break
                try:
                    text = path.read_text("utf-8")[:60_000]
                except (OSError, UnicodeDecodeError):
                    continue
                total += len(text)
                of_kind += len(text)
                yield text


def tokenizer(out: pathlib.Path) -> Any:
    """A Llama tokenizer; its training is kept in `out`, so that all checkpoints there share one vocabulary."""
    kept = out / "_bpe_llama.json"
    if not kept.exists():
        bpe = Tokenizer(models.BPE(unk_token="<unk>"))
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
        limits: dict[str, Any] = {"limit_alphabet": 400, "max_token_length": 16, "show_progress": False}
        bpe.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, **limits))
        model = json.loads(bpe.to_str())["model"]
        kept.write_text(json.dumps({"vocab": model["vocab"], "merges": model["merges"]}))
    trained = json.loads(kept.read_text())
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in trained["merges"]]
    made = transformers.LlamaTokenizerFast(vocab=trained["vocab"], merges=merges, model_max_length=4096)
    made.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in ("<image>", "<pad>")])
    made.pad_token = "<pad>"
    return made


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if "embed_tokens" in name:
            scale = 1.0
        elif "lm_head" in name:
            scale = 3.0 / math.sqrt(weight.shape[1])
        elif "position_embedding" in name or "class_embedding" in name:
            scale = 0.5
        elif weight.ndim == 1:
            scale = 0.1  # norms and biases
        else:
            gain = 1.6 if any(k in name for k in ("q_proj", "k_proj")) else 1.0
            scale = gain / math.sqrt(weight[0].numel())
        weight.copy_(noise * scale)
        if weight.ndim == 1 and name.endswith(".weight"):
            weight.add_(1.0)


@torch.no_grad()
def calibrate(model: Any, processor: Any) -> None:
    """Centre the projector's output (else all patches look alike) and give it a standard deviation of 1."""
    pixels = processor.image_processor(images=[draw_image(99, 336, 336)], return_tensors="pt")["pixel_values"]
    features = model.eval().get_image_features(pixel_values=pixels)
    features = getattr(features, "pooler_output", features)
    rows = torch.cat([f.reshape(-1, f.shape[-1]) for f in features]).float()
    last = model.model.multi_modal_projector.linear_2
    last.bias.sub_(rows.mean(0))
    deviation = float((rows - rows.mean(0)).std())
    last.weight.mul_(1.0 / deviation)
    last.bias.mul_(1.0 / deviation)


def publish_names(file: pathlib.Path) -> None:
    """transformers 5 saves `vision_tower.embeddings…`; published checkpoints, and vLLM's loader, have
    `vision_tower.vision_model.embeddings…`. transformers loads both."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = load_file(file)
    renamed = {
        new + k.removeprefix(old) if k.startswith(old) and not k.startswith(new) else k: w for k, w in weights.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def make(name: str, out: pathlib.Path) -> None:
    size = SIZES[name]
    words = tokenizer(out)
    text = transformers.LlamaConfig(
        vocab_size=32064, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
        pad_token_id=words.pad_token_id, tie_word_embeddings=False, **size["text"],
    )  # fmt: skip
    width = size["vision"]["hidden_size"]
    vision = transformers.CLIPVisionConfig(image_size=336, patch_size=14, projection_dim=width, **size["vision"])
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=words.convert_tokens_to_ids("<image>")
    )
    transformers.logging.set_verbosity_error()  # it warns of a torchvision that is not needed
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    processor = transformers.LlavaProcessor(
        image_processor=pictures, tokenizer=words, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).float()
    draw_weights(model, size["seed"])
    calibrate(model, processor)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=words.pad_token_id, do_sample=False
    )
    path = out / name
    model.save_pretrained(path)
    processor.save_pretrained(path)
    publish_names(path / "model.safetensors")
    pictures.save_pretrained(path)  # preprocessor_config.json, as in published repositories
    (path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    print(f"{path}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".cache/models"))
    parser.add_argument("--only", choices=list(SIZES), action="append", help="default: all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only or SIZES:
        make(name, args.out)


if __name__ == "__main__":
    main()
