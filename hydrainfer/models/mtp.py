"""The layer for multi-token prediction (MTP), which guesses the token after next.

    hidden state at token s - 1  ─┐
                                  ├─ joined ─ attention, MLP ─ norm ─ the decoder's head: a guess of token s + 1
    embedding of token s         ─┘

Its keys and values are one more layer of the decoder's cache, in the slot of token s - 1, so each of its rows is beside
a row of the decoder. The last slot of a block then depends on the token behind the block, which the block's key does
not name. Where a prompt goes on from such a block with another token, that slot is vague, and a guess may be wrong. No
answer changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from hydrainfer.models.decoder import Decoder, LastRows, LayerCache
from hydrainfer.models.layer import LlamaLayer, norm_dtype
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import Decode, OpSet

PREFIX = "mtp."
"""What the names of its tensors begin with."""


class MtpLayer:
    """The first MTP layer of Qwen3-Next and Qwen3.5, which is built like the decoder's last layer with attention over
    all tokens, or of MiMo-V2-Flash, whose attention is like that of a layer with a window and whose MLP has no experts.
    Embedding table and head are the decoder's."""

    def __init__(self, decoder: Decoder, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        c = decoder.config
        norms = [empty((c.hidden,), norm_dtype(c, dtype), device) for _ in range(3)]
        self._decoder, self._ops = decoder, ops
        self.embed_norm, self.hidden_norm, self.norm = norms
        self.joined = matrix(ops, (c.hidden, 2 * c.hidden), dtype, device)
        recurrent = () if c.recurrence is None else c.recurrence.layers
        self._like = max(i for i, w in enumerate(c.windows) if w == c.mtp_window and i not in recurrent)
        of_layer = replace(c, experts=None) if c.mtp_window else c
        self.layer = LlamaLayer.make(of_layer, self._like, ops, dtype, device)

    @cached_property
    def _decode(self) -> Decode | None:
        c, plain, make = self._decoder.config, self.layer.plain(self._decoder.config), self._ops.decoder
        return None if plain is None or make is None else make([plain], c.heads, c.norm_eps, c.attention_scale)

    def slots(self) -> dict[str, Slot]:
        norms = {
            "pre_fc_norm_embedding": self.embed_norm,
            "pre_fc_norm_hidden": self.hidden_norm,
            "norm": self.norm,
        }
        plus = float(self._decoder.config.centred_norms)
        found = {f"{PREFIX}{name}.weight": Slot(norm, plus=plus) for name, norm in norms.items()}
        layer = self.layer.slots(f"{PREFIX}layers.0", self._decoder.config)
        return found | {f"{PREFIX}fc.weight": Slot(self.joined)} | layer

    def multiplied(self) -> list[Weight]:
        """The weights that rows are multiplied by, as in `Decoder.multiplied`."""
        return [self.joined, *self.layer.multiplied()]

    def forward(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, cache: LayerCache, last: LastRows | None = None
    ) -> Tensor:
        """The hidden states from which the head guesses, [rows, hidden]; with `last` only of its rows. `hidden`: the
        decoder's, normalised, or this layer's own; `embedded`: the embeddings of the tokens behind theirs; both
        [rows, hidden]. `positions`: those of `hidden`. Writes keys and values of all rows to `cache`."""
        decoder = self._decoder
        both = torch.cat([decoder.normed(embedded, self.embed_norm), decoder.normed(hidden, self.hidden_norm)], 1)
        x = self._ops.linear(both, self.joined)
        x = decoder.one_layer(self.layer, self._like, x, positions, cache, last, self._decode)
        return decoder.normed(x, self.norm)
