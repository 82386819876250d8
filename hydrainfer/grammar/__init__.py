"""Grammars that answers must match (JSON schema, regular expression, Lark): compiled within limits, cached, followed.

Called by `processor`, which checks grammars by compiling them, and by `runtime`, which asks for the tokens that may
come next. Never samples, never touches a device.
"""

from hydrainfer.grammar.choice import choice_rules
from hydrainfer.grammar.compile import Grammars, load_grammars
from hydrainfer.grammar.follow import Failure, Follower, Guided
from hydrainfer.grammar.schema import JSON_STYLE, without_unknown_formats

__all__ = [
    "JSON_STYLE",
    "Failure",
    "Follower",
    "Grammars",
    "Guided",
    "choice_rules",
    "load_grammars",
    "without_unknown_formats",
]
