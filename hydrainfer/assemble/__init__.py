"""The assembly of running instances from a configuration; the only package that names the others' concrete classes.
The commands, the offline API and what measures devices import it."""

from hydrainfer.assemble.model import Progress, free_unused
from hydrainfer.assemble.server import ServerParts, start_instance

__all__ = ["Progress", "ServerParts", "free_unused", "start_instance"]
