"""`hydrainfer profile` and `hydrainfer serve --layout auto`: questions to the planner, and its answers shown and
written.

Called by the CLI. The search itself is `hydrainfer.planner`; devices are measured by `hydrainfer.costing.measure`.
"""

from hydrainfer.profiling.commands import ProfileCommand, profile

__all__ = ["ProfileCommand", "profile"]
