"""Operators by name: a plain-torch reference each, and faster variants chosen once at start and reported.

Called by models. Never holds weights, caches or state of requests; never decides what runs when.
"""

from hydrainfer.ops.batch import AttentionBatch, Segments, visible
from hydrainfer.ops.int8 import Int8Weight
from hydrainfer.ops.select import OPERATORS, OpSet, computes_sooner, select_ops, variants
from hydrainfer.ops.upload import to_device, upload

__all__ = [
    "OPERATORS",
    "AttentionBatch",
    "Int8Weight",
    "OpSet",
    "Segments",
    "computes_sooner",
    "select_ops",
    "to_device",
    "upload",
    "variants",
    "visible",
]
