"""The config.json for a GGUF file."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

from hydrainfer.checkpoint.files import require
from hydrainfer.checkpoint.gguf.file import GgufFile

Json = dict[str, Any]
_WHOLE = {"F32": "float32", "F16": "float16"}
_GEMMA_PATTERN, _GEMMA_27B_LAYERS = 6, 62
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _TextArchitecture(NamedTuple):
    architecture: str
    model_type: str


_TEXTS = {
    "llama": _TextArchitecture("LlamaForCausalLM", "llama"),
    "qwen2": _TextArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _TextArchitecture("Qwen3ForCausalLM", "qwen3"),
    "gemma3": _TextArchitecture("Gemma3ForCausalLM", "gemma3_text"),
}


def text_json(file: GgufFile) -> Json:
    """The configuration of a language model. Raises `CheckpointError`."""
    known = file.architecture in _TEXTS
    require(known, file.path, f"architecture {file.architecture!r} is not supported; supported: {', '.join(_TEXTS)}")
    text, table = _TEXTS[file.architecture], file.tensors.get("token_embd.weight")
    require(table is not None and len(table.shape) == 2, file.path, "token_embd.weight is missing, or no matrix")
    assert table is not None
    heads, hidden = file.number("attention.head_count"), file.number("embedding_length")
    require(type(heads) is int and heads > 0, file.path, f"{file.architecture}.attention.head_count is {heads!r}")
    head_dim = file.number("attention.key_length", file.field("rope.dimension_count", hidden // heads))
    require(
        file.number("attention.value_length", head_dim) == head_dim == file.number("rope.dimension_count", head_dim),
        file.path,
        f"queries, values and rotary embeddings of different widths ({head_dim} and others) are not supported",
    )
    config: Json = {
        "architectures": [text.architecture],
        "model_type": text.model_type,
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.number("feed_forward_length"),
        "num_hidden_layers": file.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.number("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": _dtype(file),
        "rope_parameters": _rope(file, head_dim),
    }
    return config | (_gemma(file, config) if file.architecture == "gemma3" else _window(file, config))


def _dtype(file: GgufFile) -> str:
    """The type in which most weights are stored. For quantised weights, and for Gemma 3 in place of float16, it is
    bfloat16, which has the range of the type that they were made from."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind] += math.prod(tensor.shape)
    kind = sizes.most_common(1)[0][0]
    dtype = _WHOLE.get(kind, "bfloat16")
    return "bfloat16" if file.architecture == "gemma3" and dtype == "float16" else dtype


