"""LlamaIndex: chat whole and streamed, pictures, tools, structured answers."""

from common import ANSWER, CALLS, KEY, PICTURE, QUESTION, SEES, Seen, run
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

HOW = {"api_key": KEY, "is_chat_model": True, "temperature": 0, "context_window": 2048}
sees = OpenAILike(model="shapes", api_base=SEES, max_tokens=40, **HOW)
calls = OpenAILike(model="tools", api_base=CALLS, max_tokens=200, is_function_calling_model=True, **HOW)
ASK = [ChatMessage(role="user", blocks=[ImageBlock(url=PICTURE), TextBlock(text=QUESTION)])]


def pictures():
    assert sees.chat(ASK).message.content == ANSWER


def streaming():
    assert "".join(part.delta or "" for part in sees.stream_chat(ASK)) == ANSWER


def completions():
    assert sees.complete("Hello").text is not None


def structured_answers():
    assert isinstance(calls.as_structured_llm(Seen).chat([ChatMessage("Look.")]).raw, Seen)


def tools():
    tool = FunctionTool.from_defaults(lambda color, count: "done", name="paint", description="Paint.", fn_schema=Seen)
    answer = calls.chat_with_tools([tool], user_msg="Paint it.", tool_required=True)
    (call,) = calls.get_tool_calls_from_response(answer)[:1]
    assert call.tool_name == "paint" and Seen(**call.tool_kwargs)


if __name__ == "__main__":
    run(pictures, streaming, completions, structured_answers, tools)
