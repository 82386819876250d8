"""Teacher-forced logits of every sample and variant, at every position of its chats, against transformers."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.core import LiveSequence, Request, Role, SamplingParams, TokenWork
from hydrainfer.models import load_model
from hydrainfer.ops import upload
from hydrainfer.processor import PixelStore, Processor, parse_messages
from hydrainfer.runtime.packing import pack_tokens
from tests.equivalence.criterion import LOGIT_TOLERANCE
from tests.families.sample import samples
from tests.models.teacher import teacher_forced
from tests.pillow import described
from tests.runtime.harness import Rig

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
SAMPLES = samples()


def forced(rig: Rig, request: Request, store: PixelStore) -> torch.Tensor:
    """The logits of every position of a prompt with pictures, in one forward: [positions, vocab]."""
    n, language = request.n_prompt, rig.language
    seq = LiveSequence(request, (0.0, 0), 0.0)
    lease = rig.caches.reserve(seq.id, {name: s.need(request, 0, n) for name, s in rig.caches.specs.items()})
    assert lease is not None, "the rig's pools are too small"
    seq.hold.blocks = lease.blocks
    rig.pixels.update({m.pixels: store.get(m.pixels) for m in request.media})
    if request.media:
        assert rig.encode([seq]).error is None
    work = [TokenWork(seq, 0, n, True)]
    p = pack_tokens(work, language._tables, rig.embeds.spec, language._rotary, language._sums)
    with torch.inference_mode():
        on = upload(language.arrays(p), language.device)
        found = rig.model.logits(language._whole(on, language.caches(p, on)))
    rig.caches.release(lease)
    return found


@pytest.mark.parametrize(("name", "variant"), [(name, v) for name, s in SAMPLES.items() for v in s.variants])
def test_logits_are_those_of_transformers(name, variant, tmp_path, record_property):
    """In float64: transformers' own float32 may be as far from that as ours."""
    sample = SAMPLES[name]
    path = sample.make(tmp_path / "checkpoint", **sample.variants[variant])
    reference, worst, rig = sample.reference(path), 0.0, None
    model = reference.model.double()
    model.set_experts_implementation("eager")  # torch has no grouped products in float64
    description = described(path)
    seeing = description.images is not None
    if seeing:
        rig, store = Rig(path), PixelStore(1 << 28)
        processor = Processor(description, store, weights=b"", dtype="float32")
    else:
        ours = load_model(path, Role.parse("EPD"))
    for chat, messages in sample.chats.items():
        inputs = reference.inputs(messages)
        ids = inputs["input_ids"][0].tolist()
        if hasattr(getattr(model, "model", None), "rope_deltas"):
            model.model.rope_deltas = None
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        with torch.inference_mode():
            want = model(**wide).logits[0]
        if seeing:
            greedy = SamplingParams(temperature=0.0, max_tokens=1)
            prepared = processor.chat(chat, parse_messages(messages, local=True), greedy)
            assert list(prepared.prompts[0]) == ids, chat
            got = forced(rig, prepared.requests[0], store)
        else:
            got = teacher_forced(ours, ids)
        worst = max(worst, float((got - want).abs().max()))
    if rig is not None:
        rig.close()
    record_property("max_difference", worst)
    print(f"{name}, {variant}: logits differ by {worst:.1e}")
    assert worst < LOGIT_TOLERANCE
