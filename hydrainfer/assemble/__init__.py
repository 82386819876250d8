"""The one room that names concrete classes: from a configuration to running instances. Nobody but the commands and the
offline API imports it."""

from hydrainfer.assemble.model import Progress
from hydrainfer.assemble.server import ServerParts, start_instance

__all__ = ["Progress", "ServerParts", "start_instance"]
