"""Makes the two GGUF files that llama.cpp serves LLaVA-1.5 from, text.gguf and vision.gguf.

    python benchmarks/peers/llava_to_gguf.py CHECKPOINT OUT --weights f32

llama.cpp's own converter takes no CLIP tower for this architecture, and its older script always writes the projector in
16 bits. Norms and biases stay in float32. Byte tokens become plain text: random weights produce bytes that are no
UTF-8, on which llama-server ends a request with an error.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType as File
from gguf.quants import quantize
from safetensors import safe_open

TYPES = {
    "f32": (Type.F32, File.ALL_F32),
    "f16": (Type.F16, File.MOSTLY_F16),
    "bf16": (Type.BF16, File.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, File.MOSTLY_Q8_0),
}
# A space before the first word, as the checkpoint's tokenizer puts there; a line break behind a picture's mark
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ ' USER: ' + m['content'].replace('__>', '__>\\n') + ' ' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'ASSISTANT: ' + m['content'] + ' ' }}{% else %}{{ m['content'] + ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
TEXT_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VISION_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def tensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as stored:
            found |= {name: stored.get_tensor(name).astype(np.float32) for name in stored.keys()}  # noqa: SIM118
    return found


class Writer(gguf.GGUFWriter):
    """`weights`: the type of all matrices."""

    def __init__(self, path: pathlib.Path, architecture: str, name: str, weights: str) -> None:
        super().__init__(path, architecture)
        self._type, file_type = TYPES[weights]
        self.add_name(name)
        self.add_file_type(file_type)

    def put(self, name: str, values: np.ndarray, kind: Type | None = None) -> None:
        kind = Type.F32 if values.ndim == 1 else kind or self._type
        values = np.ascontiguousarray(values)
        if kind == Type.F32:
            self.add_tensor(name, values)
        else:
            self.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    def finish(self) -> None:
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()


def add_vocabulary(writer: Writer, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """The checkpoint's tokenizer merges by rank, llama.cpp by score; ids are in the order of ranks."""
    n = config["vocab_size"]
    tokens, scores, types = [f"[PAD{i}]".encode() for i in range(n)], [-1e6] * n, [gguf.TokenType.UNUSED] * n
    for text, i in tokenizer["model"]["vocab"].items():
        tokens[i], scores[i], types[i] = text.encode(), -float(i), gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.UNKNOWN if added["content"] == "<unk>" else gguf.TokenType.CONTROL
        i = added["id"]
        tokens[i], scores[i], types[i] = added["content"].encode(), -1e6, kind
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows: Hugging Face pairs those that lie half a head apart, llama.cpp neighbours."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_text(writer: Writer, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, values in tensors.items():
        if "vision_tower" in name or "multi_modal_projector" in name:
            continue
        if name.endswith("embed_tokens.weight"):
            writer.put("token_embd.weight", values)
        elif name.endswith("lm_head.weight"):
            writer.put("output.weight", values)
        elif found := re.search(r"layers\.(\d+)\.(.+)\.weight$", name):
            ours = TEXT_NAMES[found[2]]
            if ours in ("attn_q", "attn_k"):
                values = interleaved(values, heads if ours == "attn_q" else kv_heads)
            writer.put(f"blk.{found[1]}.{ours}.weight", values)
        else:
            assert name.endswith("norm.weight"), name
            writer.put("output_norm.weight", values)
    writer.finish()


def write_vision(
    writer: Writer, config: dict[str, Any], preprocessing: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """Layers up to the one whose output is used."""
    vision, layer = config["vision_config"], config["vision_feature_layer"]
    n_layers = layer if layer >= 0 else vision["num_hidden_layers"] + layer + 1
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_string("clip.projector_type", "mlp")
    sizes = {
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "projection_dim": config["text_config"]["hidden_size"],
        "attention.head_count": vision["num_attention_heads"],
        "block_count": n_layers,
    }
    for name, value in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
    writer.add_array("clip.vision.feature_layer", [n_layers])
    writer.add_array("clip.vision.image_mean", preprocessing["image_mean"])
    writer.add_array("clip.vision.image_std", preprocessing["image_std"])
    writer.add_bool("clip.use_gelu", vision["hidden_act"] == "gelu")
    for name, values in tensors.items():
        if found := re.search(r"multi_modal_projector\.linear_(\d)\.(weight|bias)$", name):
            writer.put(f"mm.{(int(found[1]) - 1) * 2}.{found[2]}", values)
        elif "vision_tower" in name and "post_layernorm" not in name:
            put_of_tower(writer, name, values, n_layers)
    writer.finish()


def put_of_tower(writer: Writer, name: str, values: np.ndarray, n_layers: int) -> None:
    if name.endswith("class_embedding"):
        writer.put("v.class_embd", values)
    elif name.endswith("patch_embedding.weight"):  # the convolution takes these two types
        writer.put("v.patch_embd.weight", values, None if writer._type == Type.F32 else Type.F16)
    elif name.endswith("position_embedding.weight"):
        writer.put("v.position_embd.weight", values, Type.F32)
    elif found := re.search(r"pre_layr?norm\.(weight|bias)$", name):
        writer.put(f"v.pre_ln.{found[1]}", values)
    else:
        found = re.search(r"layers\.(\d+)\.(.+)\.(weight|bias)$", name)
        assert found is not None, name
        if int(found[1]) < n_layers:
            writer.put(f"v.blk.{found[1]}.{VISION_NAMES[found[2]]}.{found[3]}", values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--weights", choices=TYPES, default="f32")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config, preprocessing, tokenizer = (
        json.loads((args.checkpoint / f"{name}.json").read_text())
        for name in ("config", "preprocessor_config", "tokenizer")
    )
    tensors, name = tensors_of(args.checkpoint), args.checkpoint.name
    writer = Writer(args.out / "text.gguf", "llama", name, args.weights)
    add_vocabulary(writer, config["text_config"], tokenizer)
    write_text(writer, config["text_config"], tensors)
    write_vision(Writer(args.out / "vision.gguf", "clip", name, args.weights), config, preprocessing, tensors)


if __name__ == "__main__":
    main()
