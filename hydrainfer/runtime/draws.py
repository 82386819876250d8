"""Draws of tokens at random. Filters say which tokens are allowed. The allowed token with the largest sum of logit /
temperature and Gumbel noise is drawn, which gives it its share of the filtered distribution (the Gumbel-max trick).

The noise of a token is a function of the row's key and the token's id. So no sum over the vocabulary decides between
two tokens: the result depends neither on the batch nor on the device, unless two candidates tie up to rounding.

A *scaled* logit is (logit - the row's largest) / temperature. It is never positive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hydrainfer.ops import upload
from hydrainfer.runtime.sampling import Draw

_NEAR = -6.0
"""The scaled logit from which a token of a row without filters is always looked at, on a CPU."""

_SOON = int(8.0 * math.exp(_NEAR) * 2**31)
"""A less likely token is looked at if `mixed` gives it at most this. Else its noise is less than log(1 / 8) - _NEAR."""

_BEST = math.log(1 / 8) + 0.01
"""A score that no other token reaches. The best one nearly always exceeds it, so most tokens need no logarithm."""

_SORTED = 2048
"""The number of tokens up to which all are sorted to find where the nucleus ends, on a CPU."""

_TOP_K = 1024
"""The largest top_k for which the likeliest tokens are picked out on CUDA; beyond it, the k-th is searched for."""

DRAWN_TOGETHER = 64
"""Rows that are drawn together on CUDA. Each takes some 30 bytes per token of the vocabulary meanwhile."""

_SIGN = 0x7FFFFFFF
"""All bits of a number but its sign. Without it, the order of a float's bits is that of its magnitude."""


def draw(logits: Tensor, draws: list[Draw], chosen: Tensor) -> None:
    """Write the token of each draw to `chosen`, int64 [rows]; logits [rows, vocab]. Does not wait for a GPU."""
    if logits.device.type == "cpu":
        for d in draws:
            chosen[d.row] = draw_row(logits[d.row], d)
        return
    for some in alike(draws):
        draw_rows(logits, some, chosen)


def alike(draws: list[Draw]) -> Iterator[list[Draw]]:
    """The draws in groups of at most `DRAWN_TOGETHER` that take the same steps."""
    plain = [d for d in draws if not d.filters]
    narrow = [d for d in draws if 0 < d.top_k <= _TOP_K]
    wide = [d for d in draws if d.filters and not 0 < d.top_k <= _TOP_K]
    for kind in (plain, narrow, wide):
        yield from (kind[first : first + DRAWN_TOGETHER] for first in range(0, len(kind), DRAWN_TOGETHER))


def draw_row(logits: Tensor, d: Draw) -> int:
    """The token of one row [vocab], on a CPU."""
    key, key_2 = torch.from_numpy(_halves([d.key]))[0]
    ids = _allowed(logits, d)
    if ids is not None and len(ids):  # none if the logits are no numbers
        values = logits[ids]
        return int(ids[_best(_scaled(values, values.max(), d.temperature), mixed(ids.int(), key, key_2))[0]])
    largest = logits.max()
    bits = mixed(torch.arange(len(logits), dtype=torch.int32), key, key_2)
    near = logits.numpy() >= float(largest) + _NEAR * d.temperature
    ids = torch.from_numpy(np.flatnonzero(near | (bits.numpy() <= _SOON)))
    if 0 < len(ids) < len(logits) // 2:
        at, score = _best(_scaled(logits[ids], largest, d.temperature), bits[ids])
        if score > _BEST:
            return int(ids[at])
    return _best(_scaled(logits, largest, d.temperature), bits)[0]


def _scaled(logits: Tensor, largest: Tensor, temperature: float | Tensor) -> Tensor:
    return (logits - largest).div_(temperature)


def _best(scaled: Tensor, bits: Tensor) -> tuple[int, float]:
    """The index of the token that is drawn among these, on a CPU, and its score."""
    scores = scaled.sub_(log_waits(bits)).numpy()
    at = int(scores.argmax())  # NumPy's takes a tenth of the time of torch's
    return at, float(scores[at])


