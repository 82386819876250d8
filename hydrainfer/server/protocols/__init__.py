"""The APIs that clients speak: OpenAI's, and those that are translated to its chats and back.

Each declares itself as one `Protocol` in a file of its own. A translated one also has a file that turns a body into the
fields of a chat, and one with the `ReplyTurn` that formats the answer. Limits and deadlines are the same.
"""

from hydrainfer.server.protocols.messages import MESSAGES
from hydrainfer.server.protocols.ollama import OLLAMA
from hydrainfer.server.protocols.openai import OPENAI
from hydrainfer.server.protocols.responses import RESPONSES
from hydrainfer.server.protocols.tokens import TOKENS

PROTOCOLS = (OPENAI, TOKENS, RESPONSES, MESSAGES, OLLAMA)
"""The protocols of a server, in the order of their routes."""

__all__ = ["PROTOCOLS"]
