"""SmolLM3: every fourth layer rotates nothing (NoPE)."""

from __future__ import annotations

from typing import Any

from hydrainfer.checkpoint import Decoder, Served, text_only
from hydrainfer.checkpoint.files import listed, maybe, whole


def _unrotated(hf: Any) -> tuple[int, ...]:
    return tuple(i for i, rotates in enumerate(hf.no_rope_layers[: hf.num_hidden_layers]) if not rotates)


FAMILIES = {
    "SmolLM3ForCausalLM": text_only(
        Decoder("smollm3", mlp_bias=None, sliding="named", unrotated=_unrotated), dtype="bfloat16"
    )._replace(fields={"no_rope_layers": maybe(listed(whole(0, 1))), "no_rope_layer_interval": whole(1, 1024)})
}
SERVED = (Served(("SmolLM3ForCausalLM",), "SmolLM3", "Llama without rotation in every fourth layer"),)
