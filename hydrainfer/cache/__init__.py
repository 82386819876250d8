"""The bookkeeping of cache blocks: specs by kind of state, pools, leases, reuse by content key.

Called by the scheduler (and, for specs, by models, storage and planner). Never touches bytes, devices or time. A new
kind of state is a subclass of `CacheSpec`.
"""

from hydrainfer.cache.arena import CacheSizes, Split, padded, share_memory
from hydrainfer.cache.host import HostTier, Lowering
from hydrainfer.cache.kinds import EmbedSpec, FullSpec, WindowSpec, specs_of
from hydrainfer.cache.leases import CacheSet, Hit, Lease
from hydrainfer.cache.pool import BlockPool, SlidingPool
from hydrainfer.cache.shared import (
    STORE,
    BlockName,
    BlockRef,
    StoreJob,
    StoreResult,
    StoreTier,
    layout_digest,
    name_of,
    refs_of,
    stored_bytes,
)
from hydrainfer.cache.sizing import size_caches, tokens_in, too_small
from hydrainfer.cache.spec import DTYPE_BYTES, TOKENS_PER_RUNNING, CacheSpec, Found, Part, Scan, Wishes, for_stage
from hydrainfer.cache.state import StateLayout, StateSpec
from hydrainfer.cache.tiers import DEVICE, HOST, Fetch, Pulls, Tier, host_sizes

__all__ = [
    "DEVICE",
    "DTYPE_BYTES",
    "HOST",
    "STORE",
    "TOKENS_PER_RUNNING",
    "BlockName",
    "BlockPool",
    "BlockRef",
    "CacheSet",
    "CacheSizes",
    "CacheSpec",
    "EmbedSpec",
    "Fetch",
    "Found",
    "FullSpec",
    "Hit",
    "HostTier",
    "Lease",
    "Lowering",
    "Part",
    "Pulls",
    "Scan",
    "SlidingPool",
    "Split",
    "StateLayout",
    "StateSpec",
    "StoreJob",
    "StoreResult",
    "StoreTier",
    "Tier",
    "WindowSpec",
    "Wishes",
    "for_stage",
    "host_sizes",
    "layout_digest",
    "name_of",
    "padded",
    "refs_of",
    "share_memory",
    "size_caches",
    "specs_of",
    "stored_bytes",
    "tokens_in",
    "too_small",
]
