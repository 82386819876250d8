"""The JSON files of a checkpoint directory. Their values are checked when they are read, before anything is computed
from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydrainfer.core import CheckpointError

Rule = Callable[[Any], str | None]
"""A function that returns None for a valid value, else a description of valid ones. The value `None` is JSON's null."""


def require(ok: bool, path: Path, problem: str) -> None:
    """Raise `CheckpointError` with this problem of the checkpoint, or file, `path` unless `ok`."""
    if not ok:
        raise CheckpointError(f"{path}: {problem}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint directory. Raises `CheckpointError`, one line that names the file and,
    for an invalid value, the field."""
    if not path.exists():
        raise CheckpointError(f"{path.parent}: {path.name} is missing")
    try:
        content = json.loads(path.read_text("utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it does not hold a JSON object")
    check_fields(content, path, _RULES.get(path.name, {}))
    return content


def check_fields(content: Mapping[str, Any], path: Path, rules: Mapping[str, Rule], section: str = "") -> None:
    """Check the fields of a JSON object, and of the sections within it, by the rules of their names. `section`: the one
    that it is, e.g. "text_config.". Raises `CheckpointError`, one line with file and field."""
    for name, value in content.items():
        if name in _SECTIONS and isinstance(value, dict):
            check_fields(value, path, rules, f"{section}{name}.")
        elif name in rules and (wanted := rules[name](value)) is not None:
            shown = json.dumps(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise CheckpointError(f"{path}: {section}{name} is {shown}; it must be {wanted}")


def find_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file. Raises as `read_json` does."""
    return read_json(path) if path.exists() else None


def preprocessing(path: Path, kind: str = "image") -> dict[str, Any] | None:
    """The preprocessor configuration of pictures (or, with kind "video", of videos), from the first place that has one,
    in the order of transformers: a section of processor_config.json, then a file of its own and, for videos, that of
    the pictures. None if there is none. As in transformers, a switch that is null is off. Other nulls are left out,
    except for those that transformers does not take for a default. Raises `CheckpointError`."""
    found = (find_json(path / "processor_config.json") or {}).get(f"{kind}_processor")
    names = (f"{kind}_preprocessor_config.json",) if kind != "image" else ()
    for name in (*names, "preprocessor_config.json"):
        found = find_json(path / name) if found is None else found
    return None if found is None else _settled_nulls(found)


def _settled_nulls(content: dict[str, Any]) -> dict[str, Any]:
    settled = {name: False if value is None and name in _SWITCHES else value for name, value in content.items()}
    return {
        name: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for name, value in settled.items()
        if value is not None or name in NO_DEFAULT
    }


def whole(least: int, most: int) -> Rule:
    words = f"a whole number from {least} to {most}"
    return lambda value: None if type(value) is int and least <= value <= most else words


def number(least: float, most: float) -> Rule:
    def rule(value: Any) -> str | None:
        fits = type(value) in (int, float) and math.isfinite(value) and least <= value <= most
        return None if fits else f"a number from {least:g} to {most:g}"

    return rule


def maybe(rule: Rule) -> Rule:
    """The rule for a value that may be null, which stands for a missing field."""
    return lambda value: None if value is None or rule(value) is None else f"{rule(value)}, or null"


def _called(words: str, rule: Rule) -> Rule:
    return lambda value: None if rule(value) is None else words


def listed(rule: Rule, n: int | None = None) -> Rule:
    """The rule for a list whose values follow `rule` and are not null. `n`: the length of the list, if fixed."""

    def check(value: Any) -> str | None:
        if isinstance(value, list) and n in (None, len(value)) and all(rule(v) is None for v in value):
            return None
        return f"a list{'' if n is None else f' of {n}'}, each {rule(None)}"

    return check


def or_list(rule: Rule, least: int = 0) -> Rule:
    """The rule for one value, or for a list of at least `least` such values."""

    def check(value: Any) -> str | None:
        if isinstance(value, list) and len(value) >= least and listed(rule)(value) is None:
            return None
        return rule(value) and f"{rule(value)}, or a list of such"

    return check


def instance(kind: type, words: str) -> Rule:
    return lambda value: None if isinstance(value, kind) else words


def _or_switch(rule: Rule) -> Rule:
    """The rule for one value, or for true or false."""
    return lambda value: None if isinstance(value, bool) or rule(value) is None else f"{rule(value)}, true or false"


def _or_square(rule: Rule) -> Rule:
    """The rule for one value, or for an object of two, height and width."""

    def check(value: Any) -> str | None:
        sides = value.values() if isinstance(value, dict) and value.keys() == {"height", "width"} else (value,)
        return None if all(rule(side) is None for side in sides) else f"{rule({})}, or height and width"

    return check


_OBJECT = maybe(instance(dict, "an object"))
SIZE, _LAYERS = whole(1, 2**24), whole(1, 1024)
_POSITIONS = whole(1, 2**31 - 1)
SIDE = whole(1, 2**16)
_COUNT = maybe(whole(1, 2**32))
TOKEN = whole(0, 2**24)
POSITIVE = number(1e-9, 1e12)
_ROPES = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention")
_PARTS = ("text_config", "vision_config", *_ROPES)
_PROCESSORS = ("image_processor", "video_processor")
_SECTIONS = (*_PARTS, *_PROCESSORS, "size", "crop_size", "max_image_size", "video_sampling", "video_size")
_SWITCHES = (
    "do_image_splitting",
    "do_pan_and_scan",
    "do_resize",
    "do_center_crop",
    "do_pad",
    "do_rescale",
    "do_normalize",
    "cap_pixels_per_frame",
)
NO_DEFAULT = (
    *("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std"),
    *("patch_size", "merge_size", "temporal_patch_size", "image_grid_pinpoints"),
)
"""Fields of preprocessing that need a value where they are used: transformers has a default for those that are missing,
and none for a null."""
_POINTS = {"image_grid_pinpoints": maybe(_called("a list of pairs of sides in pixels", listed(listed(SIDE, 2))))}
_MODEL: dict[str, Rule] = {
    **dict.fromkeys(_PARTS, _OBJECT),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), maybe(instance(str, "a string"))),
    "architectures": maybe(listed(instance(str, "a string"))),
    **dict.fromkeys(("num_hidden_layers", "depth"), _LAYERS),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_heads"), SIZE),
    **dict.fromkeys(("num_experts", "n_routed_experts"), maybe(SIZE)),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), maybe(whole(0, 2**24))),  # 0 in Granite 4
    **dict.fromkeys(("n_group", "topk_group", "decoder_sparse_step"), maybe(SIZE)),
    **dict.fromkeys(("moe_intermediate_size", "v_head_dim"), maybe(SIZE)),
    "shared_expert_intermediate_size": maybe(whole(0, 2**24)),  # 0 in Qwen3-Coder, which has no shared expert
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), maybe(POSITIVE)),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "routed_scaling_factor"), maybe(POSITIVE)),
    "attention_value_scale": maybe(number(0, 1e6)),
    "mlp_only_layers": maybe(listed(whole(0, 1023))),
    "sliding_window_size": maybe(whole(1, 2**31 - 1)),
    **dict.fromkeys(("embed_dim", "out_hidden_size", "num_position_embeddings"), SIZE),
    **dict.fromkeys(("head_dim", "num_key_value_heads"), maybe(SIZE)),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans", "window_size"), SIDE),
    **dict.fromkeys(("image_size", "patch_size"), or_list(SIDE, least=1)),
    **dict.fromkeys(("temporal_patch_size", "spatial_merge_size"), SIDE),
    "mlp_ratio": POSITIVE,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), number(0, 1)),
    **dict.fromkeys(("conv_kernel_size", "conv_L_cache", "linear_conv_kernel_dim"), SIDE),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), SIZE),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "projector_hidden_size"), SIZE),
    **dict.fromkeys(("fullatt_block_indexes", "deepstack_visual_indexes"), listed(whole(0, 1023))),
    "vision_feature_layer": or_list(whole(-1025, 1024), least=1),
    "max_position_embeddings": _POSITIONS,
    "sliding_window": maybe(whole(-1, 2**31 - 1)),
    "max_window_layers": maybe(whole(0, 2**24)),
    "is_causal": lambda v: None if v is None else "left out: the architecture decides which tokens see each other",
    "query_pre_attn_scalar": whole(1, 2**24),
    "mm_tokens_per_image": whole(1, 2**24),
    **dict.fromkeys(("boi_token_index", "eoi_token_index"), maybe(TOKEN)),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), maybe(POSITIVE)),
    "partial_rotary_factor": maybe(number(0, 1)),
    **dict.fromkeys(("short_factor", "long_factor"), maybe(listed(POSITIVE))),
    "original_max_position_embeddings": maybe(_POSITIONS),
    "mrope_section": maybe(listed(whole(0, 2**16), 3)),
    "tokens_per_second": maybe(POSITIVE),
    **dict.fromkeys((f"{kind}_token_id" for kind in ("image", "video", "vision_start", "vision_end")), maybe(TOKEN)),
    "image_token_index": maybe(TOKEN),
    "eos_token_id": maybe(or_list(TOKEN)),
    **_POINTS,
}
SIDES: dict[str, Rule] = dict.fromkeys(("image_size", "patch_size"), SIDE)
"""The rules of fields of config.json for a family that has no other rules of them."""
_PREPROCESSING: dict[str, Rule] = {
    **dict.fromkeys((*_PROCESSORS, "video_sampling"), _OBJECT),
    **dict.fromkeys(("temporal_patch_size", "merge_size", "size", "crop_size"), maybe(SIDE)),
    "video_size": maybe(SIDE),
    **dict.fromkeys(("height", "width", "spatial_merge_size"), maybe(SIDE)),
    "patch_size": maybe(_or_square(SIDE)),
    **dict.fromkeys(("pooling_kernel_size", "max_soft_tokens"), maybe(SIDE)),
    **dict.fromkeys(("shortest_edge", "longest_edge", "min_pixels", "max_pixels"), _COUNT),
    **dict.fromkeys(("num_frames", "min_frames", "max_frames", "max_video_tokens"), _COUNT),
    **dict.fromkeys(_SWITCHES, maybe(instance(bool, "true or false"))),
    **dict.fromkeys(("min_patches", "max_patches"), maybe(whole(1, 100))),
    "fps": maybe(POSITIVE),
    "initial_shift": maybe(_or_switch(number(0, 1e9))),
    "max_duration": maybe(whole(1, 2**24)),
    "resample": maybe(whole(0, 5)),
    "rescale_factor": maybe(POSITIVE),
    "image_mean": maybe(listed(number(-1e6, 1e6), 3)),
    "image_std": maybe(listed(POSITIVE, 3)),
    **_POINTS,
}
_GENERATION: dict[str, Rule] = {  # core.SamplingParams checks which values are allowed
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), maybe(number(-1e6, 1e6))),
    "top_k": maybe(whole(-(2**31), 2**31 - 1)),
    "eos_token_id": maybe(or_list(TOKEN)),
}
_RULES: dict[str, dict[str, Rule]] = {
    "config.json": _MODEL,
    "generation_config.json": _GENERATION,
    "preprocessor_config.json": _PREPROCESSING,
    "processor_config.json": _PREPROCESSING,
    "video_preprocessor_config.json": _PREPROCESSING,
}
