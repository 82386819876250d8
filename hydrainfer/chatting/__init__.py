"""A chat with a server: what is said and shown to it, and the terminal in which people do so.

Called by the CLI and the demo. Speaks HTTP only: the server may be anybody's.
"""

from hydrainfer.chatting.asking import Server, find_server
from hydrainfer.chatting.conversation import Conversation, ask_about, media_part

__all__ = ["Conversation", "Server", "ask_about", "find_server", "media_part"]
