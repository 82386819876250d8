"""The gated delta rule in matrix form: products over chunks of rows instead of one row after the other.

Within a chunk that begins with the state S, let G_t be the sum of the decays up to row t, and A the lower triangle of
exp(G_t - G_j) beta_t (k_t . k_j), j < t. The updates u of its rows solve (1 + A) u = beta v - beta exp(G) k S, so that
u = U - W S, where U and W need no state. Only a few small products per chunk remain sequential. Yang et al., "Gated
Delta Networks" (2024), section 3.3.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.ops import reference
from hydrainfer.ops.scan import ScanBatch

_CHUNK = 64


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    batch: ScanBatch,
) -> Tensor:
    """`reference.delta_rule` in matrix form. Requests of one row are left to the reference."""
    out, n = torch.empty(v.shape, device=v.device), batch.n_decodes
    if n:
        decodes = replace(batch, pieces=())
        out[:n] = reference.delta_rule(q[:n], k[:n], v[:n], decay[:n], beta[:n], states, decodes)
    for rows, source, target in batch.pieces:
        state = states[source] if source >= 0 else torch.zeros_like(states[target])
        out[rows], states[target] = _in_chunks(q[rows], k[rows], v[rows], decay[rows], beta[rows], state)
    return out


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The output rows of one request [rows, heads, dim], and the state [heads, key_dim, dim] after them."""
    n, heads = v.shape[:2]
    size = min(_CHUNK, n)
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    padded = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, -n % size)) for x in (q, k, v, decay, beta)]  # no effect: beta is 0
    q, k, v, decay, beta = (x.unflatten(0, (-1, size)).movedim(2, 0) for x in padded)  # [heads, chunks, size, ...]
    summed = decay.cumsum(-1)
    fall = (summed[..., :, None] - summed[..., None, :]).tril().exp().tril()  # [.., t, j]: decay from row j to row t
    weighted = k * beta[..., None]
    triangle = (weighted @ k.mT * fall).tril(-1)
    right = torch.cat([v * beta[..., None], weighted * summed.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
    fresh, known = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = q @ k.mT * fall
    queries, keys = q * summed.exp()[..., None], k * (summed[..., -1:] - summed).exp()[..., None]
    whole = summed[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for c in range(v.shape[1]):
        update = fresh[:, c] - known[:, c] @ state
        out[:, c] = queries[:, c] @ state + within[:, c] @ update
        state = state * whole[:, c] + keys[:, c].mT @ update
    return out.flatten(1, 2)[:, :n].transpose(0, 1), state
