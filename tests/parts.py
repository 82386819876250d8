"""The parts behind the offline API. Only here do tests know where they are."""

from hydrainfer import LLM
from hydrainfer.assemble import ServerParts


def parts(llm: LLM) -> ServerParts:
    """The running parts of an `LLM`, which forgets them when it is closed."""
    return llm._instance
