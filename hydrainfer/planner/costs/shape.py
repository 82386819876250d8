"""The shape of a model, and its cost model (a roofline) and cache sizes on a described device.

Arithmetic and traffic are those of the paper's Table 2, with three corrections: matrices have their actual sizes (Table
2 assumes H x H for all, and 4 H for the MLP), attention keeps no score matrix in memory, and the keys and values of a
context are read once a step (4BSM in the table is a slip for 4BSH).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from hydrainfer.cache import DTYPE_BYTES, CacheSpec, StateSpec, Wishes, size_caches, specs_of
from hydrainfer.checkpoint import Experts, Recurrence, VisionShape
from hydrainfer.config.schema import Quantization
from hydrainfer.core import ConfigError, CostModel, Role, Stage
from hydrainfer.planner.costs.attention import DELTA_FLOPS
from hydrainfer.planner.costs.hardware import GIB, Hardware

TAKE_TURNS = 1000.0
"""A slowdown so large that two batches in effect take turns."""

_PICTURE_TOKENS = 1024
_USUAL_DECODES, _USUAL_CONTEXT, _USUAL_PICTURES = 64, 1024, 4  # for the interference of the lanes
_GROUPS = (2, 4, 8, 16)  # usual numbers of devices in a group
_ACTIVATIONS = 16  # values moved per row, layer and column of a vision tower: 8 + 4 + 4 of Table 2
Weights = Literal["as-dtype", "fp8", "int8", "int4"]
WEIGHT_BYTES: dict[Weights, float] = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2.5 / 128}
"""Bytes per weight. Weights of 4 bits have a scale of 16 bits and a zero point of 4 bits for each 128 (AWQ, GPTQ)."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder and, if the model accepts pictures, its vision tower.

    `heads`: number of query heads; `head_dim`: of queries, keys and values, except that values have `value_dim` unless
    it is 0. The MLP is gated; `experts`: what some layers have in its place. `context`: longest sequence in tokens.
    `deepstack`: levels of picture features beside the embedding. `windows`: for each layer, how many tokens a token
    attends to, 0 for all; () if no layer has a window. Layers with a window have `local_kv_heads` and `local_head_dim`,
    unless these are 0. `reads`, `shared_intermediate`, `keys_as_values`, `per_layer`, `per_layer_vocab`: as in
    `TextConfig`.
    `recurrence`: describes the layers without attention; `gate_dim`: gates of each head in the layers with attention.
    `sees_whole`: as in `ModelConfig`. `weights`: how the weights of the decoder's layers are stored. Token table, head
    and tower stay in `dtype`, and so does all arithmetic, as kernels unpack weights while they read them.
    `quantization`: that of `hydrainfer serve`; with int8 the layers, the head and a token table tied to the head have 8
    bits.
    """

    name: str
    dtype: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool = False
    deepstack: int = 0
    windows: tuple[int, ...] = ()
    value_dim: int = 0
    local_kv_heads: int = 0
    experts: Experts | None = None
    recurrence: Recurrence | None = None
    gate_dim: int = 0
    vision: VisionShape | None = None
    local_head_dim: int = 0
    reads: tuple[int, ...] = ()
    shared_intermediate: int = 0
    keys_as_values: bool = False
    per_layer: int = 0
    per_layer_vocab: int = 0
    sees_whole: bool = False
    weights: Weights = "as-dtype"
    quantization: Quantization = "none"

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_item_bytes(self) -> float:
        """Bytes per weight of the decoder's layers."""
        return WEIGHT_BYTES.get("int8" if self.quantization == "int8" else self.weights, self.item_bytes)

    @property
    def head_bytes(self) -> float:
        return self.head_weights * (self.item_bytes if self.quantization == "none" else WEIGHT_BYTES["int8"])

    def cache_of(self, layer: int) -> int:
        """The layer whose keys and values this layer attends to."""
        return self.reads[layer] if self.reads else layer

    @property
    def n_own(self) -> int:
        """The number of layers with keys and values of their own, or a state; the others follow behind them."""
        return sum(i == self.cache_of(i) for i in range(self.layers))

    def head_dims(self, layer: int) -> tuple[int, int]:
        """The widths of a layer's query and key heads, and of its value heads."""
        local = self.local_head_dim if self.seen[layer] else 0
        return local or self.head_dim, local or self.value_dim or self.head_dim

    def read_width(self, layer: int) -> int:
        """The number of values in one token's keys and values that this layer reads; 0 in a layer without attention."""
        if not self.attends(layer):
            return 0
        kv_heads = self.local_kv_heads if self.local_kv_heads and self.seen[layer] else self.kv_heads
        return kv_heads * sum(self.head_dims(layer))

    def kv_width(self, layer: int) -> int:
        """`read_width` of a layer with keys and values of its own, else 0."""
        return self.read_width(layer) if self.cache_of(layer) == layer else 0

    def key_weights(self, layer: int) -> int:
        """The number of weights that compute this layer's keys and values."""
        weights, (key_dim, value_dim) = self.kv_width(layer) * self.hidden, self.head_dims(layer)
        alone = self.keys_as_values and not self.seen[layer]
        return weights * key_dim // (key_dim + value_dim) if alone else weights

    def pair_flops(self, layer: int) -> int:
        """FLOPs of a query and a key in this layer."""
        return 2 * self.heads * sum(self.head_dims(layer))

    def layer_weights(self, layer: int, *, used: bool = False) -> int:
        """The number of weights of this layer; `used`: only those that one token is multiplied with."""
        mixed = self.heads * sum(self.head_dims(layer)) * self.hidden  # queries and output
        mixed += self.heads * self.gate_dim * self.hidden + 2 * self.per_layer * self.hidden
        if self.recurrence is not None and not self.attends(layer):
            mixed = self.recurrence.weights(self.hidden)
        e = self.experts
        width = self.mlp_width(layer)
        if e is None or not e.layers[layer]:
            return self.key_weights(layer) + mixed + 3 * self.hidden * width
        if e.router == "scaled":
            mixed += 3 * self.hidden * width
        width = e.shared + (e.chosen if used else e.count) * e.intermediate
        return self.key_weights(layer) + mixed + self.hidden * (e.count + 3 * width)

    def mlp_width(self, layer: int) -> int:
        """The width of the MLP of a layer without experts, or beside them."""
        shared = self.cache_of(layer) != layer
        return (shared and self.shared_intermediate) or self.intermediate

    @property
    def expert_weights(self) -> int:
        """The number of weights of all routed experts in all layers."""
        e = self.experts
        if e is None:
            return 0
        return sum(e.layers) * e.count * 3 * self.hidden * e.intermediate

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def input_weights(self) -> int:
        """The number of weights that make all layers' inputs of hidden states, in models with per-layer embeddings."""
        return self.layers * self.per_layer * self.hidden

    @property
    def table_weights(self) -> int:
        """The number of weights of the table of per-layer embeddings, of which a batch reads only some rows."""
        return self.per_layer_vocab * self.layers * self.per_layer

    @property
    def step_weights(self) -> int:
        """The number of weights of all layers and the head. A language batch reads all of them except experts that are
        not chosen. The token tables are not included, as a batch reads only some of their rows."""
        return sum(map(self.layer_weights, range(self.layers))) + self.input_weights + self.head_weights

    @property
    def step_bytes(self) -> float:
        """Bytes of `step_weights`."""
        return (self.step_weights - self.head_weights) * self.layer_item_bytes + self.head_bytes

    @property
    def expert_bytes(self) -> float:
        return self.expert_weights * self.layer_item_bytes

    @property
    def seen(self) -> tuple[int, ...]:
        """The window of every layer, 0 for none."""
        return self.windows or (0,) * self.layers

    def attends(self, layer: int) -> bool:
        return self.recurrence is None or layer not in self.recurrence.layers

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers without attention."""
        if self.recurrence is None:
            return 0
        return StateSpec.of(self.recurrence.state, self.dtype).block_bytes

    @property
    def scan_flops(self) -> int:
        """FLOPs of one token in the layers without attention, without the products with their weights."""
        if self.recurrence is None:
            return 0
        layers, _, matrix = self.recurrence.state
        if matrix:
            return DELTA_FLOPS * len(layers) * math.prod(matrix)
        return 0

    @property
    def kv_token_bytes(self) -> int:
        """Bytes by which each token grows a request's KV cache, in the layers that keep all tokens."""
        return sum(self.kv_width(i) for i, window in enumerate(self.seen) if not window) * self.item_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of the keys and values in all windows of one request."""
        return sum(self.kv_width(i) * window for i, window in enumerate(self.seen)) * self.item_bytes

    def read_bytes(self, *, windows: bool) -> int:
        """Bytes of keys and values that all layers read: for each token of the context or, with `windows`, in all
        windows."""
        widths = [(self.read_width(i), window) for i, window in enumerate(self.seen)]
        return sum(width * (window if windows else not window) for width, window in widths) * self.item_bytes

    @property
    def embed_width(self) -> int:
        return self.hidden * (1 + self.deepstack)

    def weight_bytes(self, role: Role) -> float:
        """Bytes of the weights that an instance of this role loads, without norms and biases (less than 1 %)."""
        n = 0.0
        if self.vision is not None and role.runs(Stage.ENCODE):
            n += (self.vision.weights + self.vision.table_weights) * self.item_bytes
        if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
            n += self.step_bytes + (0 if self.tied else self.head_weights) * self.item_bytes
            n += self.table_weights * self.item_bytes
        return n


def cost_of(shape: ModelShape, hardware: Hardware) -> CostModel:
    """The roofline of every stage, with the shares of the peaks and the overheads that `hardware` assumes.

    A prefilled token passes all layers, but in the last one with a cache of its own only its keys and values are
    computed, and nothing behind it; the one sampled row of a prompt is not counted. Half of a prompt's query-key pairs
    are masked, and kernels skip them. (Chunks after the first have fewer masked pairs, so up to half of their attention
    is not counted, which is 1 to 3 % of a 7B model's chunk.) A window counts as full even where the context is shorter.
    Raises `ConfigError` if the heads cannot be divided over a group.
    """
    _check_group(shape, hardware)
    bytes_per_s = hardware.traffic_bytes_per_s
    flops_per_s = hardware.language_flops_per_s
    used = [shape.layer_weights(i, used=True) for i in range(shape.layers)]
    last = shape.n_own - 1
    prefill_weights = sum(used[:last]) + shape.key_weights(last) + shape.input_weights
    seen = [(shape.pair_flops(i), window) for i, window in enumerate(shape.seen) if shape.attends(i)]
    before = [(shape.pair_flops(i), window) for i, window in enumerate(shape.seen[:last]) if shape.attends(i)]
    e = shape.experts
    cost = CostModel(
        encode_base_s=hardware.encode_base_s if shape.vision else 0.0,
        encode_image_s=0.0,
        step_base_s=hardware.step_base_s,
        prefill_token_s=(2 * prefill_weights + shape.scan_flops + _in_windows(before)) / flops_per_s,
        prefill_attention_s=_in_full(before) / 2 / flops_per_s,
        decode_token_s=(
            2 * (sum(used) + shape.input_weights + shape.head_weights) + shape.scan_flops + _in_windows(seen)
        )
        / flops_per_s,
        decode_context_s=_in_full(seen) / flops_per_s,
        weights_s=(shape.step_bytes - shape.expert_bytes) / bytes_per_s,
        experts_s=shape.expert_bytes / bytes_per_s,
        expert_share=0.0 if e is None else e.chosen / e.count,
        context_s=shape.read_bytes(windows=False) / bytes_per_s,
        sequence_s=(shape.read_bytes(windows=True) + 2 * shape.state_bytes) / bytes_per_s,
    )
    v = shape.vision
    if v is None:
        return _of_group(cost if hardware.hides_traffic else _added_up(cost), shape, hardware)
    vision_flops_per_s = hardware.vision_flops_per_s
    attention = 4 * v.hidden  # FLOPs per pair of rows in one layer
    full_layers = v.full_layers if v.window_rows else v.layers
    windowed = attention * (v.layers - full_layers) * v.window_rows * v.rows_per_token
    cost = msgspec.structs.replace(
        cost,
        encode_token_s=(2 * (v.row_weights * v.rows_per_token + v.token_weights) + windowed) / vision_flops_per_s,
        encode_attention_s=attention * full_layers * v.rows_per_token**2 / vision_flops_per_s,
        encode_weights_s=v.weights * shape.item_bytes / bytes_per_s,
    )
    slowdown = slowdown_of(together(shape, hardware, cost))
    cost = msgspec.structs.replace(
        cost if hardware.hides_traffic else _added_up(cost),
        overlap_slowdown=slowdown,
        prefill_overlap_slowdown=TAKE_TURNS,  # both are bound by arithmetic
    )
    return _of_group(cost, shape, hardware)


def _in_windows(layers: list[tuple[int, int]]) -> int:
    """FLOPs of one token with its windows, in layers by (FLOPs of a pair, window)."""
    return sum(flops * window for flops, window in layers)


def _in_full(layers: list[tuple[int, int]]) -> int:
    """FLOPs of a pair in all layers without a window."""
    return sum(flops for flops, window in layers if not window)


def _check_group(shape: ModelShape, hardware: Hardware) -> None:
    """Raises `ConfigError` unless the devices of a group can each have an equal number of whole heads."""
    n = hardware.group
    heads = _heads(shape)
    if any(each % n for each in heads):
        most = math.gcd(*heads)
        raise ConfigError(
            f"{shape.name} has {shape.heads} heads, {min(heads)} of them with keys and values: they cannot be divided "
            f"over {n} devices; --tensor-parallel has to divide {most}",
            param="tensor_parallel",
        )


def _heads(shape: ModelShape) -> tuple[int, ...]:
    """The numbers of heads that are divided evenly over the devices of a group."""
    return shape.heads, shape.kv_heads, shape.local_kv_heads or shape.kv_heads


def _of_group(cost: CostModel, shape: ModelShape, hardware: Hardware) -> CostModel:
    """The cost model with a group's all-reduces added, two in each layer: after attention and after the MLP
    (Megatron-LM, Shoeybi et al. 2019). Nothing overlaps with them."""
    if hardware.group == 1:
        return cost
    token_s = hardware.added_s(2.0 * shape.layers * shape.hidden * shape.item_bytes)
    more = {
        "step_base_s": cost.step_base_s + 2 * shape.layers * hardware.sum_s,
        "prefill_token_s": cost.prefill_token_s + token_s,
        "decode_token_s": cost.decode_token_s + token_s,
    }
    if (v := shape.vision) is not None:
        rows_s = hardware.added_s(2.0 * v.layers * v.hidden * v.rows_per_token * shape.item_bytes)
        more["encode_base_s"] = cost.encode_base_s + 2 * v.layers * hardware.sum_s
        more["encode_token_s"] = cost.encode_token_s + rows_s
    return msgspec.structs.replace(cost, **more)


def _added_up(cost: CostModel) -> CostModel:
    """The cost model without overlap of arithmetic and traffic: weights are read before a batch's arithmetic, contexts
    before each decode's. (A chunk reads the context before it within attention, which is bound by arithmetic.) Each
    decode is assumed to read experts of its own. That a chunk reads nearly all experts is left out."""
    return msgspec.structs.replace(
        cost,
        encode_base_s=cost.encode_base_s + cost.encode_weights_s,
        encode_weights_s=0.0,
        step_base_s=cost.step_base_s + cost.weights_s,
        decode_token_s=cost.decode_token_s + cost.sequence_s + cost.experts_read_s(1),
        decode_context_s=cost.decode_context_s + cost.context_s,
        weights_s=0.0,
        experts_s=0.0,
        context_s=0.0,
        sequence_s=0.0,
    )


def together(shape: ModelShape, hardware: Hardware, cost: CostModel) -> float:
    """The combined speed of encode and decode side by side, relative to running alone: 1 means taking turns, 2 no
    interference.

    Encode is bound by arithmetic and uses a share m of the bandwidth; decode is bound by memory and uses a share c of
    the arithmetic (64 sequences of 1024 tokens, 4 pictures of usual size). If both are slowed to 1/x of their speeds,
    both resources suffice for x = max(1 + c, 1 + m). The assumed gain is the share `lane_efficiency` of the possible
    gain 2/x - 1.
    """
    v = shape.vision
    assert v is not None
    n_tokens = min(v.picture_tokens, _PICTURE_TOKENS)
    encode_s = cost.encode_s([n_tokens] * _USUAL_PICTURES) - cost.encode_base_s
    rows = _USUAL_PICTURES * n_tokens * v.rows_per_token
    moved = (v.weights + _ACTIVATIONS * rows * v.hidden * v.layers) * shape.item_bytes
    memory = min(1.0, moved / hardware.traffic_bytes_per_s / encode_s)
    n_contexts = _USUAL_DECODES * _USUAL_CONTEXT
    read_s = cost.weights_s + cost.experts_read_s(_USUAL_DECODES)
    traffic_s = read_s + cost.context_s * n_contexts + cost.sequence_s * _USUAL_DECODES
    arithmetic_s = cost.decode_token_s * _USUAL_DECODES + cost.decode_context_s * n_contexts
    arithmetic = min(1.0, arithmetic_s / traffic_s)
    gain = 2.0 / (1.0 + max(memory, arithmetic)) - 1.0
    return 1.0 + gain * hardware.lane_efficiency


def slowdown_of(speed: float) -> float:
    """The slowdown of the second of two batches side by side, given their combined `speed`: speed = 1 + 1 /
    slowdown."""
    if speed > 1.0:
        return min(TAKE_TURNS, max(1.0, 1.0 / (speed - 1.0)))
    return TAKE_TURNS


def blocks_of(shape: ModelShape, hardware: Hardware, role: Role) -> dict[CacheSpec, int]:
    """The number of blocks per cache of an instance that has a device to itself, by the rules of `hydrainfer serve`:
    the image cache holds 64 pictures, the KV cache gets the rest. Raises `ConfigError` with the missing memory if it
    does not fit."""
    weights = shape.weight_bytes(role)
    left = hardware.memory_bytes * hardware.memory_share - hardware.workspace_bytes - weights
    specs = specs_of(
        role,
        windows=shape.seen,
        kv_heads=shape.kv_heads,
        local_kv_heads=shape.local_kv_heads or shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim or shape.head_dim,
        embed_width=None if shape.vision is None else shape.embed_width,
        dtype=shape.dtype,
        longest_span=shape.vision.picture_tokens if shape.vision is not None and shape.sees_whole else 0,
        state=None if shape.recurrence is None else shape.recurrence.state,
        local_head_dim=shape.local_head_dim,
        n_own=shape.n_own,
    )
    wishes = Wishes(0 if shape.vision is None else shape.vision.picture_tokens, 0, None, shape.context)
    sizes = size_caches(specs, wishes, left)
    left -= sum(s.block_bytes * n for s, n in sizes.items() if not s.takes_the_rest)
    least = sum(s.block_bytes * s.least(wishes) for s in specs if s.takes_the_rest)
    if left < least:
        each = (hardware.memory_bytes * hardware.memory_share - hardware.workspace_bytes) / hardware.group
        able = (n for n in _GROUPS if not any(heads % n for heads in _heads(shape)))
        enough = next((n for n in able if (n - hardware.group) * each >= least - left), None)
        raise ConfigError(
            f"{shape.name} as {role} does not fit {hardware.name}: {weights / GIB:.1f} GiB of weights, "
            f"{hardware.workspace_bytes / GIB:.1f} GiB to work in and the caches want {(least - left) / GIB:.1f} GiB "
            f"more than {hardware.memory_share:.0%} of {hardware.memory_bytes / GIB:.1f} GiB"
            + (f"; --tensor-parallel {enough} holds it" if enough is not None and hardware.lane_efficiency else "")
        )
    return sizes
