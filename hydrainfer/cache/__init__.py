"""Bookkeeping of cache blocks: specs, pools, leases, reuse by content key.

Called by the scheduler (and, for specs, by models and storage). Never touches bytes, devices or time.
"""

from hydrainfer.cache.keys import embed_keys, embed_ranges
from hydrainfer.cache.leases import NO_HIT, CacheSet, Hit, Lease
from hydrainfer.cache.pool import BlockPool
from hydrainfer.cache.spec import DTYPE_BYTES, CacheKind, CacheSpec

__all__ = [
    "DTYPE_BYTES",
    "NO_HIT",
    "BlockPool",
    "CacheKind",
    "CacheSet",
    "CacheSpec",
    "Hit",
    "Lease",
    "embed_keys",
    "embed_ranges",
]
