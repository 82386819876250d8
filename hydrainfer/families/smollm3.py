"""SmolLM3: every fourth layer rotates nothing (NoPE)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import Decoder, Served, require, text_only
from hydrainfer.checkpoint.files import listed, maybe, whole


def _unrotated(hf: Any, path: Path) -> tuple[int, ...]:
    rotates, n = hf.no_rope_layers, hf.num_hidden_layers
    require(len(rotates) >= n, path, f"no_rope_layers names {len(rotates)} of {n} layers")
    return tuple(i for i in range(n) if not rotates[i])


FAMILIES = {
    "SmolLM3ForCausalLM": text_only(
        Decoder("smollm3", mlp_bias=None, sliding="named", unrotated=_unrotated), dtype="bfloat16"
    )._replace(fields={"no_rope_layers": maybe(listed(whole(0, 1))), "no_rope_layer_interval": whole(1, 1024)})
}
SERVED = (Served(("SmolLM3ForCausalLM",), "SmolLM3", "Llama without rotation in every fourth layer"),)
