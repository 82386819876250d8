"""Protocols that are translated to OpenAI's chat and back: Responses, Anthropic's Messages, Ollama's.

Each has a file that turns a body into the fields of a chat, one with the `ReplyTurn` that formats the answer, and its
routes. Limits, admission and deadlines are the same as for chats.
"""

from hydrainfer.server.fronts.ollama_routes import ollama_routes
from hydrainfer.server.fronts.routes import front_routes

__all__ = ["front_routes", "ollama_routes"]
