"""The verbs `bench`, `bench compare` and `trace`: from command-line flags to calls of `hydrainfer.workload`.

Called by the CLI. Measures nothing itself.
"""

from hydrainfer.benching.commands import app, trace

__all__ = ["app", "trace"]
