"""Text to token ids and back: what a checkpoint says about tokenizer, chat template and pictures (`ModelDescription`),
prompts with their placeholders, detokenising and stop strings.

Called by `Processor`, by `server` for streams, by `assemble` and `planner` for the description. Never decodes pictures.
"""

from hydrainfer.processor.text.checkpoint import ModelDescription, load_description
from hydrainfer.processor.text.detokenize import Detokenizer, TextStream
from hydrainfer.processor.text.prompt import (
    check_ids,
    check_length,
    check_text,
    encode,
    expand,
    in_order,
    resolve_max_tokens,
)
from hydrainfer.processor.text.reasoning import REASONING, ReasoningFormat, ReasoningStream, Thinking, Thought
from hydrainfer.processor.text.tool_blocks import call_stream
from hydrainfer.processor.text.tool_calls import CallDelta, ToolCallStream, ToolDelta
from hydrainfer.processor.text.tool_format import FORMATS, ToolFormat, calls_grammar
from hydrainfer.processor.text.vocabulary import Vocabulary

__all__ = [
    "FORMATS",
    "REASONING",
    "CallDelta",
    "Detokenizer",
    "ModelDescription",
    "ReasoningFormat",
    "ReasoningStream",
    "TextStream",
    "Thinking",
    "Thought",
    "ToolCallStream",
    "ToolDelta",
    "ToolFormat",
    "Vocabulary",
    "call_stream",
    "calls_grammar",
    "check_ids",
    "check_length",
    "check_text",
    "encode",
    "expand",
    "in_order",
    "load_description",
    "resolve_max_tokens",
]
