"""The verbs `bench`, `bench compare` and `trace`: what was typed → what `hydrainfer.workload` is asked for.

Called by the CLI. Measures nothing itself.
"""

from hydrainfer.benching.commands import app, trace

__all__ = ["app", "trace"]
