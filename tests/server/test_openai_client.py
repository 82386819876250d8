"""The official client works unchanged, and raises its own typed errors."""

from functools import partial

import openai
import pytest

from hydrainfer.core import ErrorInfo, Output, Unavailable
from tests.server.conftest import image_part, picture

pytestmark = pytest.mark.cpu
SAID = "Hello from the engine, 你好 😀."


@pytest.fixture
def client(server):
    with server.openai() as client:
        yield client


def ask(*extra):
    return [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image_part(), *extra]}]


def test_the_openai_client_reads_a_whole_answer(client, server):
    answer = client.chat.completions.create(model="tiny", messages=ask())
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (SAID, "assistant", "stop")
    request = server.engine.submitted[-1]
    n_said = len(server.model.tokenizer.encode(SAID).ids) + 1
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.prompt_ids), n_said)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.model == "tiny" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("step_s", [0.0, 0.003])
def test_stream_equals_whole(client, server, step_s):
    server.engine.step_s = step_s
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=ask(), stream=True, stream_options={"include_usage": True}
        )
    )
    server.engine.step_s = 0.0
    *body, last = chunks
    texts = [c.choices[0].delta.content or "" for c in body]
    assert "".join(texts) == SAID and not any("\ufffd" in t for t in texts)
    assert body[0].choices[0].delta.role == "assistant" and all(c.usage is None for c in body)
    assert [c.choices[0].finish_reason for c in body] == [None] * (len(body) - 1) + ["stop"]
    assert last.choices == [] and last.usage.completion_tokens == len(server.model.tokenizer.encode(SAID).ids) + 1


def test_no_usage_chunk_unless_asked(client):
    chunks = list(client.chat.completions.create(model="tiny", messages=ask(), stream=True))
    assert all(c.choices for c in chunks)


def test_choices(client, server):
    answer = client.chat.completions.create(model="tiny", messages=ask(), n=3, max_tokens=2, seed=5)
    assert [c.index for c in answer.choices] == [0, 1, 2] and answer.usage.completion_tokens == 6
    assert {c.finish_reason for c in answer.choices} == {"length"}
    assert [r.choice for r in server.engine.submitted] == [0, 1, 2] and {r.seed for r in server.engine.submitted} == {5}
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="tiny", messages=ask(), n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {SAID}


@pytest.mark.parametrize("content", [SAID, [{"type": "text", "text": SAID[:9]}, {"type": "text", "text": SAID[9:]}]])
def test_a_prediction_reaches_the_engine_and_the_usage_says_what_came_true(client, server, content):
    """Whole, streamed, and of two choices the sum."""
    predicted = server.model.tokenizer.encode(SAID, add_special_tokens=False).ids
    send = partial(client.chat.completions.create, model="tiny", messages=ask())
    answer = send(prediction={"type": "content", "content": content})
    request = server.engine.submitted[-1]
    assert list(request.predicted_ids) == predicted and request.sampling.prediction == ""
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (len(predicted), 0)
    wrong = {"type": "content", "content": "Hello from somebody else, who says more."}
    *_, last = send(prediction=wrong, n=2, stream=True, stream_options={"include_usage": True})
    details, n_wrong = last.usage.completion_tokens_details, len(server.engine.submitted[-1].predicted_ids)
    assert 0 < details.accepted_prediction_tokens < n_wrong
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 2 * n_wrong
    assert send().usage.completion_tokens_details is None
    assert client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, server, stream):
    made = client.chat.completions.create(model="tiny", messages=ask(), stop=["engine,", "zzz"], stream=stream)
    if stream:
        chunks = list(made)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        choice = chunks[-1].choices[0]
    else:
        choice = made.choices[0]
        text = choice.message.content
    assert text == "Hello from the " and choice.finish_reason == "stop" and choice.stop_reason == "engine,"


