"""The runners against transformers on the same checkpoint, by the project's criterion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydrainfer.core import TokenWork
from hydrainfer.ops import upload
from hydrainfer.runtime.packing import pack_tokens
from hydrainfer.runtime.tables import BlockTables
from tests.equivalence.criterion import LOGIT_TOLERANCE, Tally
from tests.runtime.harness import IMAGE, Prompt, Reference, Rig

pytestmark = pytest.mark.cpu

PROMPTS = {
    "none": Prompt([1, 400, 401, 402, 403, 404, 405], []),
    "first": Prompt([1, IMAGE, 300, 301, 302], [1]),
    "middle": Prompt([1, 310, 311, 312, IMAGE, 313, 314], [2]),
    "last": Prompt([1, 320, 321, IMAGE], [3]),
    "several": Prompt([1, IMAGE, 330, IMAGE, 331, 332, IMAGE, 333], [4, 5, 4]),
}
N_NEW = 12


@pytest.fixture(scope="module")
def tally():
    kept = Tally()
    yield kept
    kept.check()


@pytest.mark.parametrize("kv_heads", [4, 1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_ids_and_logits_equal_the_reference(checkpoints, seed, kv_heads, tally):
    path = checkpoints(seed, kv_heads)
    rig, reference = Rig(path), Reference(path)
    wanted = {}
    for name, prompt in PROMPTS.items():
        ids = list(rig.sequence_ids(prompt))
        wanted[name] = reference.greedy(ids, prompt.pictures, N_NEW)
        for chunk in (1, 3, 7, 10_000):
            (got,) = rig.run([rig.sequence(prompt, N_NEW)], chunk)
            tally.add(f"{name}/{chunk}/{seed}/{kv_heads}", got, *wanted[name])
    for chunk in (2, 5, 10_000):  # all prompts in one mixed batch
        outputs = rig.run([rig.sequence(p, N_NEW) for p in PROMPTS.values()], chunk)
        for name, got in zip(PROMPTS, outputs):
            tally.add(f"mixed/{name}/{chunk}/{seed}/{kv_heads}", got, *wanted[name])
    rig.close()


def teacher_forced(rig: Rig, prompt: Prompt, ids: list[int]) -> torch.Tensor:
    """Our logits of every position of `ids`, one forward, [len(ids), vocab]."""
    n = len(ids)
    seq = rig.sequence(prompt, n - len(rig.sequence_ids(prompt)) + 1)
    if seq.request.media:
        rig.encode([seq])
    seq.tokens = list(ids)
    p = pack_tokens([TokenWork(seq, 0, n, True)], [BlockTables(rig.kv.spec)], rig.embeds.spec)
    with torch.inference_mode():
        x = rig.model.embed(torch.from_numpy(p.ids))
        if p.embed_at is not None:
            x[torch.from_numpy(p.embed_at)] = rig.embeds.rows[torch.from_numpy(p.embed_rows)]
        caches = rig.language.caches(p, upload(rig.language.arrays(p), rig.model.device))
        hidden = rig.model.forward(x, torch.from_numpy(p.positions), caches)
        logits = rig.model.logits(hidden)
    rig.release(seq)
    return logits


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_teacher_forced_logits(checkpoints, kv_heads):
    path = checkpoints(0, kv_heads)
    rig, reference = Rig(path), Reference(path)
    for name, prompt in PROMPTS.items():
        ids = [*rig.sequence_ids(prompt), 500, 501, 502]
        got, want = teacher_forced(rig, prompt, ids), reference.logits(ids, prompt.pictures)
        assert (got - want).abs().max() < LOGIT_TOLERANCE, name
    rig.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_logits_are_near_float32(checkpoints, dtype, tolerance):
    """Root mean square error relative to the float32 reference's own deviation."""
    path = checkpoints(0, 2)
    rig, reference = Rig(path, dtype), Reference(path)
    for name, prompt in PROMPTS.items():
        ids = list(rig.sequence_ids(prompt))
        got, want = teacher_forced(rig, prompt, ids), reference.logits(ids, prompt.pictures)
        error = float((got - want).pow(2).mean().sqrt() / want.std())
        assert error < tolerance, (name, error)
    rig.close()


def test_output_depends_on_the_picture(checkpoints):
    rig = Rig(checkpoints())
    one, other = rig.run([rig.sequence(Prompt([1, IMAGE, 300], [s]), N_NEW) for s in (1, 2)])
    assert one != other
    rig.close()


@pytest.mark.parametrize(
    "options",
    [
        {"text": (("attention_bias", True), ("mlp_bias", True))},
        {"text": (("tie_word_embeddings", True),), "config": (("tie_word_embeddings", True),)},
        {"text": (("rope_parameters", (("rope_type", "linear"), ("factor", 2.0), ("rope_theta", 1e4))),)},
        {
            "text": (
                (
                    "rope_parameters",
                    (
                        ("rope_type", "llama3"),
                        ("factor", 8.0),
                        ("rope_theta", 5e5),
                        ("low_freq_factor", 1.0),
                        ("high_freq_factor", 4.0),
                        ("original_max_position_embeddings", 64),
                    ),
                ),
            )
        },
        {"config": (("vision_feature_layer", -1), ("vision_feature_select_strategy", "full"))},
        {"config": (("vision_feature_layer", (-3, -1)),)},
        {"config": (("vision_feature_layer", 1), ("projector_hidden_act", "relu"))},
        {"config": (("multimodal_projector_bias", False),), "vision": (("hidden_act", "gelu"),)},
        {"published_names": False},
    ],
    ids=lambda o: "-".join(f"{k}" for v in o.values() if isinstance(v, tuple) for k, _ in v) or "saved names",
)
def test_configuration_variants(checkpoints, options):
    """Options are given as tuples so that they can key the shared checkpoints."""
    from tests.checkpoints import make_llava

    def thaw(value):
        if isinstance(value, tuple) and value and isinstance(value[0], tuple):
            return {k: thaw(v) for k, v in value}
        return list(value) if isinstance(value, tuple) else value

    import tempfile

    with tempfile.TemporaryDirectory() as out:
        path = make_llava(out, 3, heads=4, head_dim=16, **{k: thaw(v) for k, v in options.items()})
        rig, reference = Rig(path), Reference(path)
        prompt = PROMPTS["middle"]
        ids = list(rig.sequence_ids(prompt))
        got = teacher_forced(rig, prompt, ids)
        assert np.isfinite(got.numpy()).all()
        assert (got - reference.logits(ids, prompt.pictures)).abs().max() < LOGIT_TOLERANCE
        rig.close()
