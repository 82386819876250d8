"""Answers of a real engine behind HTTP that are held to a form: schemas, and required tools, whole and streamed."""

import asyncio
import json
from itertools import pairwise

import jsonschema
import msgspec
import openai
import pytest
from rich.console import Console

from hydrainfer import (
    LLM,
    AsyncLLM,
    InvalidRequest,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava
from tests.server.tool_templates import HERMES, LLAMA, MISTRAL

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "color": {"enum": ["red", "blue"]}},
    "required": ["n", "color"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
ASK = {"messages": [{"role": "user", "content": "How many?"}], "temperature": 1.0, "seed": 3, "max_tokens": 60}


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL], ids=["hermes", "llama3_json", "mistral"])
def test_schemas_and_required_tools(tmp_path, template):
    path = make_llava(tmp_path, context=2048)
    for old in path.glob("chat_template*"):
        old.unlink()
    (path / "chat_template.jinja").write_text(template)
    options = {"model": str(path), "port": 0, "served_model_name": "tiny,gpt-4o", "kv_cache_gib": 0.05}
    with serve_in_background(load(options), Console(quiet=True)) as (url, _):
        create = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0).chat.completions.create
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        answer = create(model="gpt-4o", n=3, response_format=form, **ASK)
        assert answer.model == "gpt-4o"
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        called = {"model": "tiny", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, **ASK}
        whole = create(**called).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        (call,) = whole.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        pieces = [c for chunk in create(**called, stream=True) for c in chunk.choices[0].delta.tool_calls or []]
        assert pieces[0].function.name == call.function.name == "paint"
        longer = create(**called, extra_body={"min_tokens": 60, "ignore_eos": True}).choices[0]
        assert longer.finish_reason == "tool_calls" and longer.message.tool_calls[0].function == call.function
        assert "".join(p.function.arguments for p in pieces) == call.function.arguments
    _same_offline(path, [choice.message.content for choice in answer.choices], call.function)


def _same_offline(path, formed, function):
    """Check that Python callers get the same answers in a form, and the same call, whole and as a stream."""
    sampling, ask = SamplingParams(temperature=1.0, seed=3, max_tokens=60), ASK["messages"]
    with LLM(path, kv_cache_gib=0.05) as llm:
        form = msgspec.structs.replace(sampling, n=3, structured_outputs=StructuredOutputsParams(json=SCHEMA))
        (answer,) = llm.chat(ask, form, use_tqdm=False)
        assert [one.text for one in answer.outputs] == formed
        for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
            (answer,) = llm.chat(ask, sampling, use_tqdm=False, tools=[TOOL], tool_choice=choice)
            (call,) = answer.outputs[0].tool_calls[:1]
            assert call.name == "paint"
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
        (answer,) = llm.chat(ask, sampling, use_tqdm=False, tools=[TOOL])
        assert answer.outputs[0].tool_calls == () and answer.outputs[0].text
        with pytest.raises(InvalidRequest, match="tool_choice names"):
            llm.chat(ask, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "sing"}})

    async def stream(kind, n=1):
        asked = msgspec.structs.replace(sampling, output_kind=kind, n=n)
        async with AsyncLLM(path, kv_cache_gib=0.05) as llm:
            return [one async for one in llm.chat(ask, asked, tools=[TOOL], tool_choice="required")]

    parts = [
        c for out in asyncio.run(stream(RequestOutputKind.DELTA, 3)) for one in out.outputs for c in one.tool_calls
    ]
    assert len(parts) >= 3 and len({call.id for call in parts}) == len(parts), "each call comes once"
    whole = asyncio.run(stream(RequestOutputKind.CUMULATIVE, 3))
    calls = [{c.id for one in out.outputs for c in one.tool_calls} for out in whole]
    assert all(before <= after for before, after in pairwise(calls)), "a call keeps its id"
    *before, last = asyncio.run(stream(RequestOutputKind.DELTA))
    assert not any(one.outputs[0].tool_calls for one in before)
    assert [(c.name, c.arguments) for c in last.outputs[0].tool_calls[:1]] == [(function.name, function.arguments)]
