"""LiteLLM: completions whole and streamed, pictures, tools, structured output, errors of its own types."""

import litellm
from common import ANSWER, CALLS, KEY, SEES, Seen, run, seen_parts

HOW = {"api_key": KEY, "temperature": 0, "max_tokens": 40}
MESSAGES = [{"role": "user", "content": seen_parts()}]
PAINT = {"type": "function", "function": {"name": "paint", "parameters": Seen.model_json_schema()}}


def pictures():
    answer = litellm.completion("openai/shapes", MESSAGES, api_base=SEES, **HOW)
    assert answer.choices[0].message.content == ANSWER and answer.usage.completion_tokens > 5


def streaming():
    chunks = litellm.completion("openai/shapes", MESSAGES, api_base=SEES, stream=True, **HOW)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER


def hosted_vllm_provider():
    answer = litellm.completion("hosted_vllm/shapes", MESSAGES, api_base=SEES, **HOW)
    assert answer.choices[0].message.content == ANSWER


def tools():
    ask = [{"role": "user", "content": "Paint it."}]
    answer = litellm.completion(
        "openai/tools", ask, api_base=CALLS, tools=[PAINT], tool_choice="required", **HOW | {"max_tokens": 200}
    )
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "paint" and Seen.model_validate_json(call.arguments)


def structured_output():
    ask = [{"role": "user", "content": "Look."}]
    answer = litellm.completion("openai/tools", ask, api_base=CALLS, response_format=Seen, **HOW | {"max_tokens": 100})
    assert Seen.model_validate_json(answer.choices[0].message.content)


def errors():
    try:
        litellm.completion("openai/nothing", MESSAGES, api_base=SEES, num_retries=0, **HOW)
    except litellm.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


if __name__ == "__main__":
    run(pictures, streaming, hosted_vllm_provider, tools, structured_output, errors)
