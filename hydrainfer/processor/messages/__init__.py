"""A client's messages and prompts, checked and typed, and the parts that they consist of.

Called by `server` and the offline API (`parse_messages`, `parse_prompts`); `text`, `fetching` and `workers` use its
types. Never fetches a URL, never tokenises.
"""

from hydrainfer.processor.messages.chat import ChatMessage, ImagePart, TextPart, parse_messages
from hydrainfer.processor.messages.python_prompts import PythonPrompt, is_id, parse_prompts
from hydrainfer.processor.messages.tools import Tools, parse_tools, read_arguments
from hydrainfer.processor.messages.video_part import VideoPart, VideoReading

__all__ = [
    "ChatMessage",
    "ImagePart",
    "PythonPrompt",
    "TextPart",
    "Tools",
    "VideoPart",
    "VideoReading",
    "is_id",
    "parse_messages",
    "parse_prompts",
    "parse_tools",
    "read_arguments",
]