def _allowed(logits: Tensor, d: Draw) -> Tensor | None:
    """The ids that the filters of `d` leave, ascending; None if all."""
    vocab, least = len(logits), -math.inf
    if d.min_p > 0.0:
        least = float(logits.max()) + d.temperature * math.log(d.min_p)
    if 0 < d.top_k < vocab:
        least = max(least, float(logits.topk(d.top_k).values[-1]))  # ties at the k-th stay
    ids = (logits >= least).nonzero()[:, 0] if least > -math.inf else None
    if d.top_p < 1.0:
        kept = _nucleus(logits if ids is None else logits[ids], d)
        ids = kept if ids is None else ids[kept]
    return ids


def _nucleus(logits: Tensor, d: Draw) -> Tensor:
    """The indices, ascending, of the likeliest tokens whose predecessors have less than the share `top_p`; ties by
    index. Many tokens are put in buckets of nearly equal logits, and only the bucket where the nucleus ends is
    sorted."""
    scaled = _scaled(logits, logits.max(), d.temperature)
    bits = scaled.numpy().view(np.int32) & _SIGN
    weights = scaled.exp_().numpy()
    buckets = bits >> 15 if len(bits) > _SORTED else np.zeros_like(bits)
    sums = np.bincount(buckets, weights).cumsum()
    wanted = d.top_p * sums[-1]
    last = int(np.searchsorted(sums, wanted))
    inside = np.flatnonzero(buckets == last)
    order = inside[bits[inside].argsort(kind="stable")]
    shares = weights[order].astype(np.float64)
    before = sums[last - 1] if last else 0.0
    n = int((before + shares.cumsum() - shares < wanted).sum())
    kept = buckets < last
    kept[order[: max(n, 1)]] = True
    return torch.from_numpy(np.flatnonzero(kept))


def draw_rows(logits: Tensor, draws: list[Draw], chosen: Tensor) -> None:
    """Write the tokens of draws of one kind (see `alike`) to `chosen`, all together and without waiting for the
    device."""
    vocab = logits.shape[1]
    on = upload(_parameters(draws, vocab), logits.device)
    rows, columns = on.pop("rows"), {name: values[:, None] for name, values in on.items()}
    whole = [d.row for d in draws] == list(range(len(logits)))
    kept = logits if whole else logits[rows]
    scaled = _scaled(kept, kept.amax(-1, keepdim=True), columns["temperature"])
    if any(d.filters for d in draws):
        small = 0 < draws[0].top_k <= _TOP_K
        _filter(scaled, *(_least_in_columns if small else _least_by_search)(scaled, columns, draws))
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    scores = scaled.sub_(log_waits(mixed(ids, columns["key"], columns["key_2"])))
    if whole:
        torch.argmax(scores, -1, out=chosen)
    else:
        chosen[rows] = scores.argmax(-1)


def _parameters(draws: list[Draw], vocab: int) -> dict[str, np.ndarray]:
    """The parameters of the draws, an array [draws] each. Without top_k it is more than all tokens, without top_p
    infinite. `least`: the least scaled logit by min_p."""
    keys = _halves([d.key for d in draws])
    top_k = np.array([min(d.top_k, vocab) if d.top_k else vocab + 1 for d in draws], dtype=np.int64)
    return {
        "rows": np.array([d.row for d in draws], dtype=np.int64),
        "temperature": np.array([d.temperature for d in draws], dtype=np.float32),
        "top_k": top_k,
        "kth": top_k - 1,
        "top_p": np.array([d.top_p if d.top_p < 1.0 else math.inf for d in draws], dtype=np.float64),
        "least": np.array([math.log(d.min_p) if d.min_p > 0.0 else -math.inf for d in draws], dtype=np.float32),
        "key": keys[:, 0].copy(),
        "key_2": keys[:, 1].copy(),
    }


def _halves(keys: list[int]) -> np.ndarray:
    """64 bits as int32 [keys, 2]."""
    return np.array(keys, dtype=np.uint64).view(np.int32).reshape(-1, 2)


