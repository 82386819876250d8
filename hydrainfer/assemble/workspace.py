"""The GPU memory that an instance needs beside its weights and caches."""

from __future__ import annotations

from typing import NamedTuple

from hydrainfer.cache import DTYPE_BYTES
from hydrainfer.checkpoint import ModelConfig, TextConfig
from hydrainfer.core import Lane, Role
from hydrainfer.models import DTYPES, PassSize, attentions_of, tower_of
from hydrainfer.ops import WORKSPACE_BYTES
from hydrainfer.runtime import DRAWN_TOGETHER, ROWS

_LEAST = 1 << 30
_MODULES = 320 << 20  # kernels of torch, cuBLAS and FlashInfer, loaded when they are first called
_CUBLAS = 32 << 20  # for each stream that multiplies
_PLAN = 8 << 20  # FlashInfer's, for each wrapper
_EAGER_WRAPPERS = 4  # decodes, chunks, pictures that are seen whole, and the rows that sample
_LOGIT_BYTES = 17  # per logit: as it was and as it is altered, a copy, its log-probability, a comparison
_DRAWN_BYTES = 20  # and more, while rows are filtered: scaled, its bits, its weight; sums are in float64
_FLOAT = 4


class Rows(NamedTuple):
    """The most rows of a language batch, those of them that sample a token, the longest context, and the most
    embeddings of a vision batch."""

    batch: int
    sampled: int
    n_context: int
    embeddings: int


def workspace_bytes(model: ModelConfig, role: Role, dtype: str, rows: Rows, block_tokens: int = 16) -> int:
    """The bytes to keep free beside weights and caches, at least 1 GiB.

    With e bytes for each number, the sum of

    - language: rows · (hidden · (5 e + 12) + 3 · layers · width of per-layer embeddings · e + the widest of the MLP,
      3 · intermediate · e; attention, 4 · query width · (e + 4); experts, chosen · ((2 · hidden + 3 · their
      intermediate) · e + 4 · hidden); recurrent layers, channels · (3 e + 12)), and vocabulary · (sampled rows · 17 +
      rows that are drawn together, at most 64, · 20)
    - vision: patches of the largest pass · (hidden · (3 e + 8) + the widest of the MLP, 3 · intermediate · e, and
      attention, hidden · 6 e, or hidden · (6 e + 24) where queries and keys are rotated in float32), and embeddings of
      a batch · their width · e
    - graphs: the same once more for the rows of the largest graph of each lane, and the block tables of all
    - libraries: FlashInfer's workspace, and 8 MiB for each of its wrappers, of which every paged cache has some; 32 MiB
      of cuBLAS for each lane and the default stream; 320 MiB of loaded kernels

    and an eighth of it, because freed pieces are not always of the sizes that are asked for next. Some things take
    more: attention without FlashInfer, which copies the pages of a batch, and a single picture of more patches than
    passes have. A batch for which there is no memory fails alone.
    """
    e, total = DTYPE_BYTES[dtype], _MODULES + (1 + len(role.lanes)) * _CUBLAS
    if Lane.LANGUAGE in role.lanes:
        total += (rows.batch + ROWS[-1]) * _row_bytes(model.text, e) + model.text.vocab * _sampled_bytes(rows.sampled)
        tables = sum(ROWS) * -(-rows.n_context // block_tokens) * 4
        n_caches = len(attentions_of(model, role, DTYPES[dtype], block_tokens))
        total += WORKSPACE_BYTES + n_caches * (tables + (len(ROWS) + _EAGER_WRAPPERS) * _PLAN)
    if Lane.VISION in role.lanes and model.vision is not None:
        passes = tower_of(model).pass_size(model.vision)
        total += (passes.rows + passes.captured_rows) * _patch_bytes(passes, e)
        total += rows.embeddings * model.embed_width * e
    return max(_LEAST, total + total // 8)


def _sampled_bytes(n: int) -> int:
    """The bytes that sampling from `n` rows takes per token of the vocabulary."""
    return n * _LOGIT_BYTES + min(n, DRAWN_TOGETHER) * _DRAWN_BYTES


def _row_bytes(text: TextConfig, e: int) -> int:
    """The bytes of a language batch per row."""
    hidden, experts = text.hidden, text.experts
    mlp = max(text.intermediate, text.shared_intermediate)
    widest = [3 * mlp * e, 4 * text.heads * max(text.head_dim, text.value_dim) * (e + _FLOAT)]
    if experts is not None:
        each = (2 * hidden + 3 * experts.intermediate) * e + hidden * _FLOAT
        widest.append(experts.chosen * each + 3 * experts.shared * e)
    if text.recurrence is not None:
        widest.append(text.recurrence.channels * (3 * e + 3 * _FLOAT))
    per_layer = 3 * text.layers * text.per_layer * e
    return hidden * (5 * e + 3 * _FLOAT) + per_layer + max(widest)


def _patch_bytes(size: PassSize, e: int) -> int:
    """The bytes of a pass of the vision tower per patch."""
    attention = size.hidden * (6 * e + (6 * _FLOAT if size.rotates else 0))
    return size.hidden * (3 * e + 2 * _FLOAT) + max(3 * size.inner * e, attention)
