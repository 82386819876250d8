"""An MTP layer for tiny checkpoints of Qwen3-Next, Qwen3.5 and MiMo-V2-Flash, under its published names, and
transformers' own."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

_NAMES = (  # transformers' names → the published ones
    ("enorm.", "pre_fc_norm_embedding."),
    ("hnorm.", "pre_fc_norm_hidden."),
    ("eh_proj.", "fc."),
    ("post_norm.", "norm."),
    ("mtp_block.", "layers.0."),
)
_MIMO_NAMES = (
    ("post_norm.", "final_layernorm."),
    ("mtp_block.post_attention_layernorm.", "pre_mlp_layernorm."),
    ("mtp_block.", ""),
    ("", ""),
)


def add_mtp(path: Path, seed: int = 1) -> Path:
    """Add the tensors of a random MTP layer to a checkpoint of one file."""
    module = _module(_load(path))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
            weight.copy_(torch.randn(weight.shape, generator=rng) * scale)
        for name, weight in module.named_parameters():
            if "norm" in name and _is_mimo(module):
                weight.add_(1.0)  # others multiply by one plus their weight
    tensors = load_file(path / "model.safetensors")
    for name, value in module.state_dict().items():
        tensors |= _published(name, value, _is_mimo(module))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    return path


class MtpReference:
    """`guesses(ids)`: the logits [ids - 1, vocab] of the token after next, for each pair of tokens that follow each
    other."""

    def __init__(self, path: Path) -> None:
        self.model = _load(path)
        self.module = _module(self.model)
        stored = load_file(path / "model.safetensors")
        wanted = self.module.state_dict()
        self.module.load_state_dict(
            {name: _stored(name, value, stored, _is_mimo(self.module)) for name, value in wanted.items()}
        )

    @torch.inference_mode()
    def guesses(self, ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([ids])
        return self._behind(tokens, self.model.get_input_embeddings()(tokens), torch.arange(len(ids))[None], {})

    @torch.inference_mode()
    def guesses_of(self, inputs: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
        """The same for `ids` that begin with a prompt with pictures, whose `inputs` these are."""
        seen: dict[str, torch.Tensor] = {}
        decoder = self.model.get_decoder()
        hook = decoder.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
        tokens = torch.tensor([ids])
        kinds = torch.zeros_like(tokens)
        kinds[:, : inputs["mm_token_type_ids"].shape[1]] = inputs["mm_token_type_ids"]
        given = {name: value for name, value in inputs.items() if name != "input_ids"} | {"mm_token_type_ids": kinds}
        self.model(tokens, **given)
        hook.remove()
        return self._behind(tokens, seen["inputs_embeds"], seen["position_ids"][-3:], given)

    def _behind(self, tokens, embedded, positions, given) -> torch.Tensor:
        hidden = self.model(tokens, output_hidden_states=True, **given).hidden_states[-1]
        embedded, positions, n = embedded[:, 1:], positions[..., :-1], tokens.shape[1] - 1
        decoder = self.model.get_decoder()
        turns = decoder.rotary_emb(embedded, positions, *["sliding_attention"] * _is_mimo(self.module))
        mask = torch.full((n, n), float("-inf")).triu(1)
        if _is_mimo(self.module):
            behind = torch.ones(n, n).tril(-self.model.config.sliding_window).bool()
            mask = mask.masked_fill(behind, float("-inf"))
        mask = mask[None, None]
        out = self.module(embedded, hidden[:, :-1], turns, mask, positions, None)
        return self.model.lm_head(out)[0].float()


def _load(path: Path):
    sees = "vision_config" in json.loads((path / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def _module(model) -> MtpLayer:
    layers = model.get_decoder().layers
    config, wanted = copy.deepcopy(model.config.get_text_config()), "full_attention"
    if config.model_type == "mimo_v2_flash":
        config.mlp_layer_types, wanted = ["dense"] * len(layers), "sliding_attention"
    like = next(i for i, kind in reversed(list(enumerate(config.layer_types))) if kind == wanted)
    config._attn_implementation = "eager"
    return MtpLayer(config, type(layers[0]), type(layers[0].input_layernorm), like).eval()


def _is_mimo(module: MtpLayer) -> bool:
    return module.config.model_type == "mimo_v2_flash"


def _published(name: str, value: torch.Tensor, mimo: bool) -> dict[str, torch.Tensor]:
    """The tensors of one of the module: experts each have their own."""
    names, prefix = (_MIMO_NAMES, "model.mtp.layers.0.") if mimo else (_NAMES, "mtp.")
    theirs, ours = next(pair for pair in names if name.startswith(pair[0]))
    name = f"{prefix}{ours}{name.removeprefix(theirs)}"
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value.contiguous()}
    prefix, kind = name.rsplit(".", 1)
    parts = zip(("gate_proj", "up_proj"), value.chunk(2, 1)) if kind == "gate_up_proj" else [("down_proj", value)]
    return {
        f"{prefix}.{i}.{part}.weight": matrix.contiguous() for part, of_all in parts for i, matrix in enumerate(of_all)
    }


def _stored(name: str, like: torch.Tensor, stored: dict[str, torch.Tensor], mimo: bool) -> torch.Tensor:
    names = list(_published(name, like, mimo))
    if len(names) == 1:
        return stored[names[0]]
    n = like.shape[0]
    parts = [torch.stack([stored[one] for one in names[i : i + n]]) for i in range(0, len(names), n)]
    return torch.cat(parts, 1)
