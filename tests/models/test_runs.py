"""Layers that decode in one call: which they are, and that logits are those of the layers one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hydrainfer.core import Role
from hydrainfer.models import LayerCache, Model, load_model
from hydrainfer.ops import AttentionBatch, ScanBatch, select_ops
from hydrainfer.ops.build import load_kernels
from hydrainfer.storage import BlockStore
from tests.checkpoints_text import make_text

pytestmark = pytest.mark.cpu

_BLOCK, _ROWS = 4, 3
SLIDING = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None, "sliding_window": 2}
RUNS = {  # how many layers each call takes
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, [2]),
    "window": ("mistral", {"sliding_window": 2}, [2]),
    "full, then window": ("qwen3", SLIDING, [1, 1]),
    "layers that do not rotate between": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, [2, 1, 1]),
    "fused matrices": ("phi3", {}, [2]),
    "neighbours as pairs": ("glm", {}, [2]),
    "no rotation, scaled scores": ("granite4", {"position_embedding_type": None, "residual_multiplier": 1.0}, [2]),
    "convolutions": ("lfm2", {}, [2]),
    "gates of heads": ("qwen3_next", {}, []),
    "experts": ("gpt_oss", {}, []),
    "wide norms": ("gemma3", {}, []),
    "norms behind": ("olmo2", {}, []),
    "scaled residuals": ("granite", {}, []),
    "queries that grow": ("ministral3", {}, []),
    "caps": ("gemma2", {}, []),
}


def steps(model: Model, n: int) -> list[torch.Tensor]:
    """Logits of `n` steps of `_ROWS` decodes, from the first token on."""
    stores = [BlockStore(spec, _ROWS) for spec in model.cache_specs(kv_block_tokens=_BLOCK)]
    every, found = torch.arange(_ROWS), []
    for t in range(n):
        paged = AttentionBatch(
            counts=[1] * _ROWS,
            contexts=[t] * _ROWS,
            n_decodes=_ROWS,
            block_tokens=_BLOCK,
            tables=every.int()[:, None],
            lengths=torch.full((_ROWS,), t + 1, dtype=torch.int32),
            slots=every * _BLOCK + t,
            starts=torch.arange(_ROWS + 1, dtype=torch.int32),
        )
        caches: dict[int, LayerCache] = {}
        for store in stores:
            scan = ScanBatch(_ROWS, every if t else torch.full_like(every, -1), every, [])
            batch = replace(paged, window=store.spec.window) if store.spec.paged else scan
            caches |= {i: LayerCache(parts, batch) for i, parts in zip(store.spec.layers, store.layers)}
        x = model.embed(3 + every + 10 * t)
        found.append(model.logits(model.forward(x, torch.full((_ROWS,), t), [caches[i] for i in range(len(caches))])))
    return found


@pytest.mark.parametrize("kind", RUNS)
def test_plain_layers_decode_in_one_call(kind, tmp_path):
    kernels = load_kernels(torch.device("cpu"))[0]
    if kernels is None:
        pytest.skip("no compiler here")
    family, options, runs = RUNS[kind]
    path, calls = make_text(tmp_path, family, 3, **options), []

    def decoder(layers, *rest):
        decode = kernels.decoder(layers, *rest)

        def watched(x, cos, sin, caches, batch):
            calls.append(len(caches))
            decode(x, cos, sin, caches, batch)

        return watched

    ops = select_ops("cpu", torch.float32, 16)
    one_by_one = load_model(path, Role.parse("PD"), ops=replace(ops, decoder=None))
    want = steps(one_by_one, 3)
    got = steps(load_model(path, Role.parse("PD"), ops=replace(ops, decoder=decoder, decoder_rows=lambda _: _ROWS)), 3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert calls == runs * 3
    calls.clear()
    steps(load_model(path, Role.parse("PD"), ops=replace(ops, decoder=decoder, decoder_rows=lambda _: _ROWS - 1)), 1)
    assert not calls, "more rows than the compiled kernel multiplies fastest"
