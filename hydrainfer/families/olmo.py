"""OLMo 2 and 3: norms behind attention and MLP instead of before them, and over all queries and all keys of a token.
OLMo 3 has windows."""

from __future__ import annotations

from hydrainfer.checkpoint import Decoder, Served, text_only

_OLMO2 = Decoder("olmo2", norms="after", qk_norm="row")
FAMILIES = {
    "Olmo2ForCausalLM": text_only(_OLMO2, dtype="bfloat16"),
    "Olmo3ForCausalLM": text_only(_OLMO2._replace(model_type="olmo3", sliding="named", ropes=True), dtype="bfloat16"),
}
SERVED = (
    Served(("Olmo2ForCausalLM",), "OLMo 2", "norms behind attention and MLP, over all queries and all keys"),
    Served(("Olmo3ForCausalLM",), "OLMo 3", "OLMo 2 with windows in 3 of 4 layers"),
)
