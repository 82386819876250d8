"""The table of supported families, by which a checkpoint directory is read as a `ModelConfig`.

Every other file of this folder describes one family, or some that are alike, in `FAMILIES`: its architectures by name.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

from hydrainfer.checkpoint import (
    Family,
    ModelConfig,
    Served,
    check_fields,
    describes_otherwise,
    fp8_of,
    hf_config,
    read_json,
    require,
    text_config,
)
from hydrainfer.checkpoint.files import SIDES
from hydrainfer.core import CheckpointError

_HERE = "hydrainfer.families"
_MODULES = [import_module(f"{_HERE}.{m.name}") for m in iter_modules([str(Path(__file__).parent)]) if m.name != "table"]
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}
"""The families by the name of their architecture."""
SERVED: tuple[Served, ...] = tuple(row for module in _MODULES for row in module.SERVED)
"""What people know them as."""
_OWN_CODE, _AUDIO = "needs the checkpoint's own code, which is never run", "audio"
_LATENT, _MAMBA = "latent attention (MLA)", "Mamba-2 layers"
NOT_SERVED = {
    "InternVLChatModel": f"{_OWN_CODE}; take the repository of the same name that ends with -hf",
    "MiniCPMV": _OWN_CODE,
    "MiniCPMO": _OWN_CODE,
    "Ovis": _OWN_CODE,
    "KimiVLForConditionalGeneration": _OWN_CODE,
    "DeepseekVLV2ForCausalLM": _OWN_CODE,
    "Phi4MMForCausalLM": f"{_OWN_CODE}, and matrices that change with the medium",
    "Phi4MultimodalForCausalLM": "matrices that change with the medium",
    "MllamaForConditionalGeneration": "cross-attention to pictures",
    "Llama4ForConditionalGeneration": "chunked attention",
    "PaliGemmaForConditionalGeneration": "a prompt that sees itself in both directions",
    "Gemma3nForConditionalGeneration": "alternating updates (AltUp); take Gemma 4",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT,
    "KimiK25ForConditionalGeneration": _LATENT,
    "NemotronHForCausalLM": _MAMBA,
    "KimiLinearForCausalLM": "Kimi's delta attention (KDA)",
    "MiniMaxForCausalLM": "lightning attention",
    "Molmo2ForConditionalGeneration": "pooling attention",
    "Qwen2AudioForConditionalGeneration": _AUDIO,
    "Qwen2_5OmniForConditionalGeneration": _AUDIO,
    "Qwen3OmniMoeForConditionalGeneration": _AUDIO,
    "VoxtralForConditionalGeneration": _AUDIO,
}
"""Architectures that people ask for, and what in them is not served."""
_NEAREST = 5
_ALL = 'all are in docs/models.md, "What is served"'


class ParsedConfig(NamedTuple):
    """The contents of config.json, read once. `model`: the model that it describes; `hf`: all of it as transformers'
    configuration object."""

    model: ModelConfig
    hf: Any


def family_of(model: ModelConfig) -> Family:
    family = FAMILIES[model.architecture]
    return family.variants.get(model.variant, family)


def read_config(path: str | Path) -> ModelConfig:
    """The model in a Hugging Face checkpoint directory. Raises `CheckpointError` in one line."""
    return parse_config(path).model


def architecture_of(path: str | Path) -> str:
    """The architecture of a checkpoint directory, one of `FAMILIES`. This takes milliseconds, so that an unsupported
    model is refused before torch is imported. Raises `CheckpointError` in one line."""
    path = Path(path).expanduser()
    what = "pass a Hugging Face checkpoint directory, a GGUF file, or a name on the hub such as owner/name"
    require(path.exists(), path, f"no such directory; {what}")
    require(path.is_dir(), path, f"is not a directory; {what}")
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path}: {describes_otherwise(path) or f'config.json is missing; {what}'}")
    raw = read_json(path / "config.json")
    kind, names = raw.get("model_type"), raw.get("architectures") or []
    if names:
        name = next((n for n in names if n in FAMILIES), names[0])
        require(name in FAMILIES, path, _refused(name, kind))
    else:  # as transformers, whose classes for generation are found by the model type alone
        name = next((n for n, family in FAMILIES.items() if family.model_type == kind), "")
        require(bool(name), path, _refused("", kind))
    family = FAMILIES[name]
    check_fields(raw, path / "config.json", {**SIDES, **family.fields})
    fits = kind == family.model_type
    require(fits, path, f"{name} with model_type {kind!r} is not supported; use {family.model_type}")
    _check_wide(raw, family, path)
    weights = raw.get("transformers_weights") or "model.safetensors"
    require(weights == "model.safetensors", path, f"transformers_weights {weights!r} is not supported; leave it out")
    return name


def parse_config(path: str | Path) -> ParsedConfig:
    """Read the configurations of a checkpoint directory. Raises `CheckpointError` in one line."""
    path = Path(path).expanduser()
    name = architecture_of(path)
    hf = hf_config(path)
    return ParsedConfig(_describe(name, FAMILIES[name], hf, path), hf)


def _check_wide(raw: dict[str, Any], family: Family, path: Path) -> None:
    """Refuse quantised weights, unless they are in FP8 or the family supports the method. AWQ, GPTQ,
    compressed-tensors and others all set these fields."""
    text = raw.get("text_config") or {}
    found = raw.get("quantization_config") or raw.get("compression_config") or text.get("quantization_config")
    if found is None or fp8_of(found, path) is not None:
        return
    method = found.get("quant_method", "an unknown method") if isinstance(found, dict) else "an unknown method"
    if family.decoder is not None and method in family.decoder.quantized:
        return
    bits = f" in {found['bits']} bits" if isinstance(found, dict) and isinstance(found.get("bits"), int) else ""
    raise CheckpointError(
        f"{path}: its weights are quantised by {method}{bits}, which is not supported; serve the checkpoint that they "
        "were made from, with --quantization int8 for 8 bits, or a GGUF file of it"
    )


def _refused(name: str, kind: Any) -> str:
    """Why an architecture, or a model type if none is named, is not served, and what is near."""
    if name in NOT_SERVED:
        return f"architecture {name} is not supported: {NOT_SERVED[name]}"
    if name:
        near = get_close_matches(name, FAMILIES, _NEAREST, 0.0)
        return f"architecture {name} is not supported; nearest: {', '.join(near)}; {_ALL}"
    near = get_close_matches(str(kind), {family.model_type: 0 for family in FAMILIES.values()}, _NEAREST, 0.0)
    return f"model_type {kind!r} is not supported; nearest: {', '.join(near)}; {_ALL}"


def _describe(name: str, family: Family, hf: Any, path: Path) -> ModelConfig:
    kind = getattr(getattr(hf, "vision_config", None), "model_type", "")
    variant = kind if kind in family.variants else ""
    family = family.variants.get(variant, family)
    text = getattr(hf, "text_config", hf)
    decoders = {f.decoder.model_type: f.decoder for f in FAMILIES.values() if f.decoder is not None}
    decoders |= {family.decoder.model_type: family.decoder} if family.decoder is not None else {}
    known, near = text.model_type in decoders, get_close_matches(str(text.model_type), decoders, _NEAREST, 0.0)
    require(known, path, f"text model {text.model_type!r} is not supported; nearest: {', '.join(near)}; {_ALL}")
    tied = bool(hf.tie_word_embeddings or getattr(text, "tie_word_embeddings", False))  # the files have the last word
    dtype = hf.dtype or text.dtype or family.dtype
    media = ["image_token_id"] if family.pictures else []
    if family.videos and family.video_mark is None:
        media.append("video_token_id")
    described = text_config(text, decoders[text.model_type], path, tied=tied)
    if family.vision is not None:  # transformers scales logits only in the classes of text models
        described = replace(described, logit_scale=1.0)
    return ModelConfig(
        architecture=name,
        text=described,
        vision=family.vision(hf, path) if family.vision is not None else None,
        media_tokens=tuple(getattr(hf, field) for field in media),
        dtype=str(dtype).removeprefix("torch."),
        around=tuple(getattr(hf, field) for field in family.around),
        blanked=tuple(token for field in family.blanked if (token := getattr(hf, field)) is not None),
        sees_whole=family.sees_whole(hf) if family.sees_whole is not None else "",
        fp8=fp8_of(getattr(hf, "quantization_config", None) or getattr(text, "quantization_config", None), path),
        variant=variant,
    )
