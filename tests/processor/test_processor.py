"""Chats and texts to requests: the ids are the Hugging Face processor's; what is wrong is refused, holding nothing."""

import base64
import dataclasses
import io

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from hydrainfer.core import InvalidRequest, MediaError, Overloaded, RequestTooLarge, SamplingParams, Stage
from hydrainfer.planner.inputs import prompts_of
from hydrainfer.processor import (
    MediaLimits,
    PixelStore,
    Processor,
    RequestTerms,
    load_description,
    parse_messages,
    parse_prompts,
)
from tests.checkpoints_text import make_text

pytestmark = pytest.mark.cpu


def image(seed=0, size=(40, 30)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def url(picture):
    out = io.BytesIO()
    picture.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def text(words):
    return {"type": "text", "text": words}


def shown(picture):
    return {"type": "image_url", "image_url": {"url": url(picture), "detail": "low"}}


def user(*parts):
    return {"role": "user", "content": list(parts)}


@pytest.fixture
def store():
    store = PixelStore(1 << 20)
    yield store
    store.check()


@pytest.fixture
def processor(model, store):
    return Processor(model, store, weights=b"w", dtype="float32", limits=MediaLimits(max_images=3))


def prepare(processor, *messages, **sampling):
    return processor.chat("r", parse_messages(list(messages)), SamplingParams(**{"max_tokens": 8, **sampling}))


def test_a_text_that_is_far_too_long_is_not_tokenised_whole(processor, model, monkeypatch):
    class Spy:
        def encode(self, text, **options):
            lengths.append(len(text))
            return model.tokenizer.encode(text, **options)

    lengths = []
    processor.model = dataclasses.replace(model, tokenizer=Spy())
    monkeypatch.setattr("hydrainfer.processor.text.prompt._SLICE", 500)
    with pytest.raises(InvalidRequest, match="512 tokens; the text has more") as e:
        processor.encode("a " * 3000)
    assert e.value.code == "context_length_exceeded" and max(lengths) == 500 and sum(lengths) < 6000
    word = max((w for w in model.tokenizer.get_vocab() if w.startswith("▁") and w[1:].isalpha()), key=len)
    fits = f"{word[1:]} " * 450
    assert len(fits) > 8 * model.n_context
    assert processor.encode(fits) == model.tokenizer.encode(fits).ids and lengths[-1] == len(fits)


def test_too_many_prompts_are_refused_before_any_is_tokenised(processor, monkeypatch):
    monkeypatch.setattr(processor, "encode", lambda *_, **__: pytest.fail("work for a request that is refused"))
    with pytest.raises(InvalidRequest, match="prompts times n"):
        processor.complete("r", ["hello"] * 65, SamplingParams(n=2))


CHATS = {
    "text": [{"role": "user", "content": "hello there"}],
    "system": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "image last": [user(text("what is this?"), shown(image()))],
    "image first": [user(shown(image()), text("what is this?"))],
    "two images": [user(shown(image(1)), text("compare"), shown(image(2)))],
    "multi-turn": [
        user(shown(image(1)), text("what?")),
        {"role": "assistant", "content": "a cat"},
        user(text("and this?"), shown(image(2))),
    ],
    "only image": [user(shown(image()))],
}


@pytest.mark.parametrize("name", CHATS)
def test_prompt_ids_equal_the_reference(processor, store, checkpoint, name):
    import transformers

    reference = transformers.LlavaProcessor.from_pretrained(checkpoint, backend="pil")
    messages, pictures = [], []
    for m in CHATS[name]:
        content = m["content"] if isinstance(m["content"], list) else [text(m["content"])]
        parts = [p if p["type"] == "text" else {"type": "image"} for p in content]
        messages.append({"role": m["role"], "content": parts})
        for p in content:
            if p["type"] == "image_url":
                data = base64.b64decode(p["image_url"]["url"].partition(",")[2])
                pictures.append(Image.open(io.BytesIO(data)))
    prompt = reference.apply_chat_template(messages, add_generation_prompt=True)
    expected = reference(text=prompt, images=pictures or None, return_tensors="np")["input_ids"][0].tolist()
    prepared = prepare(processor, *CHATS[name])
    (request,) = prepared.requests
    assert list(request.prompt_ids) == expected
    assert len(request.media) == len(prepared.pixels) == len(pictures)
    for span in request.media:
        ids = request.prompt_ids[span.start : span.start + span.n_tokens]
        assert set(ids) == {processor.model.images.token_id} and span.n_tokens == 16
        assert store.get(span.pixels).shape == (56, 56, 3)
    assert list(processor.encode_chat(parse_messages(CHATS[name]))) == expected
    for ref in prepared.pixels:
        store.release(ref)
    store.check(idle=True)


def test_one_request_per_choice(processor):
    prepared = processor.chat(
        "r", parse_messages(CHATS["text"]), SamplingParams(n=3, max_tokens=None), RequestTerms(1.0, 2.0)
    )
    assert [r.id for r in prepared.requests] == ["r-0", "r-1", "r-2"]
    assert [r.choice for r in prepared.requests] == [0, 1, 2]
    assert len({r.seed for r in prepared.requests}) == 1
    request = prepared.requests[0]
    assert request.max_tokens == 512 - len(request.prompt_ids) and request.eos_ids == (2,)
    assert (request.arrival_s, request.deadline_s) == (1.0, 2.0) and request.plan()[0] is Stage.PREFILL
    assert prepare(processor, *CHATS["text"], seed=7).requests[0].seed == 7


def test_equal_prompts_without_a_seed_have_other_random_numbers(processor):
    def seeds(seed):
        return [r.seed for r in processor.complete("r", ["a cat", "a cat"], SamplingParams(n=2, seed=seed)).requests]

    a, again, b, _ = seeds(None)
    assert a == again != b and set(seeds(7)) == {7}


def test_equal_pictures_have_equal_keys_and_are_kept_once(processor, store):
    prepared = prepare(processor, user(shown(image(1)), shown(image(1)), shown(image(2))))
    a, b, c = prepared.requests[0].media
    assert a.key == b.key != c.key and len(store) == 2
    for ref in prepared.pixels:
        store.release(ref)


BAD = [
    ([], "must not be empty"),
    ("hi", "must be a list"),
    (["hi"], "must be an object"),
    ([{"role": "robot", "content": "x"}], "role must be one of"),
    ([{"role": "function", "content": "x"}], "role must be one of"),
    ([{"role": "tool", "content": "x"}], "tool_call_id must say which call this answers"),
    ([{"content": "x"}], "role must be one of"),
    ([{"role": "user"}], "string or a list"),
    ([{"role": "user", "content": 3}], "string or a list"),
    ([{"role": "user", "content": []}], "must not be empty"),
    ([user("x")], "object with a type"),
    ([user({"type": "text"})], "text must be a string"),
    ([user({"type": "video_url", "video_url": {}})], "video_url.url must be a string"),
    ([user({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}})], "takes no videos"),
    ([user({"type": "input_audio", "input_audio": {}})], "input_audio.*not supported"),
    ([user({"type": "image", "image": "/etc/passwd"})], "not supported"),
    ([user({"type": "image_url", "image_url": {}})], "url must be a string"),
    ([user({"type": "image_url", "image_url": {"url": "file:///x"}})], "data: URL"),
    ([{"role": "system", "content": [shown(image())]}, user(text("x"))], "only user messages"),
    ([user(*[shown(image(i)) for i in range(4)])], "holds 4 pictures; at most 3"),
    ([user(text("see <image> here"))], "stands for a picture"),
    ([user(text("see <image> here"), shown(image()))], "stands for a picture"),
    ([user(text("x" * 100_000))], "maximum context length is 512"),
    ([user(text("a b " * 1000))], "maximum context length is 512 tokens. However, you requested"),
]


