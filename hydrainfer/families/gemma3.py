"""Gemma 3: a decoder with windows, alone or beside a SigLIP tower whose patches are averaged to a fixed number of
tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    ClipSettings,
    Decoder,
    Family,
    Matrix,
    Merge,
    Norm,
    Served,
    TowerConfig,
    preprocessing,
    require,
    text_only,
)
from hydrainfer.families.llava import NAMES

_BILINEAR = 2  # Pillow's number of the filter


def gemma3(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of a `Gemma3Config`. Raises `CheckpointError`."""
    v = hf.vision_config
    require(v.model_type == "siglip_vision_model", path, f"vision model {v.model_type!r} is not supported")
    require(v.num_channels == 3, path, f"num_channels {v.num_channels} is not supported; supported: 3")
    act, known = v.hidden_act, ", ".join(ACTIVATIONS)
    require(act in ACTIVATIONS, path, f"vision hidden_act {act!r} is not supported; supported: {known}")
    heads, patches, n_tokens = v.num_attention_heads, v.image_size // v.patch_size, hf.mm_tokens_per_image
    require(v.hidden_size % heads == 0, path, f"hidden_size {v.hidden_size} over {heads} heads of the vision tower")
    side = round((n_tokens or 0) ** 0.5)
    require(
        side > 0 and side**2 == n_tokens and patches % side == 0,
        path,
        f"mm_tokens_per_image {n_tokens} does not divide the vision tower's {patches} x {patches} patches evenly",
    )
    return TowerConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=v.num_hidden_layers,
        heads=heads,
        norm_eps=v.layer_norm_eps,
        activation=act,
        pixels=_pixels(v.image_size, path),
        patch=v.patch_size,
        image_size=v.image_size,
        merge=patches // side,
        patch_bias=True,
        positions="learned",
        features=(v.num_hidden_layers,),
        steps=(
            Norm("vision.post_norm", v.layer_norm_eps),
            Merge("mean"),
            Norm("projector.mm_soft_emb_norm", v.layer_norm_eps, "rms+1"),
            Matrix("projector.mm_input_projection_weight", hf.text_config.hidden_size, transposed=True),
        ),
    )


def _pixels(side: int, path: Path) -> ClipSettings:
    """The checked preprocessing, which must resize pictures to squares of `side` pixels. Raises `CheckpointError`."""
    given = preprocessing(path) or {}
    crops = bool(given.get("do_pan_and_scan"))
    require(not crops, path, "preprocessor_config.json: do_pan_and_scan true is not supported; supported: false")
    usual = {"resample": _BILINEAR, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
    size = given.get("size", {"height": side, "width": side})
    pixels = ClipSettings.read({**usual, **given, "size": size, "do_center_crop": False, "do_pad": False})
    made = pixels.resize if isinstance(pixels.resize, tuple) else None
    require(
        made == (side, side),
        path,
        f"preprocessor_config.json makes pictures of {made or 'varying'} pixels, "
        f"but the vision tower takes ({side}, {side})",
    )
    return pixels


GEMMA = Decoder(
    "gemma3_text",
    qk_norm="head",
    sliding="named",
    ropes=True,
    norms="around",
    centred=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    divisor="query_pre_attn_scalar",
    embed_scale="root",
    stretched=False,
    refused=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
)
FAMILIES = {
    "Gemma3ForCausalLM": text_only(GEMMA, dtype="bfloat16"),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        NAMES,
        tower="hydrainfer.models.vit:SquareVision",
        vision=gemma3,
        pictures="hydrainfer.processor.pictures.clip:gemma_images",
        around=("boi_token_index", "eoi_token_index"),
        frame="\n\n{start}{picture}{end}\n\n",
        sees_whole=lambda _: "all",
        dtype="bfloat16",
        n_template=10,  # BOS and the marks of two turns
        n_around=4,
    ),
}
SERVED = (
    Served(("Gemma3ForCausalLM",), "Gemma 3 (270M, 1B)", "Gemma 3: windows in 5 of 6 layers"),
    Served(
        ("Gemma3ForConditionalGeneration",),
        "Gemma 3 (4B, 12B, 27B)",
        "Gemma 3",
        "SigLIP, averaged patches, projector; no pan and scan",
        "the same for all: 256",
        "pictures",
    ),
)
