"""GGUF files of checkpoints, as llama.cpp's converters write them (convert_hf_to_gguf.py, and for the eyes of LLaVA-1.5
convert_image_encoder_to_gguf.py)."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_VISION_NAMES = {
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "pre_layrnorm": "v.pre_ln",
    "post_layernorm": "v.post_ln",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
}
_BYTE = 6
AS_PUBLISHED = {  # Gemma 3: what all that are published have, and no file says
    "num_hidden_layers": 7,
    "layer_types": [f"{'full' if i == 5 else 'sliding'}_attention" for i in range(7)],
    "query_pre_attn_scalar": 16,
}


def read_weights(checkpoint: Path) -> dict[str, np.ndarray]:
    import torch
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        found |= load_file(file)
    return {name: tensor.float().numpy() for name, tensor in found.items()}


def spell_as_published(checkpoint: Path) -> Path:
    """Give a checkpoint with SentencePiece's vocabulary the tokenizer.json that Llama 2 was published with: a mark
    before every text, also one that begins with a space, and none of the words that transformers 5 cuts first."""
    file = checkpoint / "tokenizer.json"
    spec = json.loads(file.read_text())
    if "<0x00>" in spec["model"]["vocab"]:
        marks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        spec["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, marks]}
        spec["pre_tokenizer"] = None
        file.write_text(json.dumps(spec))
        config = json.loads((checkpoint / "tokenizer_config.json").read_text())
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    return checkpoint


def write_text(checkpoint: Path, out: Path, kind: str = "F32", **fields) -> Path:
    """The language model and tokenizer of a checkpoint; matrices are stored as `kind`. `fields` overrides, None leaves
    out."""
    whole = json.loads((checkpoint / "config.json").read_text())
    config = whole.get("text_config", whole)
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(out, arch)
    heads, rope = config["num_attention_heads"], config["rope_parameters"]
    full, head_dim = rope.get("full_attention", rope), config.get("head_dim") or config["hidden_size"] // heads
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(full["rope_theta"]),
        **({"attention.sliding_window": config["sliding_window"]} if config.get("sliding_window") else {}),
    }
    if full["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}
    _add(writer, {f"{arch}.{name}": value for name, value in (found | fields).items()})
    _add_tokenizer(writer, checkpoint)
    for name, data in read_weights(checkpoint).items():
        if (made := _text_tensor(name, data, arch, config)) is not None:
            _add_tensor(writer, *made, kind)
    if full["rope_type"] == "llama3":
        _add_tensor(writer, "rope_freqs.weight", _llama3_factors(full, head_dim), "F32")
    return _finish(writer, out)


def write_vision(checkpoint: Path, out: Path, swapped: bool = True, **fields) -> Path:
    """The tower, up to the layer that is taken, and the projector of a LLaVA-1.5. `swapped`: what widens is called
    ffn_down, as the converter had it for long."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision, taken = config["vision_config"], config["vision_feature_layer"]
    layers = taken if taken >= 0 else vision["num_hidden_layers"] + 1 + taken
    pixels = json.loads((checkpoint / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(out, "clip")
    found = {
        "clip.has_vision_encoder": True,
        "clip.has_llava_projector": True,
        "clip.projector_type": "mlp",
        "clip.use_gelu": vision["hidden_act"] == "gelu",
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": float(vision["layer_norm_eps"]),
        "clip.vision.image_mean": [float(v) for v in pixels["image_mean"]],
        "clip.vision.image_std": [float(v) for v in pixels["image_std"]],
    }
    _add(writer, found | fields)
    names = _VISION_NAMES | dict(
        zip(("mlp.fc1", "mlp.fc2"), ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down"))
    )
    for name, data in read_weights(checkpoint).items():
        if "multi_modal_projector" in name:
            _, _, i, last = name.rsplit("_", 1)[0], None, *name.rsplit("_", 1)[1].split(".")
            _add_tensor(writer, f"mm.{2 * int(i) - 2}.{last}", data, "F32")
        elif "vision_tower" in name:
            inner = name.split("vision_tower.")[1].removeprefix("vision_model.").removeprefix("encoder.")
            made = _vision_name(inner, names, layers)
            if made is not None:
                _add_tensor(writer, made, data, "F32")
    return _finish(writer, out)


def quantised(checkpoint: Path, out: Path, kind: str) -> Path:
    """The checkpoint with every matrix as it comes back from `kind`."""
    from safetensors.numpy import save_file

    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    number = gguf.GGMLQuantizationType[kind]
    weights = {
        name: gguf.dequantize(gguf.quantize(data, number), number).reshape(data.shape) if data.ndim == 2 else data
        for name, data in read_weights(checkpoint).items()
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def _add(writer: gguf.GGUFWriter, fields: dict) -> None:
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    spec = json.loads((checkpoint / "tokenizer.json").read_text())
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    special = {entry["id"] for entry in spec["added_tokens"]}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
    spelled_bytes = "<0x00>" in tokens
    kinds = [
        3 if i in special else _BYTE if spelled_bytes and token.startswith("<0x") else 1 if i in by_id else 5
        for i, token in enumerate(tokens)
    ]
    if spelled_bytes:
        kinds[tokens.index("<unk>")] = 2
    _add(writer, {"tokenizer.ggml.model": "llama" if spelled_bytes else "gpt2"})
    if spelled_bytes:
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    begins = tokenizer.encode("x")[0] == tokenizer.bos_token_id
    _add(writer, {"tokenizer.ggml.add_bos_token": begins, "tokenizer.ggml.add_eos_token": False})
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name in ("bos", "eos", "unk", "pad"):
        if (i := getattr(tokenizer, f"{name}_token_id")) is not None:
            long = {"unk": "unknown", "pad": "padding"}.get(name, name)
            _add(writer, {f"tokenizer.ggml.{long}_token_id": i})
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _text_tensor(name: str, data: np.ndarray, arch: str, config: dict) -> tuple[str, np.ndarray] | None:
    """None: no part of the language model."""
    if "vision_tower" in name or "projector" in name:
        return None
    name = name.replace("model.language_model.", "model.").replace("language_model.", "")
    name = name.replace("model.model.", "model.").replace("model.lm_head", "lm_head")
    body, last = name.rsplit(".", 1)
    names, prefix = (_GEMMA_NAMES if arch == "gemma3" else _NAMES), ""
    if body.startswith("model.layers."):
        _, _, i, body = body.split(".", 3)
        prefix = f"blk.{i}."
    if arch == "llama" and body in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads" if body.endswith("q_proj") else "num_key_value_heads"]
        data = data.reshape(heads, 2, len(data) // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
    return f"{prefix}{names[body]}.{last}", data + 1 if arch == "gemma3" and body.endswith("norm") else data


def _vision_name(inner: str, names: dict[str, str], layers: int) -> str | None:
    prefix = ""
    if inner.startswith("layers."):
        _, i, inner = inner.split(".", 2)
        if int(i) >= layers:
            return None
        prefix = f"v.blk.{i}."
    if inner in names:
        return names[inner]
    body, last = inner.rsplit(".", 1)
    return f"{prefix}{names[body]}.{last}"


def _add_tensor(writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: str) -> None:
    """One dimension stays float32, as do the pictures' patches."""
    data, number = np.ascontiguousarray(data, np.float32), gguf.GGMLQuantizationType[kind]
    if data.ndim != 2 or kind == "F32":
        return writer.add_tensor(name, data)
    writer.add_tensor(name, gguf.quantize(data, number), raw_dtype=number)


def _llama3_factors(rope: dict, head_dim: int) -> np.ndarray:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factors = rope["original_max_position_embeddings"], []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _finish(writer: gguf.GGUFWriter, out: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
