"""Rules that choose the instance a request goes to next, by name in `RULES`, and `Placer`, which applies one of them.

Called by the server for new requests and by every engine for the next stage of its requests. Rules read the roster and
never change it. A rule is one file here and one entry of `RULES`.
"""

from hydrainfer.cluster.placing.placer import RULES, Placer
from hydrainfer.cluster.placing.rule import Choice, Rule

__all__ = ["RULES", "Choice", "Placer", "Rule"]