@pytest.mark.parametrize(("messages", "says"), BAD, ids=range(len(BAD)))
def test_bad_chats(processor, store, messages, says):
    with pytest.raises(InvalidRequest, match=says) as e:
        processor.chat("r", parse_messages(messages), SamplingParams())
    assert e.value.param.startswith("messages")
    store.check(idle=True)


def test_a_placeholder_made_of_two_parts_is_found(processor, store):
    template = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    from hydrainfer.processor import load_description

    model = load_description(processor.model.path, chat_template=template)
    glued = Processor(model, store, weights=b"", dtype="float32")
    with pytest.raises(InvalidRequest, match="stands for a picture"):
        prepare(glued, user(text("<ima"), text("ge>")))
    with pytest.raises(InvalidRequest, match="shows 0 of the 1"):
        prepare(glued, user(text("hi"), shown(image())))
    store.check(idle=True)


def test_a_failure_after_the_first_picture_holds_nothing(processor, store, model):
    damaged = {"type": "image_url", "image_url": {"url": url(image())[:200]}}
    with pytest.raises((MediaError, InvalidRequest)):
        prepare(processor, user(shown(image(1)), damaged))
    store.check(idle=True)
    with pytest.raises(InvalidRequest, match=r"\d+ in the messages, 500 in the completion"):
        prepare(processor, user(shown(image(1)), shown(image(2))), max_tokens=500)
    store.check(idle=True)
    small = PixelStore(10_000)
    with pytest.raises(RequestTooLarge):  # alone it is more than there ever is
        prepare(Processor(model, small, weights=b"", dtype="float32"), user(shown(image(1)), shown(image(2))))
    small.check(idle=True)
    held = small.put(b"of another request", np.zeros(5_000, np.uint8))
    with pytest.raises(Overloaded):
        prepare(Processor(model, small, weights=b"", dtype="float32"), user(shown(image(1))))
    small.release(held)
    small.check(idle=True)


