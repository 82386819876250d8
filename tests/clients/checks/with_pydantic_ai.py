"""pydantic-ai: agents with text, tool, native and streamed output, and with a picture."""

from common import ANSWER, CALLS, KEY, QUESTION, SEES, SHAPES, Seen, run
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

sees = OpenAIChatModel("shapes", provider=OpenAIProvider(base_url=SEES, api_key=KEY))
calls = OpenAIChatModel("tools", provider=OpenAIProvider(base_url=CALLS, api_key=KEY))
SETTINGS = {"temperature": 0, "max_tokens": 200}
PARTS = [BinaryContent(SHAPES.read_bytes(), media_type="image/png"), QUESTION]


def pictures():
    assert Agent(sees, model_settings=SETTINGS).run_sync(PARTS).output == ANSWER


def streaming():
    import asyncio

    async def stream():
        async with Agent(sees, model_settings=SETTINGS).run_stream(PARTS) as found:
            return [text async for text in found.stream_text(delta=True)]

    assert "".join(asyncio.run(stream())) == ANSWER


def tool_output():
    assert isinstance(Agent(calls, output_type=Seen, model_settings=SETTINGS).run_sync("Look.").output, Seen)


def native_output():
    agent = Agent(calls, output_type=NativeOutput(Seen), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Look.").output, Seen)


if __name__ == "__main__":
    run(pictures, streaming, tool_output, native_output)
