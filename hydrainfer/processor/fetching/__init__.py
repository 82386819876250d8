"""Downloads of the files that URLs name: http(s) from checked addresses, `file:` from named directories, all within
limits.

Called by `server` before a request is prepared. The only part of the processor that touches a network, on an event loop
and thread of its own. Never decodes what it downloads.
"""

from hydrainfer.processor.fetching.fetch import Fetcher, FetchLimits, Wanted

__all__ = [
    "FetchLimits",
    "Fetcher",
    "Wanted",
]