Least = tuple[Tensor, Tensor | None]
"""The least scaled logit that is allowed, float32 [rows, 1], and how many of those tokens are that have it, the
smallest ids first, [rows, 1]; None: all."""


def _filter(scaled: Tensor, least: Tensor, n_tied: Tensor | None) -> None:
    """Mask the scaled logits of tokens that are not allowed."""
    beyond = scaled < least
    if n_tied is not None:
        tied = scaled == least
        beyond = torch.where(tied, tied.cumsum(-1, dtype=torch.int32) > n_tied, beyond)
    scaled.masked_fill_(beyond, -math.inf)


def _least_in_columns(scaled: Tensor, on: dict[str, Tensor], draws: list[Draw]) -> Least:
    """The least where every row has a small top_k. Its nucleus ends among the likeliest tokens or in the ties at the
    k-th."""
    likeliest = scaled.topk(min(max(d.top_k for d in draws), scaled.shape[1])).values  # [rows, columns]
    least = torch.maximum(likeliest.gather(1, on["kth"]), on["least"])
    if all(d.top_p >= 1.0 for d in draws):
        return least, None
    _filter(scaled, least, None)
    wanted = on["top_p"] * scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    weights = likeliest.exp()
    sums = weights.cumsum(-1, dtype=torch.float64)
    last = (sums[:, :-1] < wanted).sum(-1, keepdim=True)
    least = torch.maximum(least, likeliest.gather(1, last))
    return least, _n_tied(likeliest, weights, least, wanted)


def _least_by_search(scaled: Tensor, on: dict[str, Tensor], draws: list[Draw]) -> Least:
    """The least by bisection: no sort, and no bound of top_k or of the nucleus."""
    least = on["least"]
    if any(d.top_k for d in draws):
        least = torch.maximum(least, _farthest(scaled, torch.ones(1, device=scaled.device), on["top_k"]))
    if all(d.top_p >= 1.0 for d in draws):
        return least, None
    _filter(scaled, least, None)
    weights = scaled.exp()
    wanted = on["top_p"] * weights.sum(-1, keepdim=True, dtype=torch.float64)
    least = torch.maximum(least, _farthest(scaled, weights, wanted))
    return least, _n_tied(scaled, weights, least, wanted)


def _n_tied(scaled: Tensor, weights: Tensor, least: Tensor, wanted: Tensor) -> Tensor:
    """The number of tokens with the scaled logit `least` that make up what the likelier ones lack of the weight
    `wanted`."""
    likelier = torch.where(scaled > least, weights, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return ((wanted - likelier) / least.exp()).ceil()


def _farthest(scaled: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """The smallest scaled logit above which there is less than the weight `wanted`, found bit by bit; minus infinity if
    there is less in all: [rows, 1]."""
    bits = scaled.view(torch.int32) & _SIGN
    found = torch.zeros_like(bits[:, :1])
    for bit in reversed(range(31)):
        larger = found | (1 << bit)
        above = torch.where(bits < larger, weights, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        found = torch.where(above < wanted, larger, found)
    return -found.clamp(max=0x7F800000).view(torch.float32)  # the bits of infinity


def mixed(ids: Tensor, key: Tensor, key_2: Tensor) -> Tensor:
    """Numbers from 0 to 2^31 - 1, each a function of an id and the key: int32, of the broadcast shape of int32 `ids`
    and the key's halves. Multiplications and shifts mix (Wellons 2018), the second half of the key comes between."""
    x = ids ^ key
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += key_2
    x *= 0x846CA68B - (1 << 32)
    x ^= x >> 16  # an arithmetic shift, which clears the sign
    return x


def log_waits(bits: Tensor) -> Tensor:
    """The logarithms of exponentially distributed numbers, float32, made of what `mixed` gives. Negated, they are
    Gumbel noise. It reaches 22, because small numbers keep all their bits."""
    uniform = (bits + 0.5).mul_(-(1.0 - 2.0**-24) * 2.0**-31)  # in (-1, 0), also when rounded
    return uniform.log1p_().neg_().log_()