def test_completions_of_every_kind_of_prompt(processor):
    def ids(prompt, **sampling):
        prepared = processor.complete("r", prompt, SamplingParams(**sampling))
        assert prepared.continues
        return [list(r.prompt_ids) for r in prepared.requests]

    (one,) = ids("hello there")
    assert ids(["hello there", "hello there"]) == [one, one] and ids(one) == [one] and ids([one, [5]], n=2) == [
        one, one, [5], [5],
    ]  # fmt: skip
    prepared = processor.complete("r", ["a", "b"], SamplingParams(n=2))
    assert [r.id for r in prepared.requests] == ["r-0", "r-1", "r-2", "r-3"]
    assert [r.choice for r in prepared.requests] == [0, 1, 0, 1] and len(prepared.prompts) == 2


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "must be a string"),
        ([""], "empty"),
        ([[]], "must be a string"),
        ([1, "a"], "must be a string"),
        ([True], "must be a string"),
        ({"a": 1}, "must be a string"),
        (None, "must be a string"),
        ([2048], "ids 0 to 2047"),
        ([-1], "token id -1"),
        ("an <image>", "stands for a picture"),
        ([5, 2000], "image token id 2000"),
        ("x" * 10_000_000, "hold at most"),
        ([5] * 600, "600 in the prompt"),
        (["a"] * 200, "must not exceed 128"),
    ],
)
def test_bad_prompts(processor, prompt, says):
    with pytest.raises(InvalidRequest, match=says):
        processor.complete("r", prompt, SamplingParams())


def released(processor, prepared):
    for ref in prepared.pixels:
        processor.pixels.release(ref)
    return [(r.prompt_ids, r.media) for r in prepared.requests]


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_with_placeholders_is_the_chat_it_was_rendered_from(processor, model, store, as_ids):
    messages = [user({"type": "image", "image": image(1)}, text("and"), {"type": "image", "image": image(2)})]
    typed = parse_messages(messages, local=True)
    prompt = model.template.render(typed)
    of_chat = released(processor, processor.chat("r", typed, SamplingParams()))
    given = {"prompt_token_ids": model.tokenizer.encode(prompt, add_special_tokens=False).ids} if as_ids else {}
    pictures = [image(1), np.asarray(image(2))]
    (one,) = parse_prompts({"prompt": prompt, **given, "multi_modal_data": {"image": pictures}})
    prepared = processor.chat("r", (one.message,), SamplingParams(), prompt=one.prompt)
    assert prepared.continues and released(processor, prepared) == of_chat
    store.check(idle=True)


@pytest.mark.parametrize("pictures", [[], [image(1)], [image(i) for i in range(3)]])
def test_there_is_a_placeholder_for_every_picture(processor, store, pictures):
    (one,) = parse_prompts({"prompt": "<image> or <image>?", "multi_modal_data": {"image": pictures}, **OPTIONS})
    with pytest.raises(InvalidRequest, match=f"holds <image> 2 times for {len(pictures)} pictures"):
        processor.chat("r", (one.message,), SamplingParams(), prompt=one.prompt)
    store.check(idle=True)


