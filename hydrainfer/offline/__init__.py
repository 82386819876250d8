"""Offline use: the engine, the scheduler and the processor of a server, driven from Python.

Names are vLLM's where the meaning is. `params` and `outputs` need no torch and are there at once.
"""

from typing import TYPE_CHECKING, Any

from hydrainfer.offline.outputs import CompletionOutput, RequestOutput, ToolCall
from hydrainfer.offline.params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)

if TYPE_CHECKING:
    from hydrainfer.offline.llm import LLM
    from hydrainfer.offline.streaming import AsyncLLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported on first use, because it imports torch
        from hydrainfer.offline.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from hydrainfer.offline.streaming import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'hydrainfer.offline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