def test_stop_token_ids_and_penalties_reach_the_engine(client, server):
    stop = server.model.tokenizer.encode(SAID).ids[3]
    answer = client.chat.completions.create(
        model="tiny",
        messages=ask(),
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        max_completion_tokens=9,
        max_tokens=3,
        logit_bias={"7": -100},
        extra_body={"stop_token_ids": [stop], "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1},
    )
    assert answer.choices[0].stop_reason == stop and answer.choices[0].finish_reason == "stop"
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert sampling.max_tokens == 9 and sampling.logit_bias == ((7, -100.0),) and sampling.min_tokens == 1


@pytest.mark.parametrize(("given", "used"), [({}, 0.0), ({"temperature": None}, 0.0), ({"temperature": 0.7}, 0.7)])
def test_the_checkpoint_says_how_to_sample_if_the_request_does_not(client, server, given, used):
    client.chat.completions.create(model="tiny", messages=ask(), **given)
    client.completions.create(model="tiny", prompt="once", max_tokens=1, **given)
    assert [r.sampling.temperature for r in server.engine.submitted] == [used] * 2  # do_sample is false there


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, server, stream):
    made = client.chat.completions.create(
        model="tiny", messages=ask(), logprobs=True, top_logprobs=2, max_tokens=6, stream=stream
    )
    content = (
        [e for c in made if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        if stream
        else made.choices[0].logprobs.content
    )
    assert len(content) == 6 and all(len(e.top_logprobs) == 2 and e.logprob == -0.5 for e in content)
    assert bytes(b for e in content for b in e.bytes).decode().strip() == server.model.tokenizer.decode(
        server.model.tokenizer.encode(SAID).ids[:6]
    )


def test_completions(client, server):
    answer = client.completions.create(model="tiny", prompt="once", max_tokens=4, logprobs=2)
    choice = answer.choices[0]
    tokens = choice.logprobs.tokens
    assert choice.text == "".join(tokens) and choice.text.startswith(" Hello"[:3]) and choice.finish_reason == "length"
    assert choice.logprobs.text_offset == [sum(map(len, tokens[:i])) for i in range(4)]
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    several = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=1)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    ids = server.model.tokenizer.encode("once").ids
    streamed = list(client.completions.create(model="tiny", prompt=ids, max_tokens=4, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == choice.text
    assert client.completions.create(model="tiny", prompt="x").usage.completion_tokens == 16  # OpenAI's default


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_tokens", [0, 3])
def test_echo(client, server, stream, n_tokens):
    """The prompt stands before the answer, in the text as in the lists, and each token where its offset says."""
    prompt = "once 你 upon"
    ids = server.model.tokenizer.encode(prompt).ids
    options = {"model": "tiny", "prompt": prompt, "max_tokens": n_tokens, "logprobs": 2, "stream": stream}
    made = client.completions.create(**options, extra_body={"echo": True, "return_token_ids": True})
    parts = [c.choices[0] for c in made if c.choices] if stream else made.choices
    text = "".join(p.text for p in parts)
    tokens, likely, tops, offsets = (
        [x for p in parts if p.logprobs for x in getattr(p.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    said = client.completions.create(model="tiny", prompt=prompt, max_tokens=n_tokens or 1).choices[0].text
    assert text == prompt + (said if n_tokens else "") and parts[-1].finish_reason == "length"
    assert likely == [None, *[-0.25] * (len(ids) - 1), *[-0.5] * n_tokens]
    assert tops[0] is None and all(tops[1:]) and len(tops) == len(tokens) == len(likely)
    assert [t for p in parts for t in p.token_ids] == server.model.tokenizer.encode(server.say).ids[:n_tokens]
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        assert text[begin:end] in (token, token.lstrip(" "), "", "你")
    if not stream:
        assert made.usage.completion_tokens == n_tokens
    assert not server.engine.submitted[0].keys and server.engine.submitted[-1].keys


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_logprobs(server, chat):
    """vLLM's shape: by id, the token itself and the likeliest."""
    made = server.chat(prompt_logprobs=2) if chat else server.post("/v1/completions", prompt="once", prompt_logprobs=2)
    told = made.json()["prompt_logprobs"] if chat else made.json()["choices"][0]["prompt_logprobs"]
    ids = server.engine.submitted[-1].prompt_ids
    assert told[0] is None and len(told) == len(ids)
    for token, entry in zip(ids[1:], told[1:], strict=True):
        word = server.model.vocabulary.token_text(token)
        assert entry[str(token)] == {"logprob": -0.25, "rank": 1, "decoded_token": word} and len(entry) == 2
    plain = server.chat().json()
    assert "prompt_logprobs" not in plain and "prompt_logprobs" not in plain["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids(client, server, stream):
    extra = {"return_token_ids": True}
    said = [*server.model.tokenizer.encode(SAID).ids, 2]
    chat = client.chat.completions.create(model="tiny", messages=ask(), stream=stream, extra_body=extra)
    text = client.completions.create(model="tiny", prompt="once", max_tokens=200, stream=stream, extra_body=extra)
    if stream:
        chat, text = list(chat), list(text)
        assert chat[0].prompt_token_ids == list(server.engine.submitted[0].prompt_ids)
        assert [t for c in chat[1:] for t in c.choices[0].token_ids] == said
        assert text[0].choices[0].prompt_token_ids == list(server.engine.submitted[1].prompt_ids)
        assert [t for c in text for t in c.choices[0].token_ids] == said
    else:
        assert chat.prompt_token_ids == list(server.engine.submitted[0].prompt_ids)
        assert chat.choices[0].token_ids == text.choices[0].token_ids == said
        assert text.choices[0].prompt_token_ids == list(server.engine.submitted[1].prompt_ids)


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


async def test_async_client(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="alias", messages=ask())
        assert answer.choices[0].message.content == SAID and answer.model == "alias"
        text = ""
        async for chunk in await client.chat.completions.create(model="tiny", messages=ask(), stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == SAID


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
        (504, openai.InternalServerError),
    ],
)
def test_the_engines_errors_have_their_status_even_for_streams(client, server, status, kind, stream):
    server.fail = ErrorInfo(status, "the engine says no", retry_after_s=3.0)
    with pytest.raises(kind, match="the engine says no") as e:
        client.chat.completions.create(model="tiny", messages=ask(), stream=stream)
    assert e.value.status_code == status and e.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["submit", "output"])
def test_unavailable_says_when_to_come_back(client, server, stream, where):
    error = Unavailable("no instance can decode now; retry later", retry_after_s=5.0)
    server.fail = error if where == "submit" else ErrorInfo.of(error)
    with pytest.raises(openai.InternalServerError, match="no instance can decode") as e:
        client.chat.completions.create(model="tiny", messages=ask(), stream=stream, n=2)
    assert e.value.status_code == 503 and e.value.response.headers["retry-after"] == "5"
    assert (e.value.type, e.value.code) == ("service_unavailable", "unavailable")


def test_unavailable_after_the_first_token_is_an_event(client, server):
    server.engine.step_s = 0.01
    error = ErrorInfo.of(Unavailable("no instance can decode now; retry later", retry_after_s=5.0))
    stream = client.chat.completions.create(model="tiny", messages=ask(), stream=True, extra_body={"ignore_eos": True})
    with pytest.raises(openai.APIError, match="no instance can decode") as e:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                server.sessions.sink([Output(server.engine.submitted[0].id, finish_reason="error", error=error)])
    server.engine.step_s = 0.0
    server.engine.cancel([server.engine.submitted[0].id])  # it was not the engine that said so
    assert (e.value.type, e.value.code) == ("service_unavailable", "unavailable")
    assert e.value.body["param"] is None


def test_typed_errors(client):
    with pytest.raises(openai.NotFoundError) as e:
        client.chat.completions.create(model="gpt-4", messages=ask())
    assert e.value.code == "model_not_found" and e.value.param == "model"
    with pytest.raises(openai.UnprocessableEntityError, match="supported formats"):
        client.chat.completions.create(model="tiny", messages=ask(image_part(b"not a picture at all")))
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="tiny", messages=ask(), temperature=3)
    assert e.value.param == "temperature" and e.value.type == "invalid_request_error"
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(model="tiny", messages=ask(image_part(picture()[:300])), stream=True)
