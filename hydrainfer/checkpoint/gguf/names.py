"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, with the changes that llama.cpp's converter
made to each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hydrainfer.checkpoint.gguf.file import GgufFile, GgufTensor

_TEXT = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_VISION = {
    "v.class_embd": "vision_tower.vision_model.embeddings.class_embedding",
    "v.patch_embd.weight": "vision_tower.vision_model.embeddings.patch_embedding.weight",
    "v.position_embd.weight": "vision_tower.vision_model.embeddings.position_embedding.weight",
    **{f"v.pre_ln.{p}": f"vision_tower.vision_model.pre_layrnorm.{p}" for p in ("weight", "bias")},
    **{f"v.post_ln.{p}": f"vision_tower.vision_model.post_layernorm.{p}" for p in ("weight", "bias")},
    **{f"mm.{2 * i}.{p}": f"multi_modal_projector.linear_{i + 1}.{p}" for i in (0, 1) for p in ("weight", "bias")},
}
_VISION_BLOCK = {
    **{f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"},
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SWAPPED = {"ffn_up": "mlp.fc2", "ffn_down": "mlp.fc1"}


class HeldTensor(NamedTuple):
    """A tensor of the file. `heads`: if not 0, the rows of each of that many heads are reordered for llama.cpp's RoPE,
    with the two halves of the head interleaved. `plus`: number to add to the values to restore those of the
    checkpoint."""

    tensor: GgufTensor
    heads: int = 0
    plus: float = 0.0


def tensors_of(file: GgufFile, beside_vision: bool = False) -> dict[str, HeldTensor]:
    """The file's tensors under the names of a Hugging Face checkpoint. Tensors that no model here has keep their own
    names. `beside_vision`: the file is a language model with a separate file of vision weights."""
    if file.architecture == "clip":
        return dict(_vision(file))
    prefix = "language_model." if beside_vision else ""
    return {f"{prefix}{name}": held for name, held in _text(file)}


def _text(file: GgufFile) -> Iterator[tuple[str, HeldTensor]]:
    gemma, turned = file.architecture.startswith("gemma"), file.architecture == "llama"
    block = _GEMMA_BLOCK if gemma else _BLOCK
    heads = {"attn_q": file.field("attention.head_count"), "attn_k": file.field("attention.head_count_kv")}
    for name, tensor in file.tensors.items():
        part, _, last = name.rpartition(".")
        plus = -1.0 if gemma and part.endswith("norm") else 0.0
        if part in _TEXT:
            yield f"{_TEXT[part]}.{last}", HeldTensor(tensor, plus=plus)
            continue
        _, i, inner = (*name.split(".", 2), "", "")[:3]
        inner = inner.rpartition(".")[0]
        if inner not in block:
            yield name, HeldTensor(tensor)
            continue
        n_heads = (heads.get(inner) or heads["attn_q"] or 0) if turned and inner in heads else 0
        yield f"model.layers.{i}.{block[inner]}.{last}", HeldTensor(tensor, n_heads, plus)


def _vision(file: GgufFile) -> Iterator[tuple[str, HeldTensor]]:
    width = file.fields.get("clip.vision.embedding_length")
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    # older converters swapped the two names
    block = _VISION_BLOCK | (_SWAPPED if up is not None and up.shape[0] == width else {})
    for name, tensor in file.tensors.items():
        parts = name.split(".")
        if name in _VISION:
            yield _VISION[name], HeldTensor(tensor)
        elif len(parts) == 5 and parts[:2] == ["v", "blk"] and parts[3] in block:
            whole = f"vision_tower.vision_model.encoder.layers.{parts[2]}.{block[parts[3]]}.{parts[4]}"
            yield whole, HeldTensor(tensor)
        else:
            yield name, HeldTensor(tensor)
