"""Other protocols than OpenAI's chat, as translations to it and back: Responses, Anthropic's Messages, Ollama's.

Each has a file that turns a body into a chat's fields, one with the `Turn` that says the answer, and its routes.
What a request may have, who gets a place and when it ends is decided where it is for chats.
"""

from hydrainfer.server.fronts.ollama_routes import ollama_routes
from hydrainfer.server.fronts.routes import front_routes

__all__ = ["front_routes", "ollama_routes"]
