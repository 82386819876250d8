"""`hydrainfer profile` and `hydrainfer serve --layout auto`: asks the planner, shows and writes what it answers.

Called by the CLI. The search itself is `hydrainfer.planner`; devices are measured by `hydrainfer.assemble.measure`.
"""

from hydrainfer.profiling.commands import ProfileCommand, profile

__all__ = ["ProfileCommand", "profile"]
