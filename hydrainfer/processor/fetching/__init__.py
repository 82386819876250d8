"""Bytes of what URLs name: http(s) from checked addresses, `file:` from named directories, all within limits.

Called by `server` before a request is prepared. The one part that touches a network, on an event loop and thread of its
own. Never decodes what it fetches.
"""

from hydrainfer.processor.fetching.fetch import Fetcher, FetchLimits, Wanted

__all__ = [
    "FetchLimits",
    "Fetcher",
    "Wanted",
]
