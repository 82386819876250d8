"""A loaded model: the towers that a role needs, behind the calls that runners make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hydrainfer.cache import CacheSpec, for_stage, specs_of
from hydrainfer.checkpoint import ModelConfig
from hydrainfer.core import Role, Stage
from hydrainfer.models.decoder import Decoder, DeepRows, LastRows, LayerCache
from hydrainfer.models.mtp import MtpLayer
from hydrainfer.models.picture import PatchedPicture, VisionTower, tower_of
from hydrainfer.models.slots import Slot
from hydrainfer.ops import OpSet, PagedAttention, packing, pausing, stepping


class Model:
    """A model's weights on one device. `vision` is None unless the role encodes and the model takes pictures.
    `language` is None unless the role prefills or decodes; `mtp` guesses beside it if `TextConfig.guesses`. `pause`, if
    given, is called before each matrix product of the vision tower."""

    def __init__(
        self,
        config: ModelConfig,
        role: Role,
        ops: OpSet,
        dtype: torch.dtype,
        device: torch.device,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self.config, self.role, self.ops, self.dtype, self.device = config, role, ops, dtype, device
        speaks = role.runs(Stage.PREFILL) or role.runs(Stage.DECODE)
        sees = config.vision is not None and role.runs(Stage.ENCODE)
        tower_ops = packing(ops) if pause is None else pausing(packing(ops), pause)
        self.vision: VisionTower | None = tower_of(config)(config, tower_ops, dtype, device) if sees else None
        self.language = Decoder(config.text, stepping(ops), dtype, device) if speaks else None
        self._blanked = torch.tensor(config.blanked, device=device) if config.blanked else None
        self.mtp: MtpLayer | None = None
        if self.language is not None and config.text.guesses:
            self.mtp = MtpLayer(self.language, stepping(ops), dtype, device)
        self.weight_bytes = sum(slot.into.nbytes for slot in self.slots().values())
        if self.language is not None and self.language.shortlist is not None:
            self.weight_bytes += self.language.shortlist.nbytes

    def slots(self) -> dict[str, Slot]:
        """The slot of every tensor that the role needs, by canonical name. Call this before the first picture, because
        `packing` then changes the weights of the vision tower."""
        towers = self.vision, self.language, self.mtp
        return {name: slot for tower in towers if tower for name, slot in tower.slots().items()}

    def prepare(self) -> None:
        """Measure the fastest way to multiply many rows by each shape of weight. It takes up to a second for each
        shape, and a request would have to wait for it. The result is kept for later starts
        (`ops/cpu/remembered.py`)."""
        products = self.ops.products
        if products is None:
            return
        for tower in (self.vision, *((self.language, self.mtp) if self.role.runs(Stage.PREFILL) else ())):
            for weight in tower.multiplied() if tower else ():
                products.prepare(weight)

    def cache_specs(self, *, kv_block_tokens: int = 16, embed_block_tokens: int = 64) -> tuple[CacheSpec, ...]:
        """The specs of the caches that this model's role needs."""
        dtype = str(self.dtype).removeprefix("torch.")
        return cache_specs(self.config, self.role, dtype, kv_block_tokens, embed_block_tokens)

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [rows, embed_width] of each picture; see `VisionTower`."""
        assert self.vision is not None, f"role {self.role} loads no vision tower"
        with torch.inference_mode():
            return self.vision.encode(pictures)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings: int64 [rows] → a fresh tensor [rows, hidden]; see `embedded_as`."""
        assert self.language is not None, f"role {self.role} loads no language model"
        with torch.inference_mode():
            return self.language.embed(self.embedded_as(ids))

    def embedded_as(self, ids: Tensor) -> Tensor:
        """The ids int64 [rows] whose embeddings stand for `ids`: padding for `ModelConfig.blanked`."""
        if self._blanked is None:
            return ids
        return ids.masked_fill((ids[:, None] == self._blanked).any(1), self.config.text.pad)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        last: LastRows | None = None,
        deep: DeepRows | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, of every row or only of `last.rows`. `x` [rows, hidden] is overwritten;
        `positions` int64 [rows] or [3, rows]; `caches` one per layer; `ids` see `Decoder.forward`."""
        assert self.language is not None, f"role {self.role} loads no language model"
        with torch.inference_mode():
            return self.language.forward(x, positions, caches, last, deep, ids)

    def guess(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, cache: LayerCache, last: LastRows | None
    ) -> Tensor:
        """`MtpLayer.forward`."""
        assert self.mtp is not None, "the model was loaded without its MTP layer"
        with torch.inference_mode():
            return self.mtp.forward(hidden, embedded, positions, cache, last)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        assert self.language is not None, f"role {self.role} loads no language model"
        with torch.inference_mode():
            return self.language.logits(hidden)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → int64 [rows]: `logits(hidden).argmax(-1)`, by a faster operator if there is one."""
        assert self.language is not None, f"role {self.role} loads no language model"
        with torch.inference_mode():
            return self.language.likeliest(hidden)


def cache_specs(
    config: ModelConfig, role: Role, dtype: str, kv_block_tokens: int = 16, embed_block_tokens: int = 64
) -> tuple[CacheSpec, ...]:
    """The specs of the caches that an instance of this role has."""
    text = config.text
    return specs_of(
        role,
        windows=text.cached_windows,
        kv_heads=text.kv_heads,
        local_kv_heads=text.local_kv_heads,
        head_dim=text.head_dim,
        value_dim=text.value_dim,
        embed_width=None if config.vision is None else config.embed_width,
        dtype=dtype,
        kv_block_tokens=kv_block_tokens,
        embed_block_tokens=embed_block_tokens,
        longest_span=config.vision.tokens if config.sees_whole else 0,
        state=None if text.recurrence is None else text.recurrence.state,
        local_head_dim=text.local_head_dim,
        n_own=None if text.n_own == text.layers else text.n_own,
    )


def attentions_of(config: ModelConfig, role: Role, dtype: torch.dtype, block_tokens: int = 16) -> list[PagedAttention]:
    """The attention over each paged cache that an instance of this role has."""
    text, specs = config.text, cache_specs(config, role, str(dtype).removeprefix("torch."), block_tokens)
    embed = for_stage(specs, Stage.ENCODE)
    return [
        PagedAttention(
            cache=spec.name,
            dtype=dtype,
            heads=text.heads,
            kv_heads=text.kv_heads_of(spec.window),
            head_dim=text.head_dims(spec.window)[0],
            value_dim=text.head_dims(spec.window)[1] or text.head_dim,
            scale=text.attention_scale,
            block_tokens=block_tokens,
            window=spec.window,
            sinks=text.has_sinks(spec.layers[0]),
            whole=config.sees_whole_in(spec.window),
            cap=text.attention_cap,
        )
        for spec in specs
        if spec.paged and spec is not embed
    ]
