"""One EPD instance against transformers, end to end: photographs and messages in, token ids out.

Through the offline API and through HTTP; under budgets that chunk, batch, cache and preempt in every way.
"""

from __future__ import annotations

import asyncio
import base64
import io

import openai
import pytest
from rich.console import Console

from hydrainfer import LLM, SamplingParams
from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava
from tests.equivalence.criterion import Tally
from tests.equivalence.reference import PHOTOS, Reference, photo
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]

N_NEW = 20  # five blocks of 4 tokens: more than what is left over when prompts fill the few blocks
IN_ORDER = (  # keeps pictures where the message has them, so that they stand first, in the middle and last
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '<image>' }}{% else %}{{ p['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def image(i):
    return {"type": "image", "image": photo(PHOTOS[i])}


def text(t):
    return {"type": "text", "text": t}


def user(*parts):
    return {"role": "user", "content": list(parts)}


CHATS = {
    "first": [user(image(0), text("What is in this picture?"))],
    "middle": [user(text("Look at"), image(1), text("and say what it is."))],
    "last": [user(text("Describe the colours, from left to right, of"), image(2))],
    "several": [user(image(3), text("or"), image(4), text("or"), image(3), text("?"))],
    "none": [user(text("Explain how a queue works in one paragraph, and why it is fair to those who wait."))],
    "turns": [
        user(image(5), text("What is this?")),
        {"role": "assistant", "content": [text("A motorcycle.")]},
        user(text("And"), image(0), text("?")),
    ],
}

FEW_BLOCKS = 72
ENGINES = {
    "whole prompts": {"token_budget": 4096, "image_budget": 4},
    "chunks of 1": {"token_budget": 1, "image_budget": 1, "overlap": "off"},
    "chunks of 7": {"token_budget": 7, "image_budget": 2, "encode_gate": "paper"},
    "prefill first": {"token_budget": 64, "overlap": "off", "batching": "prefill-first"},
    "joined lanes": {"token_budget": 64, "image_budget": 3, "overlap": "step"},
    "few blocks": {"token_budget": 48, "block_tokens": 4, "headroom_tokens": 0},
    "free lanes": {"token_budget": 40, "overlap": "free"},
    "one step ahead": {"token_budget": 40, "overlap": "free", "async_scheduling": True},
    "sliced": {"token_budget": 64, "image_budget": 3, "overlap": "slice"},
    "one thread": {"token_budget": 100, "threads": 1, "max_running": 2},
    "torch operators": {"native_kernels": False},
}


@pytest.fixture(scope="module", params=[(0, 2), (1, 4), (2, 1)], ids=lambda p: f"seed {p[0]}, {p[1]} of 4 KV heads")
def case(request, tmp_path_factory):
    """(checkpoint, bytes of one KV block of 4 tokens, chats → what transformers says)."""
    seed, kv_heads = request.param
    path = make_llava(tmp_path_factory.mktemp("llava"), seed, heads=4, kv_heads=kv_heads, head_dim=16)
    (path / "chat_template.json").unlink()  # which would come first
    (path / "chat_template.jinja").write_text(IN_ORDER)
    reference = Reference(path)
    return path, 2 * 2 * 4 * kv_heads * 16 * 4, {name: reference.greedy(chat, N_NEW) for name, chat in CHATS.items()}


@pytest.fixture(scope="module")
def tally():
    kept = Tally()
    yield kept
    kept.check()


def start(case, engine):
    path, block_bytes, _ = case
    few = {"kv_cache_gib": FEW_BLOCKS * block_bytes / 2**30} if engine == "few blocks" else {}
    return LLM(path, image_backend="pillow", **ENGINES[engine], **few)


def compare(outputs, wanted, label, tally):
    for name, out in zip(wanted, outputs):
        prompt_ids, ids, gaps = wanted[name]
        assert list(out.prompt_token_ids) == prompt_ids, name
        tally.add(f"{label}/{name}", list(out.outputs[0].token_ids), ids, gaps)


def check_whole(instance):
    instance.caches.check(idle=True)
    instance.sessions.check(idle=True)
    instance.intake.processor.pixels.check(idle=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_offline(case, engine, tally):
    wanted = case[2]
    greedy = SamplingParams(temperature=0.0, max_tokens=N_NEW)
    with start(case, engine) as llm:
        instance = parts(llm)
        copies = 4 if engine == "few blocks" else 1
        outputs = llm.chat(list(CHATS.values()) * copies, greedy, use_tqdm=False)
        for i in range(copies):
            compare(outputs[i * len(CHATS) :], wanted, engine, tally)
        stats = instance.engine.stats()
        assert (stats.n_preemptions > 0) == (engine == "few blocks")
        encoded = stats.pictures_wanted - stats.pictures_found
        again = llm.chat(list(CHATS.values()), greedy, use_tqdm=False)  # embeddings are cached now
        compare(again, wanted, engine + ", cached", tally)
        if engine != "few blocks":
            assert encoded == len(PHOTOS), "each photograph is encoded once"
            stats = instance.engine.stats()
            assert stats.pictures_wanted - stats.pictures_found == encoded
        for i in range(2):  # and each alone
            name = list(CHATS)[i]
            compare(llm.chat(CHATS[name], greedy, use_tqdm=False), {name: wanted[name]}, engine + ", alone", tally)
        check_whole(instance)


def test_seeded_samples_do_not_depend_on_the_engine(case):
    chats = list(CHATS.values())
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=5 + i, n=2, max_tokens=N_NEW) for i in range(len(chats))]
    seen = []
    for engine in ("whole prompts", "few blocks", "chunks of 7"):
        with start(case, engine) as llm:
            outputs = llm.chat(chats, params, use_tqdm=False)
            seen.append([[c.token_ids for c in out.outputs] for out in outputs])
    assert any(one != other for one, other in seen[0]), "the choices of a request differ"
    whole, *others = ([tokens for choices in found for tokens in choices] for found in seen)
    for other in others:  # rounding moves a sum of probabilities by 1e-6, and a token of the tail is 1e-3 wide
        assert sum(a != b for a, b in zip(whole, other, strict=True)) <= 1, "more than one draw lies at the edge"


def over_http(chat):
    """The same messages with pictures as data: URLs (PNG, so that nothing is lost)."""

    def part(p):
        if p["type"] == "text":
            return p
        buffer = io.BytesIO()
        p["image"].save(buffer, "PNG", compress_level=1)
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": url}}

    return [{**m, "content": [part(p) for p in m["content"]]} for m in chat]


def test_http(case, tally):
    path, _, wanted = case
    loaded = load({"model": str(path), "port": 0, "token_budget": 33})

    async def one(client, chat, stream):
        options = {
            "model": path.name,
            "messages": over_http(chat),
            "max_tokens": N_NEW,
            "temperature": 0,
            "extra_body": {"return_token_ids": True},
        }
        if not stream:
            answer = await client.chat.completions.create(**options)
            return answer.prompt_token_ids, answer.choices[0].token_ids, answer.usage
        prompt, ids, usage = None, [], None
        options["stream_options"] = {"include_usage": True}
        async for chunk in await client.chat.completions.create(stream=True, **options):
            prompt = prompt or getattr(chunk, "prompt_token_ids", None)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                ids += getattr(choice, "token_ids", None) or []
        return prompt, ids, usage

    async def everything(url):
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none") as client:
            tasks = [one(client, chat, stream) for stream in (False, True) for chat in CHATS.values()]
            return await asyncio.gather(*tasks)

    with serve_in_background(loaded, Console(quiet=True)) as (url, instance):
        answers = asyncio.run(everything(url))
        for name, (prompt, ids, usage) in zip(list(CHATS) * 2, answers):
            want_prompt, want, gaps = wanted[name]
            assert prompt == want_prompt
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(ids))
            tally.add(f"http/{name}", ids, want, gaps)
    check_whole(instance)
