"""Fourth stage: an MTP layer learns to guess what the finished model, which stays as it is, says next.

python -m training.builtin.guess RUN --cache CACHE --minutes 25
python -m training.builtin.guess RUN --export        # writes mtp.safetensors beside the model

    step 1   hidden state of token s - 1, embedding of token s           guesses s + 1
    step 2   what step 1 made of them,    embedding of token s + 1       guesses s + 2, as the engine goes on
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from hydrainfer import builtin
from training.builtin.loop import Run, weights
from training.builtin.packing import Batch, Packer
from training.builtin.see import Pictures, vision_rows

BATCH = 16
DEPTH = 3  # guesses in a row that are trained
_WEIGHTS = (1.0, 0.7, 0.5)
_NAMES = {  # transformers' names → those of published checkpoints
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "post_norm.": "norm.",
    "mtp_block.": "layers.0.",
}
_IGNORED = -100


class Guesses(nn.Module):
    """The layer, which starts as a copy of the decoder's last one that looks at the hidden state alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        decoder = model.model.language_model
        config = copy.deepcopy(decoder.config)
        config._attn_implementation = "sdpa"
        layer = MtpLayer(config, LlamaDecoderLayer, LlamaRMSNorm, 0)
        layer.mtp_block.load_state_dict(decoder.layers[-1].state_dict())
        layer.post_norm.load_state_dict(decoder.norm.state_dict())
        with torch.no_grad():
            n = config.hidden_size
            layer.eh_proj.weight.normal_(std=0.02)
            layer.eh_proj.weight[:, n:] += torch.eye(n)
        self.mtp = nn.ModuleDict({"layers": nn.ModuleList([layer])})  # the optimizer takes its matrices by this name

    @property
    def layer(self) -> MtpLayer:
        layers = self.mtp["layers"]
        assert isinstance(layers, nn.ModuleList) and isinstance(layers[0], MtpLayer)
        return layers[0]


class _Known(NamedTuple):
    """What the frozen model makes of a batch: `embedded` and `hidden` [rows, length, hidden]."""

    embedded: Tensor
    hidden: Tensor


def _known(model: Any, rows: Tensor, batch: Batch) -> _Known:
    inner = model.model
    embedded = inner.language_model.embed_tokens(batch.ids)
    here = batch.ids == model.config.image_token_id
    embedded = embedded.masked_scatter(here[..., None], inner.multi_modal_projector(rows).flatten(0, 1))
    hidden = inner.language_model(
        inputs_embeds=embedded, attention_mask=batch.mask(), position_ids=batch.places, use_cache=False
    ).last_hidden_state
    return _Known(embedded, hidden)


def _places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Where guesses are made, int64 [rows, n], filled up with 0, and which of them count: bool [steps, rows, n]. Step
    k guesses the token k + 1 behind its place; that and those between are an answer's."""
    answer = F.pad(batch.labels != _IGNORED, (0, DEPTH + 1))
    n = batch.labels.shape[1]
    inside = torch.stack([answer[:, k : k + n] for k in range(1, DEPTH + 2)])
    counts = inside.cumprod(0)[1:].bool()
    order = counts[0].int().argsort(stable=True, dim=1, descending=True)[:, : int(counts[0].sum(1).max())]
    return order, counts.gather(2, order[None].expand(DEPTH, -1, -1))


def guessing_loss(guesses: Guesses, model: Any, known: _Known, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy to the model's own distributions; for each step the share of guesses that are its likeliest
    token."""
    layer, head, rotary = guesses.layer, model.lm_head, model.model.language_model.rotary_emb
    at, counts = _places(batch)
    n, m = batch.ids.shape[1], at.shape[1]
    row = torch.arange(len(at))[:, None]
    embedded, hidden = known.embedded.roll(-1, 1), known.hidden
    positions, mask = batch.places, batch.mask()
    alone = torch.eye(m, dtype=torch.bool).expand(len(at), 1, -1, -1)
    loss, figures = torch.zeros(()), dict[str, float]()
    for step in range(DEPTH):
        if step:
            own = embedded.shape[1] - n  # rows of steps 2 and on
            ahead = (at + step + 1).clamp(max=n - 1)
            embedded = torch.cat([embedded, known.embedded[row, ahead]], 1)
            hidden = torch.cat([hidden, made], 1)  # noqa: F821 - of the step before
            positions = torch.cat([positions, batch.places[row, at] + step], 1)
            seen = [batch.mask()[row, 0, at][:, None], alone.repeat(1, 1, 1, own // m + 1)]
            mask = torch.cat([F.pad(mask, (0, m)), torch.cat(seen, 3)], 2)
        out = layer(embedded, hidden, rotary(hidden, positions), mask, positions, None)
        made = out[:, -m:] if step else out[row, at]
        here = counts[step]
        logits = head(made[here])
        with torch.no_grad():
            wanted = head(known.hidden[row, (at + step + 1).clamp(max=n - 1)][here])
        loss = loss + _WEIGHTS[step] * F.cross_entropy(logits, wanted.softmax(-1))
        figures[f"right_{step + 1}"] = float((logits.argmax(-1) == wanted.argmax(-1)).float().mean())
    return loss, figures


def export(run: Path, folder: Path) -> None:
    """`mtp.safetensors` in float16 beside the model of `folder`, whose config.json then names it."""
    tensors = {}
    for name, value in weights(run, "guesses").items():
        name = name.removeprefix("mtp.layers.0.")
        theirs = next(start for start in _NAMES if name.startswith(start))
        tensors[f"mtp.{_NAMES[theirs]}{name.removeprefix(theirs)}"] = value.to(torch.float16).contiguous()
    save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    config["text_config"] = dict(sorted(config["text_config"].items()))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model's MTP layer.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, default=builtin.MODEL)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=5, help="Seed of the pictures.")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--export", action="store_true", help="Write what the run has learnt beside the model.")
    a = parser.parse_args()
    if a.export:
        export(a.run, a.model)
        return
    if a.cache is None:
        parser.error("--cache: where pictures are kept")
    torch.manual_seed(a.seed)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(a.model, dtype=torch.float32).eval()
    model.requires_grad_(False)
    packer = Packer(transformers.AutoTokenizer.from_pretrained(a.model))
    guesses, pictures = Guesses(model), Pictures(a.cache, a.pictures, a.shards, BATCH)

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        pixels, _, scenes = pictures.batch(step)
        batch = packer.batch(np.random.default_rng([a.seed, step]), scenes)
        with torch.no_grad():
            known = _known(model, vision_rows(model.model.vision_tower, pixels), batch)
        return guessing_loss(guesses, model, known, batch)

    Run(a.run, {"guesses": guesses}, rate=a.rate, budget_s=a.minutes * 60, threads=a.threads, decay=0.4).go(loss_of)


if __name__ == "__main__":
    main()