def _rope(file: GgufFile, head_dim: int) -> Json:
    found: Json = {"rope_type": "default", "rope_theta": file.number("rope.freq_base", 10000.0)}
    factor = _linear_factor(file)
    if "rope_freqs.weight" not in file.tensors:
        return found if factor == 1.0 else found | {"rope_type": "linear", "factor": factor}
    require(factor == 1.0, file.path, f"rope_freqs.weight with a linear factor of {factor:g} is not supported")
    factors, theta = _floats(file, "rope_freqs.weight"), found["rope_theta"]
    factor = max(factors, default=0.0)
    wanted = [_llama3(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)]
    same = len(factors) == len(wanted) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, wanted))
    require(same, file.path, "rope_freqs.weight has other factors than those of Llama 3, which is not supported")
    return found | {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _linear_factor(file: GgufFile) -> float:
    """The factor by which positions are divided, read as by llama.cpp: a missing type is linear, a missing factor is
    that of the files of 2023, and no factor, or 0, is 1. Raises `CheckpointError`."""
    kind = file.field("rope.scaling.type", "linear")
    known = kind in ("linear", "none", "")
    require(known, file.path, f"rope scaling {kind!r} is not supported; supported: linear, llama3")
    attention = file.number("rope.scaling.attn_factor", 1.0)
    require(attention == 1.0, file.path, f"rope.scaling.attn_factor {attention} is not supported; supported: 1")
    name = "rope.scaling.factor" if file.field("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = file.number(name, 0.0)
    fits = isinstance(factor, int | float) and 0 <= factor < math.inf
    require(fits, file.path, f"{file.architecture}.{name} is {factor!r}; it must be a number, at least 0")
    return float(factor) if factor and kind == "linear" else 1.0


def _llama3(frequency: float, factor: float) -> float:
    """The factor by which Llama 3 divides this frequency (model card of Llama 3.1)."""
    low, high, context = _LLAMA3.values()
    smooth = min(1.0, max(0.0, (context * frequency / (2 * math.pi) - low) / (high - low)))
    return 1.0 / ((1.0 - smooth) / factor + smooth) if factor > 0 else 0.0


def _floats(file: GgufFile, name: str) -> list[float]:
    import numpy as np

    tensor = file.tensors[name]
    require(tensor.kind == "F32", file.path, f"{name} is {tensor.kind}; it must be F32")
    with file.path.open("rb") as f:
        f.seek(tensor.offset)
        return np.frombuffer(f.read(tensor.n_bytes), "<f4").tolist()


def _window(file: GgufFile, config: Json) -> Json:
    """The fields of a sliding window. A window in all layers makes a Llama model Mistral; other architectures' windows
    are refused, since the file does not say which layers have one."""
    window = file.field("attention.sliding_window") or 0
    if not 0 < window < config["max_position_embeddings"]:
        return {}
    require(file.architecture == "llama", file.path, f"a sliding window of {window} is not supported here")
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _gemma(file: GgufFile, config: Json) -> Json:
    layers = config["num_hidden_layers"]
    require(type(layers) is int and 0 < layers <= 1024, file.path, f"gemma3.block_count is {layers}")
    pattern = file.number("attention.sliding_window_pattern", _GEMMA_PATTERN)
    require(type(pattern) is int and pattern > 0, file.path, f"gemma3.attention.sliding_window_pattern is {pattern}")
    scalar = config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"] | {"rope_theta": file.number("rope.freq_base", 1e6)}
    return {
        "query_pre_attn_scalar": scalar if layers == _GEMMA_27B_LAYERS else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": [f"{'sliding' if (i + 1) % pattern else 'full'}_attention" for i in range(layers)],
        "final_logit_softcapping": file.field("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 1e4)},
        },
    }


def llava_json(text: Json, vision: GgufFile, image_token: int) -> tuple[Json, Json]:
    """The configuration and the preprocessing of a LLaVA-1.5 model whose vision tower and projector are in a file of
    their own. The tower in the file ends at the layer whose output is used. Raises `CheckpointError`."""
    fields, path = vision.fields, vision.path
    require(vision.architecture == "clip", path, "is no file of vision weights (mmproj)")
    kind = fields.get("clip.projector_type") or fields.get("clip.vision.projector_type") or "mlp"
    require(kind == "mlp", path, f"a projector of type {kind!r} is not supported; supported: mlp (LLaVA-1.5)")
    tiles = fields.get("clip.vision.mm_patch_merge_type", "flat") != "flat" or "model.image_newline" in vision.tensors
    require(not tiles, path, "LLaVA-1.6's tiles are not supported in GGUF; use its Hugging Face checkpoint")
    require(text["model_type"] in ("llama", "mistral", "qwen2"), path, f"does not fit a {text['model_type']}")
    side, layers = vision.number("vision.image_size"), vision.number("vision.block_count")
    given = fields.get("clip.vision.feature_layer") or [layers]
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": vision.number("vision.embedding_length"),
        "intermediate_size": vision.number("vision.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": vision.number("vision.attention.head_count"),
        "image_size": side,
        "patch_size": vision.number("vision.patch_size"),
        "layer_norm_eps": vision.number("vision.attention.layer_norm_epsilon", 1e-5),
        "hidden_act": next((act for act in ("gelu", "silu") if fields.get(f"clip.use_{act}")), "quick_gelu"),
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": tower,
        "image_token_index": image_token,
        "vision_feature_layer": given if len(given) > 1 else given[0],
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "dtype": text["dtype"],
    }
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "resample": 3,
        "image_mean": fields.get("clip.vision.image_mean"),
        "image_std": fields.get("clip.vision.image_std"),
    }
    return config, {name: value for name, value in pixels.items() if value is not None}
