"""The bookkeeping of cache blocks: specs by kind of state, pools, leases, reuse by content key.

Called by the scheduler (and, for specs, by models, storage and planner). Never touches bytes, devices or time. A new
kind of state is a subclass of `CacheSpec`.
"""

from hydrainfer.cache.arena import CacheSizes, Split, padded, share_memory
from hydrainfer.cache.kinds import EmbedSpec, FullSpec, WindowSpec, specs_of
from hydrainfer.cache.leases import CacheSet, Hit, Lease
from hydrainfer.cache.pool import BlockPool, SlidingPool
from hydrainfer.cache.sizing import size_caches, tokens_in, too_small
from hydrainfer.cache.spec import DTYPE_BYTES, TOKENS_PER_RUNNING, CacheSpec, Found, Part, Scan, Wishes, for_stage
from hydrainfer.cache.state import StateLayout, StateSpec
from hydrainfer.cache.tiers import DEVICE, HOST, Fetch, Pulls, Tier, host_sizes

__all__ = [
    "DEVICE",
    "DTYPE_BYTES",
    "HOST",
    "TOKENS_PER_RUNNING",
    "BlockPool",
    "CacheSet",
    "CacheSizes",
    "CacheSpec",
    "EmbedSpec",
    "Fetch",
    "Found",
    "FullSpec",
    "Hit",
    "Lease",
    "Part",
    "Pulls",
    "Scan",
    "SlidingPool",
    "Split",
    "StateLayout",
    "StateSpec",
    "Tier",
    "WindowSpec",
    "Wishes",
    "for_stage",
    "host_sizes",
    "padded",
    "share_memory",
    "size_caches",
    "specs_of",
    "tokens_in",
    "too_small",
]
