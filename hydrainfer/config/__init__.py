"""Frozen configuration schemas and the one loader (defaults < YAML < environment < flags).

Called by the CLI and the offline API. Never mutates a configuration, never looks at the machine.
"""

from hydrainfer.config.load import ENV_PREFIX, Loaded, Option, load, options
from hydrainfer.config.schema import ServeConfig

__all__ = ["ENV_PREFIX", "Loaded", "Option", "ServeConfig", "load", "options"]
