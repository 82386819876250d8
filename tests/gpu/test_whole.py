"""Whole instances in bfloat16, where FlashInfer and graphs compute: graphs, no graphs, drafts, and E, P and D give the
same tokens, and logits are those by torch's attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import Image

from benchmarks.gpu.tiny import MAKERS, PICTURES, tiny
from hydrainfer import LLM, SamplingParams
from hydrainfer.cache import HostTier
from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import DTYPES, attentions_of, cache_specs, load_model
from hydrainfer.ops import select_ops, torch_variants
from hydrainfer.scheduler import Worth
from hydrainfer.scheduler.drafting import Guess, TextDrafter
from hydrainfer.storage import LayerLoader
from tests.checkpoints import make_picture
from tests.equivalence.mixed import settled_stats
from tests.gpu.alike import check_alike
from tests.models.teacher import teacher_forced

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WAYS = {
    "no graphs": {"cuda_graphs": False},
    "chunks": {"token_budget": 48, "overlap": "off"},
    "1E1P1D": {"layout": "1E1P1D", "launcher": "inproc"},
}
TEXTS = ("What is in this picture?", "Explain how a queue works.", "One, two, three. " * 6, "Why?")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=4)
NEAR = 0.02  # of the logits' size


def chats(kind: str):
    """Some with pictures, if the model takes them."""
    for i, text in enumerate(TEXTS):
        image = {"type": "image", "image": Image.fromarray(make_picture(i, 112))}
        content = [{"type": "text", "text": text}]
        with_picture = kind in PICTURES and i % 2 == 0
        yield [{"role": "user", "content": [image, *content] if with_picture else text}]


def outputs(kind: str, models, device, **options):
    sizes = {"kv_cache_gib": 0.25, "threads": 1} | ({"image_cache_gib": 0.25} if kind in PICTURES else {})
    with LLM(tiny(kind, models), device=device.type, **sizes, **({"dtype": "bfloat16"} | options)) as llm:
        out = llm.chat(list(chats(kind)), SAMPLING, use_tqdm=False)
        return out, settled_stats(llm).drafts if "drafts" in options else {}


def answers(kind: str, models, device, **options):
    return [out.outputs[0] for out in outputs(kind, models, device, **options)[0]]


@pytest.fixture(scope="module")
def by_graphs(device, models):
    """The answers of one instance with all that is default, by kind."""
    kept = {}

    def get(kind: str):
        if kind not in kept:
            kept[kind] = answers(kind, models, device)
        return kept[kind]

    return get


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_way_gives_the_same_tokens(device, models, by_graphs, kind, way):
    options = WAYS[way]
    if "layout" in options and kind not in PICTURES:
        options = options | {"layout": "1P1D"}
    print(check_alike(answers(kind, models, device, **options), by_graphs(kind)))


@pytest.mark.parametrize("kind", MAKERS)
def test_drafts_change_no_token(device, models, monkeypatch, kind):
    """Drafts that are mostly the answer, every fourth of them wrong; and an MTP layer's, whatever they are."""
    plain, _ = outputs(kind, models, device, async_scheduling=False)
    by_prompt = {tuple(out.prompt_token_ids): out.outputs[0].token_ids for out in plain}

    def guess(drafter, seq, n):
        answer = by_prompt[tuple(seq.tokens[: seq.n_prompt])][seq.n_produced :][: min(n, 3)]
        return Guess([t if (seq.n_produced + i) % 4 else 7 for i, t in enumerate(answer)])

    monkeypatch.setattr(Worth, "guesses", lambda worth, lucks, most: 3)
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    for name in ("ngram", "mtp") if kind == "qwen3_5" else ("ngram",):
        if name == "ngram":
            monkeypatch.setattr(TextDrafter, "guess", guess)
        drafted, counts = outputs(kind, models, device, drafts=name, async_scheduling=False)
        alike = check_alike([out.outputs[0] for out in drafted], [out.outputs[0] for out in plain])
        print(name, alike, counts[name])
        assert counts[name].n_tokens > 15
        assert name == "mtp" or counts[name].n_accepted > 10


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_half_floats(device, models, kind):
    print(check_alike(*(answers(kind, models, device, dtype=dtype) for dtype in ("float16", "float32"))))


@pytest.mark.parametrize("kind", MAKERS)
def test_logits_are_those_by_torchs_attention(device, models, kind):
    """Most tokens of a prompt are compared: with experts, rounding may send one to another expert. Where rounding alone
    moves logits further, the chosen attention is as far from float32 as torch's."""
    ids = [1 + (7 * i) % 300 for i in range(150)]

    def logits(dtype, change=lambda ops: ops):
        path, role, kept = tiny(kind, models), Role.parse("PD"), DTYPES[dtype]
        config = read_config(path)
        ops = change(select_ops(device, kept, config.text.head_dim, attentions=attentions_of(config, role, kept)))
        print(dtype, dict(ops.chosen)["attention"])
        return teacher_forced(load_model(path, role, device, dtype, ops=ops), ids)

    usual, exact = logits("bfloat16"), logits("float32")
    plain = logits("bfloat16", by_torch)
    apart, error, plain_error = distance(usual, plain), distance(usual, exact), distance(plain, exact)
    print(f"{apart:.4f} from torch's attention, {error:.4f} from float32, torch's {plain_error:.4f}")
    assert apart < NEAR or error < 1.2 * plain_error


def by_torch(ops):
    return replace(ops, prepare=torch_variants.prepare, attention=torch_variants.attention_sdpa)


def distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """The median over positions of a relative distance."""
    return float(((some - others).norm(dim=1) / others.norm(dim=1)).median())


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen3_5"])
def test_a_store_gives_back_what_another_server_left(device, models, tmp_path, kind):
    """Blocks go to the host and back."""
    found = []
    for _ in range(2):
        out, _ = outputs(kind, models, device, store=f"dir:{tmp_path}/store?gib=1")
        found.append([one.outputs[0].token_ids for one in out])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen3_5"])
def test_what_comes_back_from_host_memory_is_what_was_there(device, models, monkeypatch, kind):
    """Layer by layer, after others have taken its place on the device."""
    monkeypatch.setattr(HostTier, "load_s", lambda tier, n_bytes: 0.0)
    begun, begin = [], LayerLoader.begin

    def counted(loader, source, pulls, *more):
        begun.append(pulls)
        return begin(loader, source, pulls, *more)

    monkeypatch.setattr(LayerLoader, "begin", counted)
    prompts = [[1, *range(10 + i, 200 + i), 300 - i] for i in range(6)]
    config = read_config(tiny(kind, models))
    specs = cache_specs(config, Role.parse("EPD"), "bfloat16", 16)
    size = sum(spec.block_bytes * (spec.held_by(200) + 13) for spec in specs if spec.size_option == "kv_cache_gib")
    few = {"kv_cache_gib": 2 * size / 2**30, "headroom_tokens": 0, "max_model_len": 224}
    options = {"device": device.type, "dtype": "bfloat16", "threads": 1, "host_cache_gib": 0.25, **few}
    if kind in PICTURES:
        options["image_cache_gib"] = 0.25
    with LLM(tiny(kind, models), **options) as llm:
        first, again = (
            [llm.generate([{"prompt_token_ids": ids}], SAMPLING, use_tqdm=False)[0].outputs[0] for ids in prompts]
            for _ in range(2)
        )
        assert settled_stats(llm).tokens_found > 100 * len(prompts) / 2
    assert len(begun) >= len(prompts) / 2 or device.type == "cpu"
    print(check_alike(again, first))
