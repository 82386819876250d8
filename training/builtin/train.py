"""Second stage: the whole model learns to answer.

python -m training.builtin.train RUN --cache CACHE --see SEE_RUN --minutes 70
python -m training.builtin.train RUN2 --cache CACHE2 --go-on RUN --minutes 50     # from there, with a fresh schedule
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.builtin import tokenizer as own
from training.builtin.loop import Run, processes, weights
from training.builtin.model import Heads, build
from training.builtin.packing import Batch, Packer
from training.builtin.pictures import GRID
from training.builtin.scene import COLOURS, KINDS
from training.builtin.see import Pictures, seeing_loss, vision_rows

BATCH = 16
_SHOWN = ("shapes_right", "digits_right", "many", "place")
DIGITS = 12  # more pictures that only the tower learns from: it is what reads digits, from few writers
SEEING, NAMING = 0.3, 0.3  # weights of the first stage's loss and of `naming_loss`


def blank(tokenizer: Any) -> Any:
    """The untrained model for this tokenizer."""
    return build(len(tokenizer), tokenizer.convert_tokens_to_ids("<image>"), tokenizer.pad_token_id)


def naming_loss(model: Any, tokenizer: Any, rows: Tensor, marks: Tensor) -> Tensor:
    """Embeddings of patches should resemble those of the words for what is there: a question about "red" then finds
    the red patches without first having to learn a second vocabulary."""
    table, loss = model.get_input_embeddings().weight, torch.zeros(())
    covered = marks[..., 0] > 0
    seen = F.normalize(model.model.multi_modal_projector(rows)[covered], dim=-1)
    kind, colour = (marks[..., i][covered] - 1 for i in (0, 1))
    column, row = _thirds(marks)[covered].unbind(-1)
    for names, wanted in (
        ((*KINDS, *map(str, range(10))), kind),
        (COLOURS, colour),
        (("left", "centre", "right"), column),
        (("top", "centre", "bottom"), row),
    ):
        if (wanted >= 0).any():
            ids = tokenizer.convert_tokens_to_ids([f"▁{name}" for name in names])
            alike = seen @ F.normalize(table[ids], dim=-1).T
            loss = loss + F.cross_entropy(10 * alike, wanted, ignore_index=-1)
    return loss


def _thirds(marks: Tensor) -> Tensor:
    """In which column and row of three is the centre of what covers each patch: int64 [n, patches, 2]."""
    at = torch.arange(GRID * GRID)
    own = torch.stack([at % GRID, at // GRID], -1) + 0.5
    return ((own / GRID + (marks[..., -3:-1] - 128) / 127) * 3).long().clamp(0, 2)


def hidden_rows(model: Any, rows: Tensor, batch: Batch) -> Tensor:
    """Last hidden states [rows, length, hidden], with the picture's `rows` of the vision tower put in its places."""
    inner = model.model
    embedded = inner.language_model.embed_tokens(batch.ids)
    here = batch.ids == model.config.image_token_id
    embedded = embedded.masked_scatter(here[..., None], inner.multi_modal_projector(rows).flatten(0, 1))
    return inner.language_model(
        inputs_embeds=embedded, attention_mask=batch.mask(), position_ids=batch.places, use_cache=False
    ).last_hidden_state


def answering_loss(model: Any, rows: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Mean cross-entropy of answer tokens, and per kind of question the share of answers right in every token."""
    hidden = hidden_rows(model, rows, batch)
    wanted = batch.labels[:, 1:]
    asked = wanted != -100
    logits = model.lm_head(hidden[:, :-1][asked])
    loss = F.cross_entropy(logits, wanted[asked])
    right = torch.ones_like(wanted, dtype=torch.bool)
    right[asked] = logits.argmax(-1) == wanted[asked]
    scores = defaultdict(list)
    for row, a, b, kind in batch.answers:
        scores[kind].append(bool(right[row, a - 1 : b - 1].all()))
    return loss, {"answers": float(loss.detach())} | {k: float(np.mean(v)) for k, v in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--see", type=Path, help="Finished run of the first stage.")
    start.add_argument("--go-on", type=Path, help="Finished run of this stage: its weights, with a fresh schedule.")
    parser.add_argument("--minutes", type=float, default=70)
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--first-shard", type=int, default=0, help="Where to start among them.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=1, help="Seed of the pictures.")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.18, help="Share of the time in which the rate goes to zero.")
    a = parser.parse_args()
    torch.manual_seed(a.seed)
    rank, n_processes = processes()
    tokenizer = own.of(a.go_on or a.run)
    model, heads, packer = blank(tokenizer), Heads(), Packer(tokenizer)
    tower = model.model.vision_tower
    if a.see:
        tower.load_state_dict(weights(a.see, "tower"))
        heads.load_state_dict(weights(a.see, "heads"))
    else:
        model.load_state_dict(weights(a.go_on, "model"))
        heads.load_state_dict(weights(a.go_on, "heads"), strict=False)  # older runs have fewer heads
    if not rank:
        own.keep(tokenizer, a.run)
    pictures = Pictures(a.cache, a.pictures, a.shards, BATCH)
    offset = a.first_shard * pictures.per_shard

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        pixels, marks, scenes = pictures.batch(step + offset)
        more = pictures.digits(step + offset, DIGITS)
        rows = vision_rows(tower, torch.cat([pixels, more[0]]))
        seeing, seen = seeing_loss(heads, rows, torch.cat([marks, more[1]]), [*scenes, *more[2]])
        rows = rows[:BATCH]
        batch = packer.batch(np.random.default_rng([a.seed, step * n_processes + rank]), scenes)
        answering, scores = answering_loss(model, rows, batch)
        naming = naming_loss(model, tokenizer, rows, marks)
        figures = {"seeing": float(seeing.detach()), "naming": float(naming.detach()), **scores}
        return answering + SEEING * seeing + NAMING * naming, figures | {k: seen[k] for k in _SHOWN if k in seen}

    slow: list[nn.Module] = [tower, heads] if a.see else []
    run = Run(
        a.run,
        {"model": model, "heads": heads},
        rate=a.rate,
        budget_s=a.minutes * 60,
        threads=a.threads,
        decay=a.decay,
        slow=slow,
    )
    run.go(loss_of)


if __name__ == "__main__":
    main()
