"""Gemma 4: layers with a window and full ones have heads of different widths. Small models (E2B, E4B) have per-layer
embeddings, and their last layers read the keys and values of earlier ones. In large ones the values of full layers are
their keys, pictures see each other in layers with a window, and 26B-A4B has experts beside each MLP. The vision tower
takes pictures and single frames of any size; of the audio tower nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    BUDGETS,
    TEXT,
    BudgetSettings,
    BudgetVideoSettings,
    Decoder,
    Experts,
    Family,
    Fit,
    Matrix,
    Names,
    Norm,
    Pool,
    Served,
    TowerConfig,
    VisionShape,
    preprocessing,
    require,
    text_only,
)
from hydrainfer.checkpoint.files import SIZE, TOKEN, maybe, whole
from hydrainfer.checkpoint.model import Sight
from hydrainfer.families.qwen_vl import frame_theta


def _global(hf: Any, path: Path) -> Any:  # noqa: ARG001
    """The configuration, whose fields outside `per_layer_config` are those of layers with a window. transformers warns
    wherever one of these is read from its own object."""
    return SimpleNamespace(**vars(hf), per_layer_config=hf.per_layer_config)


def _own(hf: Any, path: Path) -> Mapping[str, Any]:
    """The fields of `TextConfig` that only Gemma 4 has. Raises `CheckpointError`."""
    require(hf.use_bidirectional_attention != "all", path, "use_bidirectional_attention 'all' is not supported")
    full = next(i for i, kind in enumerate(hf.layer_types) if kind == "full_attention")
    wide = hf.per_layer_config[full]
    heads, kv_heads = hf.num_attention_heads, wide.num_key_value_heads
    require(heads % kv_heads == 0, path, f"{heads} heads over {kv_heads} KV heads in layers with full attention")
    shared = hf.num_kv_shared_layers
    return {
        "kv_heads": kv_heads,
        "head_dim": wide.head_dim,
        "value_dim": wide.head_dim,
        "local_head_dim": hf.head_dim,
        "attention_scale": 1.0,
        "reads": _reads(hf, path) if shared else (),
        "shared_intermediate": 2 * hf.intermediate_size if hf.use_double_wide_mlp else 0,
        "keys_as_values": bool(hf.attention_k_eq_v),
        "value_norm": True,
        "per_layer": hf.hidden_size_per_layer_input or 0,
        "per_layer_vocab": hf.vocab_size_per_layer_input,
        "pad": hf.pad_token_id or 0,
        "scaled_layers": True,
    }


def _reads(hf: Any, path: Path) -> tuple[int, ...]:
    """For each layer, the one whose keys and values it attends to: the last `num_kv_shared_layers` read those of the
    last layer of their kind before them."""
    n, shared, kinds = hf.num_hidden_layers, hf.num_kv_shared_layers, list(hf.layer_types)
    require(shared < n, path, f"num_kv_shared_layers {shared} of {n} layers")
    first = n - shared
    producers = {kind: max((i for i in range(first) if kinds[i] == kind), default=-1) for kind in set(kinds)}
    missing = " and ".join(sorted(kind for kind, at in producers.items() if at < 0))
    require(not missing, path, f"num_kv_shared_layers {shared}: no layer before them has {missing}")
    return tuple(i if i < first else producers[kinds[i]] for i in range(n))


def _experts(hf: Any, path: Path) -> Experts | None:
    if not hf.enable_moe_block:
        return None
    count, chosen, width = hf.num_experts, hf.top_k_experts, hf.moe_intermediate_size
    given = None not in (count, chosen, width)
    require(given and 0 < chosen <= count, path, f"top_k_experts {chosen} of {count} experts of width {width}")
    layers = (True,) * hf.num_hidden_layers
    return Experts(layers, count, chosen, width, router="scaled", gelu=True, stored="stacked")


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(TowerConfig):
    """The vision tower, whose pictures have as many tokens as a request asks for."""

    def shape(self, width: int, fit: Fit) -> VisionShape:
        """The tower as numbers for the planner."""
        found = TowerConfig.shape(self, width, fit)
        return msgspec.structs.replace(
            found, picture_tokens=self.tokens, table_weights=self.position_rows * self.hidden
        )


def _tower(hf: Any, path: Path) -> Gemma4VisionConfig:
    """The checked vision tower of a `Gemma4Config`. Raises `CheckpointError`."""
    v = hf.vision_config
    require(v is not None, path, "vision_config is missing")
    kind = v.model_type
    require(kind == "gemma4_vision", path, f"vision model {kind!r} is not supported; supported: gemma4_vision")
    hidden, heads, kv_heads = v.hidden_size, v.num_attention_heads, v.num_key_value_heads
    require(kv_heads == heads, path, f"{heads} vision heads over {kv_heads} KV heads")
    fits = v.head_dim * heads == hidden and v.head_dim % 4 == 0
    require(fits, path, f"{heads} vision heads of width {v.head_dim} over {hidden} columns")
    act, known = v.hidden_activation, ", ".join(ACTIVATIONS)
    require(act in ACTIVATIONS, path, f"vision hidden_activation {act!r} is not supported; supported: {known}")
    patch, merge, grid = v.patch_size, v.pooling_kernel_size, v.position_embedding_size
    widest = max(BUDGETS) * merge
    require(grid >= widest, path, f"position_embedding_size {grid} is less than the {widest} patches of a picture")
    videos = preprocessing(path, "video")
    return Gemma4VisionConfig(
        hidden=hidden,
        intermediate=v.intermediate_size,
        layers=v.num_hidden_layers,
        heads=heads,
        norm_eps=v.rms_norm_eps,
        activation=act,
        pixels=BudgetSettings.read(preprocessing(path) or {}, patch, merge, 280),
        videos=BudgetVideoSettings.read(videos or {}, patch, merge),
        patch=patch,
        merge=merge,
        by_pixel=True,
        positions="axes",
        grid=grid,
        norm="rms",
        sandwich=True,
        qk_norm="head",
        qk_eps=v.rms_norm_eps,
        value_norm=True,
        attention_scale=1.0,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        clamped=bool(v.use_clipped_linears),
        gated=True,
        rotation="axial",
        theta=frame_theta(v, path),
        features=(v.num_hidden_layers,),
        steps=(
            Pool(hidden**0.5, "vision.pool" if v.standardize else ""),
            Norm("projector.norm", v.rms_norm_eps, "plain"),
            Matrix("projector.embedding_projection", hf.text_config.hidden_size, bias=False),
        ),
    )


def _sees_whole(hf: Any) -> Sight:
    return "windows" if hf.text_config.use_bidirectional_attention == "vision" else ""


DECODER = Decoder(
    "gemma4_text",
    qk_norm="head",
    sliding="named",
    ropes=True,
    norms="around",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    embed_scale="root",
    logit_cap="final_logit_softcapping",
    stretched=False,
    experts=_experts,
    named=_global,
    own=_own,
)
_EXPERTS = (
    (r"\.router\.proj\.", ".mlp.gate."),
    (r"\.router\.", ".mlp.gate."),
    (r"(\.layers\.\d+)\.experts\.", r"\1.mlp.experts."),
)
_NAMES = Names(
    rooms=(
        (r"model\.vision_tower\.", "vision."),
        (r"model\.embed_vision\.", "projector."),
        (r"model\.language_model\.", "text."),
    ),
    text=_EXPERTS,
    vision=(
        (r"\.patch_embedder\.input_proj\.", ".patch."),
        (r"\.patch_embedder\.position_embedding_table$", ".positions"),
        (r"\.std_(bias|scale)$", r".pool.\1"),
        (r"\.encoder\.layers\.", ".blocks."),
        (r"_proj\.linear\.", "_proj."),
        (r"\.self_attn\.o_proj\.", ".out."),
        (r"\.self_attn\.([qkv])_proj\.", r".\1."),
        (r"\.self_attn\.([qk])_norm\.", r".\1_norm."),
        (r"\.mlp\.(gate|up|down)_proj\.", r".\1."),
        (r"\.input_layernorm\.", ".norm_1."),
        (r"\.post_attention_layernorm\.", ".scale_1."),
        (r"\.pre_feedforward_layernorm\.", ".norm_2."),
        (r"\.post_feedforward_layernorm\.", ".scale_2."),
    ),
)
FIELDS = {
    "num_kv_shared_layers": whole(0, 1024),
    "hidden_size_per_layer_input": maybe(whole(0, 2**16)),
    "vocab_size_per_layer_input": SIZE,
    "global_head_dim": maybe(SIZE),
    "num_global_key_value_heads": maybe(SIZE),
    "top_k_experts": maybe(SIZE),
    "position_embedding_size": SIZE,
    "pooling_kernel_size": whole(1, 64),
    **dict.fromkeys(("boi_token_id", "eoi_token_id", "audio_token_id"), maybe(TOKEN)),
}
FAMILIES = {
    "Gemma4ForCausalLM": text_only(DECODER, names=TEXT._replace(text=_EXPERTS), dtype="bfloat16")._replace(
        fields=FIELDS, overflows=True
    ),
    "Gemma4ForConditionalGeneration": Family(
        "gemma4",
        _NAMES,
        tower="hydrainfer.models.vit:FrameVision",
        vision=_tower,
        pictures="hydrainfer.processor.pictures.budget:budget_images",
        videos="hydrainfer.processor.pictures.budget:budget_videos",
        around=("boi_token_id", "eoi_token_id"),
        blanked=("image_token_id", "video_token_id", "audio_token_id"),
        mark="{picture}",
        frame="{start}{picture}{end}",
        sees_whole=_sees_whole,
        dtype="bfloat16",
        fields=FIELDS,
        overflows=True,
        n_template=10,  # BOS and the marks of two turns
        n_around=2,
    ),
}
SERVED = (
    Served(("Gemma4ForCausalLM",), "Gemma 4 (text alone)", "windows in most layers, per-layer embeddings, experts"),
    Served(
        ("Gemma4ForConditionalGeneration",),
        "Gemma 4 (E2B, E4B, 26B-A4B, 31B)",
        "Gemma 4",
        "own tower: any size, 3 x 3 patches averaged; no audio",
        "by ratio, at most 280, or 70, 140, 560 or 1,120 by `max_soft_tokens`",
        "pictures, videos",
    ),
)
