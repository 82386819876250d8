"""The table of supported families, by which a checkpoint directory is read as a `ModelConfig`.

A new family needs one entry here and one file of layers, and a file in `processor.pictures` if its pictures are
prepared in a new way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hydrainfer.checkpoint import clip, experts
from hydrainfer.checkpoint.decoder import Decoder, text_config
from hydrainfer.checkpoint.files import read_json, require
from hydrainfer.checkpoint.gemma import gemma3
from hydrainfer.checkpoint.hf import hf_config
from hydrainfer.checkpoint.lfm3 import lfm3_vl
from hydrainfer.checkpoint.model import ModelConfig, VisionConfig
from hydrainfer.checkpoint.qwen import qwen
from hydrainfer.checkpoint.recurrence import gated_delta, lfm2_names, short_convolutions
from hydrainfer.core import CheckpointError


class Family(NamedTuple):
    """One supported architecture. `layers`, `pictures` and `videos` are "module:name" and imported when they are
    needed: the `models.Layers`, and the functions that make the processor's adapters from a `ModelConfig`.

    `decoder`: the family's decoder; None if config.json names another family's. `vision(hf, path)` checks and describes
    the vision tower; None for text-only models. `around`: the fields of config.json that name the tokens around each
    picture. `frame`: the text that the first of these tokens, which is all that the chat template writes for a picture,
    becomes in a prompt; "" if the template writes the whole text itself. `sees_whole`: see `ModelConfig`. `dtype`: the
    default if config.json names none. `n_template` and `n_around` are for the planner, which has no tokenizer: the
    number of tokens of the chat template, including its default system text, and of those around each picture.
    """

    model_type: str
    layers: str
    decoder: Decoder | None = None
    vision: Callable[[Any, Path], VisionConfig] | None = None
    pictures: str = ""
    videos: str = ""
    around: tuple[str, ...] = ()
    frame: str = ""
    sees_whole: bool = False
    dtype: str = "float16"
    n_template: int = 12
    n_around: int = 0


def _text_only(decoder: Decoder) -> Family:
    return Family(decoder.model_type, "hydrainfer.models.text_only:LAYERS", decoder)


_GEMMA = Decoder("gemma3_text", qk_norm=True, sliding="named", ropes=True, gemma=True)
_GPT_OSS = Decoder(
    "gpt_oss", sliding="named", sinks="all", experts=experts.gpt_oss, quantized=("mxfp4",)
)  # `attention_bias` decides about biases
_MIMO = Decoder(
    "mimo_v2_flash",
    out_bias=False,
    sliding="named",
    ropes=True,
    partial=True,
    mimo=True,
    mtp=1,
    sinks="windows",
    experts=experts.mimo,
)
_LFM2 = Decoder("lfm2", False, False, qk_norm=True, named=lfm2_names, recurrence=short_convolutions)
_LFM3 = _LFM2._replace(model_type="lfm3", sliding="named", ropes=True, lfm3=True)
_QWEN_NEXT = Decoder("qwen3_next", qk_norm=True, partial=True, gated=True, recurrence=gated_delta, mtp=1)
_QWEN3_5 = _QWEN_NEXT._replace(model_type="qwen3_5_text", sections=(11, 11, 10), interleaved=True)
_QWEN3_5_MOE = _QWEN3_5._replace(model_type="qwen3_5_moe_text", experts=experts.qwen2)
_QWEN3_VL = Decoder("qwen3_vl_text", qk_norm=True, sliding="refused", sections=(24, 20, 20), interleaved=True)
_PICTURES = "hydrainfer.processor.pictures"
_QWEN = Family(
    "",
    "hydrainfer.models.qwen:LAYERS",
    vision=qwen,
    pictures=f"{_PICTURES}.qwen:qwen_images",
    videos=f"{_PICTURES}.qwen_video:qwen_videos",
    around=("vision_start_token_id", "vision_end_token_id"),
    dtype="bfloat16",
    n_template=20,  # "You are a helpful assistant." and the marks of three turns
    n_around=2,
)
FAMILIES = {
    "LlavaForConditionalGeneration": Family(
        "llava",
        "hydrainfer.models.llava:LAYERS",
        vision=clip.llava,
        pictures=f"{_PICTURES}.clip:llava_images",
        n_template=10,  # BOS, USER:, the newline after the picture, ASSISTANT:
    ),
    "LlavaNextForConditionalGeneration": Family(
        "llava_next",
        "hydrainfer.models.llava_next:LAYERS",
        vision=clip.llava_next,
        pictures=f"{_PICTURES}.anyres:llava_next_images",
        n_template=45,  # the same, after "A chat between a curious human and an artificial intelligence assistant. ..."
    ),
    "LlamaForCausalLM": _text_only(Decoder("llama", mlp_bias=None, mtp=0)),
    "MistralForCausalLM": _text_only(Decoder("mistral", qkv_bias=False, out_bias=False, sliding="all")),
    "Qwen2ForCausalLM": _text_only(Decoder("qwen2", qkv_bias=True, out_bias=False, sliding="named")),
    "Qwen3ForCausalLM": _text_only(Decoder("qwen3", qk_norm=True, sliding="named")),
    "MixtralForCausalLM": _text_only(
        Decoder("mixtral", qkv_bias=False, out_bias=False, sliding="all", experts=experts.mixtral)
    ),
    "Qwen2MoeForCausalLM": _text_only(
        Decoder("qwen2_moe", qkv_bias="qkv_bias", out_bias=False, sliding="named", experts=experts.qwen2)
    ),
    "Qwen3MoeForCausalLM": _text_only(Decoder("qwen3_moe", qk_norm=True, sliding="all", experts=experts.qwen3)),
    "Qwen3NextForCausalLM": _text_only(_QWEN_NEXT._replace(experts=experts.qwen2))._replace(dtype="bfloat16"),
    "Qwen3_5ForCausalLM": _text_only(_QWEN3_5)._replace(dtype="bfloat16"),
    "Qwen3_5MoeForCausalLM": _text_only(_QWEN3_5_MOE)._replace(dtype="bfloat16"),
    "GptOssForCausalLM": _text_only(_GPT_OSS)._replace(dtype="bfloat16"),
    "MiMoV2FlashForCausalLM": _text_only(_MIMO)._replace(dtype="bfloat16"),
    "Gemma3ForCausalLM": _text_only(_GEMMA)._replace(dtype="bfloat16"),
    "Lfm2ForCausalLM": Family("lfm2", "hydrainfer.models.lfm2:LAYERS", _LFM2, dtype="bfloat16"),
    "Lfm3ForCausalLM": Family("lfm3", "hydrainfer.models.lfm3:TEXT_LAYERS", _LFM3, dtype="bfloat16"),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        "hydrainfer.models.gemma:LAYERS",
        vision=gemma3,
        pictures=f"{_PICTURES}.clip:gemma_images",
        around=("boi_token_index", "eoi_token_index"),
        frame="\n\n{start}{picture}{end}\n\n",
        sees_whole=True,
        dtype="bfloat16",
        n_template=10,  # BOS and the marks of two turns
        n_around=4,
    ),
    "Lfm3VlForConditionalGeneration": _QWEN._replace(
        model_type="lfm3_vl",
        layers="hydrainfer.models.lfm3:LAYERS",
        decoder=_LFM3,
        vision=lfm3_vl,
        n_template=12,
    ),
    "Qwen2VLForConditionalGeneration": _QWEN._replace(
        model_type="qwen2_vl",
        decoder=Decoder("qwen2_vl_text", qkv_bias=True, out_bias=False, sliding="refused", sections=(16, 24, 24)),
    ),
    "Qwen2_5_VLForConditionalGeneration": _QWEN._replace(
        model_type="qwen2_5_vl",
        decoder=Decoder("qwen2_5_vl_text", qkv_bias=True, out_bias=False, sliding="refused", sections=(16, 24, 24)),
    ),
    "Qwen3VLForConditionalGeneration": _QWEN._replace(
        model_type="qwen3_vl",
        decoder=_QWEN3_VL,
        n_template=12,
    ),
    "Qwen3VLMoeForConditionalGeneration": _QWEN._replace(
        model_type="qwen3_vl_moe",
        decoder=_QWEN3_VL._replace(model_type="qwen3_vl_moe_text", experts=experts.qwen3_vl),
        n_template=12,
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN._replace(
        model_type="qwen3_5",
        decoder=_QWEN3_5,
        n_template=12,
    ),
    "Qwen3_5MoeForConditionalGeneration": _QWEN._replace(
        model_type="qwen3_5_moe",
        decoder=_QWEN3_5_MOE,
        n_template=12,
    ),
}


class ParsedConfig(NamedTuple):
    """The contents of config.json, read once. `model`: the model that it describes; `hf`: all of it as transformers'
    configuration object."""

    model: ModelConfig
    hf: Any


def family_of(model: ModelConfig) -> Family:
    return FAMILIES[model.architecture]


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
    require((path / "config.json").exists(), path, f"config.json is missing; {what}")
    raw = read_json(path / "config.json")
    kind, names = raw.get("model_type"), raw.get("architectures") or []
    if names:
        name = next((n for n in names if n in FAMILIES), names[0])
        require(name in FAMILIES, path, f"architecture {name} is not supported; supported: {_supported()}")
    else:  # as transformers, whose classes for generation are found by the model type alone
        name = next((n for n, family in FAMILIES.items() if family.model_type == kind), "")
        require(bool(name), path, f"model_type {kind!r} is not supported; supported: {_supported()}")
    family = FAMILIES[name]
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
    """Refuse quantised weights, unless the family supports the method. AWQ, GPTQ, compressed-tensors, FP8 and others
    all set these fields."""
    text = raw.get("text_config") or {}
    found = raw.get("quantization_config") or raw.get("compression_config") or text.get("quantization_config")
    if found is None:
        return
    method = found.get("quant_method", "an unknown method") if isinstance(found, dict) else "an unknown method"
    if family.decoder is not None and method in family.decoder.quantized:
        return
    bits = f" in {found['bits']} bits" if isinstance(found, dict) and isinstance(found.get("bits"), int) else ""
    raise CheckpointError(
        f"{path}: its weights are quantised by {method}{bits}, which is not supported; serve the checkpoint that they "
        "were made from, with --quantization int8 for 8 bits, or a GGUF file of it"
    )


def _supported() -> str:
    """The supported architectures, grouped by the ending of their names."""
    by_ending: dict[str, list[str]] = {}
    for name in FAMILIES:
        stem, _, ending = name.partition("For")
        by_ending.setdefault(ending, []).append(stem)
    return ", ".join(f"{'|'.join(stems)} + For{ending}" for ending, stems in by_ending.items())


def _describe(name: str, family: Family, hf: Any, path: Path) -> ModelConfig:
    text = getattr(hf, "text_config", hf)
    decoders = {f.decoder.model_type: f.decoder for f in FAMILIES.values() if f.decoder is not None}
    supported = ", ".join(decoders)
    known = text.model_type in decoders
    require(known, path, f"text model {text.model_type!r} is not supported; supported: {supported}")
    tied = bool(hf.tie_word_embeddings or getattr(text, "tie_word_embeddings", False))  # the files have the last word
    dtype = hf.dtype or text.dtype or family.dtype
    media = (*(["image_token_id"] if family.pictures else []), *(["video_token_id"] if family.videos else []))
    return ModelConfig(
        architecture=name,
        text=text_config(text, decoders[text.model_type], path, tied=tied),
        vision=family.vision(hf, path) if family.vision is not None else None,
        media_tokens=tuple(getattr(hf, field) for field in media),
        dtype=str(dtype).removeprefix("torch."),
        around=tuple(getattr(hf, field) for field in family.around),
        sees_whole=family.sees_whole,
    )
