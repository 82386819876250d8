"""Models as numbers for the planner, from their configuration alone: no weights, no tokenizer needed, no device.

A model is a checkpoint directory or the name of one of configs/models, which hold the published config.json and
preprocessor_config.json of the models that the paper measures (LLaVA-NeXT-7B is the one on Vicuna).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hydrainfer.config import preprocessing, read_json
from hydrainfer.config.shipped import here_or_shipped, shipped
from hydrainfer.core import CheckpointError, ConfigError
from hydrainfer.planner.costs import ModelShape, VisionShape
from hydrainfer.planner.inputs.workloads import Prompts, words_to_tokens
from hydrainfer.processor import (
    PINPOINTS,
    ChatMessage,
    ImageAdapter,
    ImagePart,
    ModelDescription,
    TextPart,
    encode,
    llava_images,
    llava_next_images,
    load_description,
    qwen_images,
)

Config = dict[str, Any]
Fit = Callable[[int, int], int]
_TEXT = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_CLIP = ("num_hidden_layers", "hidden_size", "intermediate_size", "image_size", "patch_size")
_QWEN = (
    "depth",
    "embed_dim",
    "hidden_size",
    "mlp_ratio",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
)
_QWEN_2_5 = (*_QWEN[:1], "hidden_size", "out_hidden_size", "intermediate_size", *_QWEN[4:])
_REFERENCE = (1024, 768)  # pixels; the commonest picture of the paper's data sets


class _Family(NamedTuple):
    """The rules for one kind of config.json. `adapter`: maker of what prepares its pictures. `keys`: of vision_config
    that are read. `n_template`: tokens of the chat template, with the system text that it puts in; `n_around`: beside
    each picture."""

    vision: Callable[[Config, Fit], VisionShape]
    adapter: Callable[[Config, Config], ImageAdapter]
    keys: tuple[str, ...]
    n_template: int
    n_around: int = 0


def locate_model(name: str) -> Path:
    """A checkpoint directory, or that of a shipped configuration. Raises `ConfigError` that names those there are."""
    path = here_or_shipped(Path(name))
    if path.is_dir():
        return path
    found = {p.parent.name: p.parent for p in sorted(shipped("configs").glob("models/*/config.json"))}
    if name in found:
        return found[name]
    known = ", ".join(found) or "none"
    raise ConfigError(f"no model {name!r}: give a checkpoint directory, or one of {known}", param="model")


def shape_of(name: str, dtype: str | None = None) -> ModelShape:
    """The shape of a model that runs in `dtype` (default: as saved). Raises `ConfigError` or `CheckpointError`."""
    path = locate_model(name)
    config = _config(path)
    text, family = _text(config), _family(config, path)
    heads, saved = text["num_attention_heads"], "bfloat16"
    for part in (text, config):
        saved = str(part.get("dtype") or part.get("torch_dtype") or saved).removeprefix("torch.")
    return ModelShape(
        name=path.name,
        dtype=dtype or saved,
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab=text["vocab_size"],
        context=text["max_position_embeddings"],
        deepstack=len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ()),
        tied=any(part.get("tie_word_embeddings") for part in (config, text)),
        vision=family.vision(config, _fit(family, config, path)) if family is not None else None,
    )


def prompts_of(name: str) -> Prompts:
    """The model's rules for counting tokens: pictures by its own; text by its tokenizer and template or, where a
    configuration is all there is, by words. Raises `ConfigError` or `CheckpointError`."""
    path = locate_model(name)
    config = _config(path)
    family = _family(config, path)
    fit = _fit(family, config, path) if family is not None else None
    if (path / "tokenizer.json").is_file():
        return Prompts(
            name=path.name,
            picture=fit,
            text=_exactly(load_description(path)),
            n_context=_text(config)["max_position_embeddings"],
        )
    n_template, n_around = (family.n_template, family.n_around) if family is not None else (12, 0)

    def text(words: str, n_pictures: int) -> int:
        return n_template + n_around * n_pictures + words_to_tokens(words)

    return Prompts(name=path.name, picture=fit, text=text, n_context=_text(config)["max_position_embeddings"])


def _exactly(model: ModelDescription) -> Callable[[str, int], int]:
    def text(words: str, n_pictures: int) -> int:
        pictures = [ImagePart("", "messages")] * n_pictures
        message = ChatMessage("user", (*pictures, TextPart(words)))
        rendered = model.template.render([message]) if model.template is not None else words
        ids = encode(rendered, model)
        return len(ids) - (n_pictures if model.template is not None else 0)

    return text


def _text(config: Config) -> Config:
    return config.get("text_config") or config


def _config(path: Path) -> Config:
    """The content of config.json; where that lacks a key, with the defaults of transformers, which takes seconds to
    load."""
    config = read_json(path / "config.json")
    family = _family(config, path)
    text, vision = _text(config), config.get("vision_config") or {}
    named = [part for part in (config, text) if "tie_word_embeddings" in part]
    wanted = {*_TEXT} - text.keys() | ({*family.keys} - vision.keys() if family is not None else set())
    if named and not wanted and (family is None or family.keys is not _CLIP or "vision_feature_layer" in config):
        return config
    from transformers import AutoConfig

    try:
        full = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as e:
        first = " ".join(str(e).split())[:200]
        raise CheckpointError(f"{path}: config.json is not valid: {first}") from None
    if missing := {*_TEXT} - _text(full).keys():
        raise CheckpointError(f"{path}: config.json describes no decoder; {', '.join(sorted(missing))} missing")
    return full


def _family(config: Config, path: Path) -> _Family | None:
    """The rules for this configuration; None for a model without eyes."""
    if config.get("vision_config") is None:
        return None
    kind = str(config.get("model_type"))
    if kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise CheckpointError(f"{path}: cannot plan for model type {kind!r}; known are {known} and text models")
    return _FAMILIES[kind]


def _fit(family: _Family, config: Config, path: Path) -> Fit:
    adapter = family.adapter(config, preprocessing(path) or {})
    return lambda width, height: adapter.fit(width, height).n_tokens


# ---- the families


def _clip(config: Config, fit: Fit) -> VisionShape:
    """LLaVA-1.5: one square; every patch row and the class row pass all layers up to the one whose output is taken."""
    v, width, wanted = config["vision_config"], _text(config)["hidden_size"], config["vision_feature_layer"]
    chosen = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    layers = max(i if i >= 0 else v["num_hidden_layers"] + 1 + i for i in chosen)
    rows, hidden = (v["image_size"] // v["patch_size"]) ** 2 + 1, v["hidden_size"]
    n_tokens = fit(*_REFERENCE)
    return VisionShape(
        layers=layers,
        hidden=hidden,
        row_weights=3 * v["patch_size"] ** 2 * hidden + layers * (4 * hidden**2 + 2 * hidden * v["intermediate_size"]),
        token_weights=hidden * len(chosen) * width + width**2,
        rows_per_token=rows / n_tokens,
        window_rows=rows,
        picture_tokens=n_tokens,
    )


def _anyres(config: Config, fit: Fit) -> VisionShape:
    """LLaVA-NeXT: the picture and its tiles, a square each, of which padding is cut off after the tower. Patches per
    token are those of a picture of 4:3, five squares; a square one has a fifth fewer for its tokens, one of 3:2 a tenth
    more."""
    side, patch = (config["vision_config"][key] for key in ("image_size", "patch_size"))
    one = _clip(config, lambda *_: (side // patch) ** 2)
    points = config.get("image_grid_pinpoints") or PINPOINTS
    squares = 1 + max(h * w for h, w in points) // side**2
    largest = max(fit(w, h) for h, w in points)
    return VisionShape(
        layers=one.layers,
        hidden=one.hidden,
        row_weights=one.row_weights,
        token_weights=one.token_weights,
        rows_per_token=squares * one.window_rows / fit(*_REFERENCE),
        window_rows=one.window_rows,
        picture_tokens=largest,
    )


def _qwen(config: Config, fit: Fit) -> VisionShape:  # the largest picture is a matter of limits
    """Qwen2-VL: patches of two frames (a still picture counts as two), all of a picture attend to each other, a square
    of them becomes a token."""
    v = config["vision_config"]
    hidden, n_merged = v["embed_dim"], v["spatial_merge_size"] ** 2
    patch, inner = 3 * v["temporal_patch_size"] * v["patch_size"] ** 2, int(hidden * v["mlp_ratio"])
    merged = hidden * n_merged
    return VisionShape(
        layers=v["depth"],
        hidden=hidden,
        row_weights=patch * hidden + v["depth"] * (4 * hidden**2 + 2 * hidden * inner),
        token_weights=merged**2 + merged * v["hidden_size"],
        rows_per_token=float(n_merged),
        picture_tokens=fit(10_000, 10_000),
    )


def _qwen_2_5(config: Config, fit: Fit) -> VisionShape:
    """Qwen2.5-VL: gated MLPs, and windows in all but a few layers."""
    v = config["vision_config"]
    window = (v["window_size"] // v["patch_size"]) ** 2
    return _later_qwen(v, fit, 3, window_rows=window, full_layers=len(v["fullatt_block_indexes"]))


def _qwen_3(config: Config, fit: Fit) -> VisionShape:
    """Qwen3-VL: a merger more for each level of features that the decoder gets besides."""
    v = config["vision_config"]
    return _later_qwen(v, fit, 2, n_mergers=1 + len(v["deepstack_visual_indexes"]))


def _later_qwen(v: Config, fit: Fit, n_mlp: int, *, n_mergers: int = 1, **more: int) -> VisionShape:
    hidden, n_merged = v["hidden_size"], v["spatial_merge_size"] ** 2
    patch, merged = 3 * v["temporal_patch_size"] * v["patch_size"] ** 2, hidden * n_merged
    return VisionShape(
        layers=v["depth"],
        hidden=hidden,
        row_weights=patch * hidden + v["depth"] * (4 * hidden**2 + n_mlp * hidden * v["intermediate_size"]),
        token_weights=n_mergers * (merged**2 + merged * v["out_hidden_size"]),
        rows_per_token=float(n_merged),
        picture_tokens=fit(10_000, 10_000),
        **more,
    )


_FAMILIES = {
    # BOS, USER:, the newline after the picture, ASSISTANT:
    "llava": _Family(_clip, llava_images, _CLIP, 10),
    # the same, after "A chat between a curious human and an artificial intelligence assistant. ..."
    "llava_next": _Family(_anyres, llava_next_images, _CLIP, 45),
    # "You are a helpful assistant." and three turns' marks
    "qwen2_vl": _Family(_qwen, qwen_images, _QWEN, 20, 2),
    "qwen2_5_vl": _Family(_qwen_2_5, qwen_images, (*_QWEN_2_5, "window_size", "fullatt_block_indexes"), 20, 2),
    "qwen3_vl": _Family(_qwen_3, qwen_images, (*_QWEN_2_5, "deepstack_visual_indexes"), 12, 2),
}
