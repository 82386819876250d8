"""The conversion of text to token ids and back: a checkpoint's tokenizer, chat template and placeholders
(`ModelDescription`), prompts with their placeholders, detokenising and stop strings.

Called by `Processor`, by `server` for streams, by `assemble` and `planner` for the description. Never decodes pictures.
"""

from hydrainfer.processor.text.answer import answer_stream
from hydrainfer.processor.text.checkpoint import ModelDescription, load_description, load_tokenizer
from hydrainfer.processor.text.detokenize import Detokenizer, TextStream
from hydrainfer.processor.text.harmony_form import harmony_grammar
from hydrainfer.processor.text.piece import AnswerPiece, AnswerStream, CallDelta, together
from hydrainfer.processor.text.prompt import (
    check_ids,
    check_known,
    check_length,
    check_text,
    encode,
    encode_rendered,
    expand,
    in_order,
    predicted,
    resolve_max_tokens,
    spellings,
)
from hydrainfer.processor.text.reasoning import Thinking
from hydrainfer.processor.text.tool_format import FORMATS, HARMONY, ToolFormat, calls_grammar
from hydrainfer.processor.text.vocabulary import Vocabulary

__all__ = [
    "FORMATS",
    "HARMONY",
    "AnswerPiece",
    "AnswerStream",
    "CallDelta",
    "Detokenizer",
    "ModelDescription",
    "TextStream",
    "Thinking",
    "ToolFormat",
    "Vocabulary",
    "answer_stream",
    "calls_grammar",
    "check_ids",
    "check_known",
    "check_length",
    "check_text",
    "encode",
    "encode_rendered",
    "expand",
    "harmony_grammar",
    "in_order",
    "load_description",
    "load_tokenizer",
    "predicted",
    "resolve_max_tokens",
    "spellings",
    "together",
]
