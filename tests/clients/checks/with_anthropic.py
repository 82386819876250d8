"""The anthropic package: messages with pictures, streams, tools, counting."""

import anthropic
from common import ANSWER, CALLS, KEY, PICTURE, QUESTION, SEES, Seen, run

HOW = {"max_tokens": 40, "extra_body": {"temperature": 0}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
MESSAGES = [
    {"role": "user", "content": [{"type": "image", "source": SOURCE}, {"type": "text", "text": QUESTION}]},
]
sees = anthropic.Anthropic(base_url=SEES.removesuffix("/v1"), api_key=KEY, max_retries=0)
calls = anthropic.Anthropic(base_url=CALLS.removesuffix("/v1"), api_key=KEY, max_retries=0)


def pictures():
    answer = sees.messages.create(model="shapes", messages=MESSAGES, **HOW)
    assert answer.content[0].text == ANSWER and answer.stop_reason == "end_turn" and answer._request_id


def streaming():
    with sees.messages.stream(model="shapes", messages=MESSAGES, **HOW) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens > 5


def counting():
    assert sees.messages.count_tokens(model="shapes", messages=MESSAGES).input_tokens > 20


def models():
    assert "shapes" in [model.display_name for model in sees.models.list()]


def tools():
    tool = {"name": "paint", "description": "Paints.", "input_schema": Seen.model_json_schema()}
    answer = calls.messages.create(
        model="tools",
        messages=[{"role": "user", "content": "Paint it."}],
        tools=[tool],
        tool_choice={"type": "tool", "name": "paint"},
        **HOW | {"max_tokens": 200},
    )
    assert answer.stop_reason == "tool_use" and Seen.model_validate(answer.content[-1].input)


def errors():
    try:
        sees.messages.create(model="nothing", messages=MESSAGES, **HOW)
    except anthropic.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


if __name__ == "__main__":
    run(pictures, streaming, counting, models, tools, errors)
