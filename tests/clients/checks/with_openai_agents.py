"""openai-agents: agents over chat completions and over responses, with a typed answer and with a tool."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import ANSWER, CALLS, KEY, PICTURE, QUESTION, SEES, Seen, run
from openai import AsyncOpenAI

set_tracing_disabled(True)
PARTS = [{"type": "input_image", "image_url": PICTURE, "detail": "auto"}, {"type": "input_text", "text": QUESTION}]
ASK = [{"role": "user", "content": PARTS}]
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


def answered(kind, base, name, ask, **agent):
    async def answer():
        async with AsyncOpenAI(base_url=base, api_key=KEY) as client:
            model = KINDS[kind](model=name, openai_client=client)
            settings = agent.pop("settings", {})
            one = Agent(
                "one", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200, **settings), **agent
            )
            return (await Runner.run(one, ask, max_turns=2)).final_output

    return asyncio.run(answer())


def pictures_over_chat():
    assert answered("chat", SEES, "shapes", ASK) == ANSWER


def pictures_over_responses():
    assert answered("responses", SEES, "shapes", ASK) == ANSWER


def typed_answers():
    assert isinstance(answered("chat", CALLS, "tools", "Look.", output_type=Seen), Seen)


def tools():
    painted = []

    @function_tool(strict_mode=False)
    def paint(seen: Seen) -> str:
        """Paint something."""
        painted.append(seen)
        return "done"

    answered(
        "chat",
        CALLS,
        "tools",
        "Paint it.",
        tools=[paint],
        settings={"tool_choice": "paint"},
        tool_use_behavior="stop_on_first_tool",
    )
    assert painted


if __name__ == "__main__":
    run(pictures_over_chat, pictures_over_responses, typed_answers, tools)