def test_every_form_of_prompts():
    ids, picture = [1, 2, 3], image(1)
    assert [p.prompt for p in parse_prompts("a")] == ["a"]
    assert [p.prompt for p in parse_prompts(ids)] == [p.prompt for p in parse_prompts([ids])] == [(1, 2, 3)]
    assert [p.prompt for p in parse_prompts(iter(["a", "b"]))] == ["a", "b"] and parse_prompts([]) == []
    mixed = ["a", ids, (4, 5), {"prompt": "b"}, {"prompt_token_ids": ids, "prompt": "of no use", "cache_salt": None}]
    assert [p.prompt for p in parse_prompts(mixed)] == ["a", (1, 2, 3), (4, 5), "b", (1, 2, 3)]
    assert all(p.message is None and p.options is None for p in parse_prompts(mixed))
    assert parse_prompts({"prompt": "a", "multi_modal_data": {"image": []}})[0].message is None
    for pictures, n in ((picture, 1), ([picture], 1), ((picture, b"x", "p.png"), 3), (np.asarray(picture), 1)):
        (one,) = parse_prompts([{"prompt": "a", "multi_modal_data": {"image": pictures, "video": None}, **OPTIONS}])
        assert len(one.message.images) == n and one.options == OPTIONS["mm_processor_kwargs"]


def test_every_form_of_videos():
    frames = [image(i) for i in range(4)]
    array = np.stack([np.asarray(f) for f in frames])
    file = {"fps": 30.0, "duration": 8.0}
    for video, n, fps in (
        (array, 1, 2.0),
        (frames, 1, 2.0),
        ([array, b"a file"], 2, 2.0),
        ((array, array), 2, 2.0),
        ((array, {"fps": 3.0}), 1, 3.0),
        ([(frames, file), (array, file)], 2, 0.5),
    ):
        (one,) = parse_prompts({"prompt": "a", "multi_modal_data": {"video": video}})
        assert len(one.message.media) == n and {part.fps for part in one.message.media} == {fps}
        assert np.array_equal(one.message.media[0].source, array)


OPTIONS = {"mm_processor_kwargs": {"max_pixels": 9999}}
ANY = {"a": 1}


@pytest.mark.parametrize("wrong", [None, 5, 1.5, True, b"text", object(), Image, image(1)])
def test_prompts_of_a_wrong_type_are_refused_with_their_place(wrong):
    with pytest.raises(InvalidRequest, match=r"prompts must be a text, .*, not \w+"):
        parse_prompts(wrong)
    with pytest.raises(InvalidRequest, match=r"prompts.1 must be a text, .*, not \w+"):
        parse_prompts(["a", wrong])
    for key in ("prompt", "prompt_token_ids"):
        with pytest.raises(InvalidRequest, match=r"prompts.1(.prompt_token_ids must be| needs)"):
            parse_prompts(["a", {key: wrong}])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "prompts.1 needs prompt"),
        (ANY, "'a' is not supported; a prompt's keys are prompt, prompt_token_ids, multi_modal_data"),
        ({"role": "user", "content": "a"}, "'role' is not supported"),
        ({"prompt": "a", "prompt_embeds": [0.5]}, "'prompt_embeds' is not supported"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "'encoder_prompt' is not supported"),
        ({"prompt": ["a"]}, "needs prompt, a text"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids must be a list of token ids"),
        ({"prompt_token_ids": [1, "2"]}, "must be a list of token ids"),
        ({"prompt": "a", "multi_modal_data": image(1)}, "multi_modal_data must be a dict, not Image"),
        ({"prompt": "a", "multi_modal_data": {"audio": b"x"}}, "multi_modal_data: 'audio' is not supported"),
        ({"prompt": "a", "multi_modal_data": {"image": 5}}, "multi_modal_data.image must be a PIL image"),
        ({"prompt": "a", "multi_modal_data": {"image": np.zeros((3, 8, 8))}}, "uint8 array .height, width, 3"),
        (
            {"prompt": "a", "multi_modal_data": {"video": [5]}},
            "multi_modal_data.video must be bytes, a path or an array",
        ),
        ({"prompt": "a", "multi_modal_data": {"video": [image(1), image(1, (9, 9))]}}, "must have one size"),
        ({"prompt": "a", "multi_modal_data": {"video": (b"x", {"fps": "two"})}}, "fps must be a number"),
        ([1, "a"], "prompts.1 must be a list of token ids"),
        ([["a"]], "prompts.1 must be a list of token ids"),
    ],
)
def test_a_wrong_prompt_says_what_is_wrong(wrong, says):
    with pytest.raises(InvalidRequest, match=says):
        parse_prompts(["a", wrong])


