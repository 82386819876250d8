"""The openai package: chats, streams, typed answers, tools, responses, completions with their probabilities."""

import openai
from common import ANSWER, CALLS, KEY, SEES, Seen, run, seen_parts

HOW = {"temperature": 0, "max_tokens": 40}
MESSAGES = [{"role": "user", "content": seen_parts()}]
sees = openai.OpenAI(base_url=SEES, api_key=KEY, max_retries=0)
calls = openai.OpenAI(base_url=CALLS, api_key=KEY, max_retries=0)


def models():
    assert [card.id for card in sees.models.list()] == ["shapes"]


def pictures():
    answer = sees.chat.completions.create(model="shapes", messages=MESSAGES, **HOW)
    assert answer.choices[0].message.content == ANSWER and answer.usage.completion_tokens > 5


def streaming():
    chunks = sees.chat.completions.create(
        model="shapes", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **HOW
    )
    *said, last = list(chunks)
    assert "".join(c.choices[0].delta.content or "" for c in said) == ANSWER
    assert last.choices == [] and last.usage.completion_tokens > 5


def responses():
    question, picture = seen_parts()[1]["text"], seen_parts()[0]["image_url"]["url"]
    parts = [{"type": "input_image", "image_url": picture}, {"type": "input_text", "text": question}]
    ask = [{"role": "user", "content": parts}]
    answer = sees.responses.create(model="shapes", input=ask, temperature=0, max_output_tokens=40)
    assert answer.output_text == ANSWER
    with sees.responses.stream(model="shapes", input=ask, temperature=0, max_output_tokens=40) as stream:
        assert stream.get_final_response().output_text == ANSWER


def typed_answers():
    ask = [{"role": "user", "content": "Look."}]
    answer = calls.chat.completions.parse(
        model="tools", messages=ask, response_format=Seen, temperature=0, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Seen)
    answer = calls.responses.parse(model="tools", input="Look.", text_format=Seen, temperature=0, max_output_tokens=100)
    assert isinstance(answer.output_parsed, Seen)


def tools():
    tool = openai.pydantic_function_tool(Seen, name="paint")
    answer = calls.chat.completions.parse(
        model="tools",
        messages=[{"role": "user", "content": "Paint it."}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Seen)


def completions():
    answer = sees.completions.create(model="shapes", prompt="red", echo=True, logprobs=1, max_tokens=2)
    choice = answer.choices[0]
    assert choice.text.startswith("red") and choice.logprobs.token_logprobs[-1] <= 0


def errors():
    try:
        sees.chat.completions.create(model="nothing", messages=MESSAGES)
    except openai.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


if __name__ == "__main__":
    run(models, pictures, streaming, responses, typed_answers, tools, completions, errors)
