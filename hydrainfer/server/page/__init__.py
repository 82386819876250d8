"""The page at `/`: its files, and what it reads: the load of the instances and the latest requests.

Called by the application. Its data come from `/v1`, so the page itself needs no key.
"""

from hydrainfer.server.page.files import page_routes
from hydrainfer.server.page.instances import instance_card, trouble
from hydrainfer.server.page.overview import EndedAfter, overview_body

__all__ = [
    "EndedAfter",
    "instance_card",
    "overview_body",
    "page_routes",
    "trouble",
]