def test_ids_in_sampling_must_exist(processor):
    for fields in ({"stop_token_ids": (9999,)}, {"logit_bias": ((2048, 1.0),)}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(fields))} takes token ids from 0 to 2047"):
            processor.complete("r", "a", SamplingParams(**fields))


def test_round_trip_and_bos(processor):
    ids = processor.encode("hello world")
    assert processor.decode(ids) == "hello world"
    assert processor.encode("<s>hello").count(1) == 1
    with pytest.raises(InvalidRequest):
        processor.decode([99_999])


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"], ids=["no bos", "bos"])
def test_the_template_alone_decides_about_bos_where_text_is_all_a_model_takes(tmp_path, store, written):
    """The templates of zephyr-7b-beta, TinyLlama-1.1B-Chat and OpenHermes-2.5 write none; their tokenizers add it."""
    path = make_text(tmp_path, "mistral")
    template = path / "chat_template.jinja"
    template.write_text(written + "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    processor = Processor(load_description(path), store, weights=b"", dtype="float32")
    reference = AutoTokenizer.from_pretrained(path)
    said = [{"role": "user", "content": "hello world"}]
    want = reference.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    assert want.count(1) == bool(written)
    assert list(prepare(processor, *said).prompts[0]) == processor.encode_chat(parse_messages(said)) == want
    assert prompts_of(str(path)).text("hello world", 0) == len(want)
    assert processor.encode("hello world") == reference("hello world")["input_ids"]
    assert processor.encode("hello world").count(1) == 1


def test_a_token_that_only_the_tokenizer_has(tmp_path, store):
    """In NousResearch/Llama-2-7b-chat-hf, the table of embeddings ends before <pad>."""
    path = make_text(tmp_path, "mistral")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([f"<{i}>" for i in range(tokenizer.get_vocab_size(), 2049)])
    tokenizer.save(str(path / "tokenizer.json"))
    processor = Processor(load_description(path), store, weights=b"", dtype="float32")
    assert max(processor.complete("r", "a <2047> b", SamplingParams()).prompts[0]) == 2047
    with pytest.raises(InvalidRequest, match="prompt holds '<2048>', which the tokenizer knows and the model lacks"):
        processor.complete("r", ["a", "a <2048> b"], SamplingParams())
    with pytest.raises(InvalidRequest, match="messages holds '<2048>'") as caught:
        prepare(processor, user(text("a <2048> b")))
    assert caught.value.param == "messages"


def test_local_pictures_are_for_python_callers_only(processor, store, tmp_path):
    image(1).save(tmp_path / "p.png")
    file = tmp_path / "p.png"
    sources = [(name, image(1)) for name in ("image", "image_pil")]
    sources += [("image", source) for source in (np.asarray(image(1)), file, str(file), file.read_bytes())]
    for name, source in sources:
        messages = [user({"type": name, name: source})]
        prepared = processor.chat("r", parse_messages(messages, local=True), SamplingParams())
        for ref in prepared.pixels:
            store.release(ref)
        with pytest.raises(InvalidRequest, match="not supported"):
            parse_messages(messages)
    for name, url in (("image", "https://example.com/p.png"), ("video", "data:video/mp4;base64,AA")):
        with pytest.raises(InvalidRequest, match=f'send a URL as ."type": "{name}_url"'):
            parse_messages([user({"type": name, name: url})], local=True)
    with pytest.raises(InvalidRequest, match="cannot read"):
        processor.chat(
            "r", parse_messages([user({"type": "image", "image": "/nowhere"})], local=True), SamplingParams()
        )
    store.check(idle=True)
