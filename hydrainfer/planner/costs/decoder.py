"""The bytes and FLOPs of a decoder on paper, of any published kind of attention.

`ModelShape` describes a model that HydraInfer serves and the planner simulates. A `DecoderShape` counts, and no more:
no engine, cost model or cache is made from it, and it says nothing about whether a checkpoint can be served.
"""

from __future__ import annotations

import msgspec

from hydrainfer.cache import DTYPE_BYTES
from hydrainfer.planner.costs.attention import AnyAttention, Convolution, Grouped, Linear
from hydrainfer.planner.costs.hardware import Hardware
from hydrainfer.planner.costs.shape import ModelShape


class Layers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal layers. `width`: of the gated MLP that all tokens go through (the shared experts' together); 0 for
    none. `experts`: number of routed experts of `expert_width`, of which each token goes through `chosen`."""

    count: int
    attention: AnyAttention
    width: int = 0
    experts: int = 0
    chosen: int = 0
    expert_width: int = 0


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a decoder, in no particular order. `dtype`: of keys, values and convolutions' states; matrices of
    states are float32. `weight_bytes`: bytes per weight of the layers. `tied`: the head is the token table."""

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layers, ...]
    dtype: str = "bfloat16"
    weight_bytes: float = 2.0
    tied: bool = False

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def n_layers(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def weights(self) -> int:
        """The number of weights of all layers, the head and the token table."""
        tables = 1 if self.tied else 2
        return self._layer_weights + tables * self.vocab * self.hidden

    @property
    def used_weights(self) -> int:
        """The number of weights of all layers that one token is multiplied with."""
        n = 0
        for group in self.layers:
            width = group.width + group.chosen * group.expert_width
            n += group.count * (self._common(group) + 3 * self.hidden * width)
        return n

    def cache_bytes(self, tokens: int) -> int:
        """Bytes that a prompt of `tokens` leaves: keys and values, and states."""
        return sum(group.count * group.attention.cache_bytes(tokens, self.item_bytes) for group in self.layers)

    def attention_flops(self, tokens: int, prefix: int = 0) -> float:
        """FLOPs of `tokens` new tokens after `prefix`, without the products with the weights."""
        return sum(group.count * group.attention.flops(tokens, prefix) for group in self.layers)

    def flops(self, tokens: int, prefix: int = 0) -> float:
        """FLOPs of a prefill of `tokens` new tokens after `prefix`. All tokens pass all layers. The one sampled row is
        not counted."""
        return 2 * tokens * self.used_weights + self.attention_flops(tokens, prefix)

    def read_bytes(self, tokens: int) -> float:
        """Bytes of the layers' weights that a batch of `tokens` reads. Each expert is read with the probability that
        one of the tokens chooses it, if all choose alike."""
        n = 0.0
        for group in self.layers:
            n += group.count * (self._common(group) + 3 * self.hidden * group.width)
            if group.experts:
                share = 1.0 - (1.0 - group.chosen / group.experts) ** tokens
                n += group.count * share * self._expert_weights(group)
        return n * self.weight_bytes

    def prefill_s(self, hardware: Hardware, tokens: int, prefix: int = 0) -> float:
        """Seconds of a prefill by a roofline: the longer of arithmetic and traffic, then two all-reduces per layer
        where a device is a group. Assumes the shares of the peaks that `hardware` assumes, and that any number of
        devices can share a layer."""
        arithmetic_s = self.flops(tokens, prefix) / hardware.language_flops_per_s
        traffic_s = self.read_bytes(tokens) / hardware.traffic_bytes_per_s
        seconds = hardware.step_base_s + max(arithmetic_s, traffic_s)
        if hardware.group == 1:
            return seconds
        summed_bytes = 2.0 * self.n_layers * self.hidden * tokens * self.item_bytes
        return seconds + hardware.added_s(summed_bytes) + 2 * self.n_layers * hardware.sum_s

    def _common(self, group: Layers) -> int:
        """The weights of a layer that all tokens go through, without its MLP: attention and router."""
        return group.attention.weights(self.hidden) + group.experts * self.hidden

    def _expert_weights(self, group: Layers) -> int:
        return 3 * self.hidden * group.experts * group.expert_width

    @property
    def _layer_weights(self) -> int:
        n = 0
        for group in self.layers:
            n += group.count * (self._common(group) + 3 * self.hidden * group.width + self._expert_weights(group))
        return n


def decoder_of(shape: ModelShape) -> DecoderShape:
    """The decoder of a model that HydraInfer serves, without its vision tower and per-layer embeddings."""
    return DecoderShape(
        name=shape.name,
        hidden=shape.hidden,
        vocab=shape.vocab,
        layers=tuple(_layer_of(shape, i) for i in range(shape.layers)),
        dtype=shape.dtype,
        weight_bytes=shape.layer_item_bytes,
        tied=shape.tied,
    )


def _layer_of(shape: ModelShape, i: int) -> Layers:
    e = shape.experts
    attention = _attention_of(shape, i)
    width = shape.mlp_width(i)
    if e is None or not e.layers[i]:
        return Layers(count=1, attention=attention, width=width)
    width = e.shared + (width if e.router == "scaled" else 0)
    return Layers(
        count=1, attention=attention, width=width, experts=e.count, chosen=e.chosen, expert_width=e.intermediate
    )


def _attention_of(shape: ModelShape, i: int) -> AnyAttention:
    r = shape.recurrence
    if r is None or shape.attends(i):
        key_dim, value_dim = shape.head_dims(i)
        return Grouped(
            heads=shape.heads,
            kv_heads=shape.kv_width(i) // (key_dim + value_dim),
            key_dim=key_dim,
            value_dim=value_dim,
            keys_as_values=shape.keys_as_values and not shape.seen[i],
            window=shape.seen[i],
            gate_dim=shape.gate_dim,
        )
    if r.kind == "conv":
        return Convolution(channels=r.channels, width=r.width)
    return Linear(
        key_heads=r.key_heads,
        heads=r.value_heads,
        key_dim=r.key_dim,
        value_dim=r.value_dim,
        decay="head",
        conv_width=r.width,
    )
