"""The architecture, as transformers builds it: a LLaVA-1.5 of three million parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn

from training.builtin.pictures import GRID, PATCH, SIDE
from training.builtin.scene import COLOURS, KINDS, MOST

CONTEXT = 512
SEEN = 128  # width of the vision tower
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
N_PATCHES = GRID * GRID
_SHARP = 2.0
_SIDES, _CORNERS = ((0, -1), (0, 1), (-1, 0), (1, 0)), ((-1, -1), (-1, 1), (1, -1), (1, 1))
_POSITIONS = "embeddings.position_embedding.weight"


def config(vocab: int, image_token: int, pad: int) -> transformers.LlavaConfig:
    vision = transformers.CLIPVisionConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=SEEN,
        intermediate_size=4 * SEEN,
        num_hidden_layers=6,
        num_attention_heads=4,
        projection_dim=SEEN,
    )
    text = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.07,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=pad,
        tie_word_embeddings=False,
    )
    return transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=N_PATCHES,
        tie_word_embeddings=False,
    )


def build(vocab: int, image_token: int, pad: int) -> transformers.LlavaForConditionalGeneration:
    model = transformers.LlavaForConditionalGeneration(config(vocab, image_token, pad)).float()
    table = model.model.vision_tower.get_parameter(_POSITIONS)
    with torch.no_grad():
        table[1:] = 0.6 * _waves(table.shape[1])
        for i, layer in enumerate(model.model.vision_tower.encoder.layers[:4]):
            _look_beside(layer.self_attn, _CORNERS if i % 2 else _SIDES)
    return model


def _look_beside(attention: nn.Module, offsets: Sequence[tuple[int, int]]) -> None:
    """Let each head start by looking at the patch (rows, columns) away: the sines and cosines of the place, turned by
    that much. A tower that starts like a convolution learns from far fewer pictures (compare Zheng et al., "Structured
    initialization for vision transformers")."""
    d, n = attention.embed_dim, attention.num_heads
    pairs = d // n // 4  # (sine, cosine) pairs of each axis that fit into a head
    chosen = torch.linspace(0, d // 4 - 1, pairs).round().long()
    rates = _rates(d)[chosen]
    q, k = 0.02 * torch.randn(2, d, d)
    for head, offset in enumerate(offsets):
        for axis in (0, 1):
            turn = rates * offset[axis]
            sines, cosines = axis * d // 2 + chosen, axis * d // 2 + d // 4 + chosen
            at = head * d // n + axis * 2 * pairs + torch.arange(pairs)
            for row, column, share in (
                (at, sines, turn.cos()),
                (at, cosines, turn.sin()),
                (at + pairs, sines, -turn.sin()),
                (at + pairs, cosines, turn.cos()),
            ):
                q[row, column] += _SHARP * share
            k[at, sines] += _SHARP
            k[at + pairs, cosines] += _SHARP
    attention.q_proj.weight.copy_(q)
    attention.k_proj.weight.copy_(k)


def _rates(width: int) -> Tensor:
    """Radians per patch [width / 4]: neighbours are told apart, but alike."""
    return 2.6 * (torch.arange(width // 4) + 0.5) / (width // 4)


def _waves(width: int) -> Tensor:
    """[patches, width]: sines and cosines of row and column. A tower that starts with these learns places much sooner
    than from small noise (Beyer et al., "Better plain ViT baselines for ImageNet-1k")."""
    rates = _rates(width)
    angles = torch.arange(GRID)[:, None] * rates  # [side, width / 4]
    line = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = line[:, None].expand(-1, GRID, -1), line[None].expand(GRID, -1, -1)
    return torch.cat([rows, columns], 2).flatten(0, 1)


def normalise(pixels: Tensor) -> Tensor:
    """uint8 [n, side, side, 3] → float [n, 3, side, side], as preprocessor_config.json says."""
    scaled = (pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return scaled.permute(0, 3, 1, 2)


class Heads(nn.Module):
    """What the vision tower is first taught to see, and discarded after: per patch what `pictures.marks` says; for the
    whole picture its sort and digit."""

    def __init__(self, hidden: int = SEEN) -> None:
        super().__init__()
        self.kind = nn.Linear(hidden, len(KINDS) + 11)
        self.colour = nn.Linear(hidden, len(COLOURS) + 1)
        self.centre = nn.Linear(hidden, 2)
        self.mask = nn.Linear(hidden, (PATCH // 2) ** 2)
        self.way = nn.Linear(hidden, 3)
        self.place = nn.Linear(hidden, 2)
        self.many = nn.Linear(hidden, 4 * MOST)
        self.whole = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 13))

    def whole_of(self, rows: Tensor) -> Tensor:
        """[n, 13]: digit 0-9, shapes, photo, empty."""
        return self.whole(rows.mean(1))
