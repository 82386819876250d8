"""langchain-openai: whole, streamed, pictures, tools, structured output in all three modes."""

import json

from common import ANSWER, CALLS, KEY, SEES, Seen, run, seen_parts
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError

sees = ChatOpenAI(base_url=SEES, api_key=KEY, model="shapes", temperature=0, max_tokens=40)
calls = ChatOpenAI(base_url=CALLS, api_key=KEY, model="tools", temperature=0, max_tokens=200)


def pictures():
    assert sees.invoke([HumanMessage(seen_parts())]).content == ANSWER


def streaming():
    chunks = list(sees.stream([HumanMessage(seen_parts())]))
    assert "".join(c.content for c in chunks) == ANSWER and len(chunks) > 3


def usage():
    answer = sees.invoke([HumanMessage(seen_parts())])
    assert answer.usage_metadata["output_tokens"] > 5


def batch():
    assert [a.content for a in sees.batch([[HumanMessage(seen_parts())]] * 3)] == [ANSWER] * 3


def bind_tools():
    model = calls.bind_tools([Seen], tool_choice="any")
    (call,) = model.invoke("Paint it.").tool_calls[:1]
    assert call["name"] == "Seen" and Seen(**call["args"])


def tool_messages():
    first = calls.bind_tools([Seen], tool_choice="Seen").invoke("Paint it.")
    turn = [HumanMessage("Paint it."), first, ToolMessage("done", tool_call_id=first.tool_calls[0]["id"])]
    assert calls.bind_tools([Seen]).invoke(turn).response_metadata["finish_reason"]


def with_structured_output_function_calling():
    assert isinstance(calls.with_structured_output(Seen, method="function_calling").invoke("Look."), Seen)


def with_structured_output_json_schema():
    assert isinstance(calls.with_structured_output(Seen, method="json_schema").invoke("Look."), Seen)


def with_structured_output_json_mode():
    """Any object will do for this mode, and a model with random weights rarely finds an end: some seed does."""
    for seed in range(40):
        model = ChatOpenAI(base_url=CALLS, api_key=KEY, model="tools", temperature=1.5, seed=seed, max_tokens=40)
        try:
            found = model.with_structured_output(Seen, method="json_mode", include_raw=True).invoke("JSON.")
        except LengthFinishReasonError:
            continue
        assert isinstance(json.loads(found["raw"].content), dict)
        return
    raise AssertionError("no object came to an end")


if __name__ == "__main__":
    run(
        pictures,
        streaming,
        usage,
        batch,
        bind_tools,
        tool_messages,
        with_structured_output_function_calling,
        with_structured_output_json_schema,
        with_structured_output_json_mode,
    )
