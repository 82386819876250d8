"""Mistakes that others have made with prefix caches, made here on purpose: a property test catches each at once.

(What is not here yet, as layers that predict several tokens, cannot be got wrong yet.)
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from hydrainfer.cache import BlockPool, CacheSet, FullSpec, Scan, SlidingPool, StateSpec, WindowSpec
from hydrainfer.core import Lane, LiveSequence
from hydrainfer.core import chain as chains
from hydrainfer.scheduler import Scheduler
from hydrainfer.scheduler import drafts as drafting
from hydrainfer.scheduler.room import SequenceRoom
from hydrainfer.scheduler.saving import Saving
from tests.scheduler import test_prefix, test_properties

pytestmark = pytest.mark.unit
ROOM = test_prefix.test_with_room_for_all_everything_is_found_that_can_be
FEW = test_prefix.test_with_few_blocks_what_is_found_is_right_and_whole
FAILS = test_prefix.test_blocks_of_a_failed_batch_are_never_found
TRAFFIC = test_properties.test_every_request_ends_with_its_tokens_within_budgets_and_pools_come_back_whole


def publish_at_launch(patch):
    """The index promises what is not written yet (I1)."""
    real = Scheduler.next

    def mutated(self, now, lane):
        turn = real(self, now, lane)
        for item in turn.batch.work if turn.batch and lane is Lane.LANGUAGE else ():
            item.seq.n_computed += item.count
            self.room.settle(item.seq)
            item.seq.n_computed -= item.count
        return turn

    patch.setattr(Scheduler, "next", mutated)


def slide_before_publish(patch):
    """What is given back is published under another block's key."""
    real = SequenceRoom._publish_written

    def mutated(self, seq, *, leaves=False):
        lease = self._leases[seq.id]
        for name, first in lease.first.items():
            spec = self.caches.specs[name]
            if spec.slides and name in lease.blocks and (stale := spec.stale(seq.n_computed)) > first:
                self.caches.slide(lease, name, stale, spec.most(len(seq.tokens) - seq.n_computed))
        return real(self, seq, leaves=leaves)

    patch.setattr(SequenceRoom, "_publish_written", mutated)


def slide_by_drafted_tokens(patch):
    """A window drops what drafts would put out of sight, before they are verified."""
    real = Scheduler.apply

    def mutated(self, result, now):
        for item in result.batch.work if result.batch.n_drafts else ():
            item.seq.n_computed += item.count
            self.room.settle(item.seq)
            item.seq.n_computed -= item.count
        return real(self, result, now)

    patch.setattr(Scheduler, "apply", mutated)


def take_drafts_for_tokens(patch):
    """An answer depends on what was guessed (I6)."""

    def mutated(seq, drafts, sampled):
        seq.tokens += drafts
        return *drafts, sampled[-1]

    patch.setattr(drafting, "verified", mutated)


def sum_up_drafts(patch):
    """A state takes in what was guessed."""
    patch.setattr(StateSpec, "paged", True)


def share_after_take(patch):
    """Room for what is new evicts what was found."""

    def mutated(pool, n_fresh, keys, found):
        fresh, blocks = iter(pool.take(n_fresh)), []
        mine = {}
        for key, block in zip(keys, found):
            if block is None:
                block = mine.get(key)
                if block is None:
                    block = mine[key] = next(fresh)
                    blocks.append(block)
                    continue
            pool.share(block)
            blocks.append(block)
        return [*blocks, *fresh]

    patch.setattr(CacheSet, "_collect", staticmethod(mutated))


def skip_adoption(patch):
    """Who computes what is published keeps its own blocks: those that continue it outlive the published ones."""
    real = BlockPool.publish

    def mutated(self, blocks, first, keys):
        for i, key in enumerate(keys, first):
            if key not in self:
                real(self, blocks, i, [key])
        return False

    patch.setattr(BlockPool, "publish", mutated)


def release_in_order(patch):
    """A block is evicted before those that continue it."""
    real = BlockPool.drop
    patch.setattr(BlockPool, "drop", lambda self, blocks: real(self, list(blocks)[::-1]))


def keep_what_was_computed_when_preempted(patch):
    """A sequence goes on from what its lease has not (I4)."""
    real = LiveSequence.rewind

    def mutated(self):
        n_computed = self.n_computed
        real(self)
        self.n_computed = n_computed

    patch.setattr(LiveSequence, "rewind", mutated)


def a_window_less_one(patch):
    real = WindowSpec.stale
    patch.setattr(WindowSpec, "stale", lambda self, n: real(self, n + self.block_tokens))


def a_window_more_one(patch):
    real = WindowSpec.stale
    patch.setattr(WindowSpec, "stale", lambda self, n: max(0, real(self, n) - 1))


def a_state_that_is_written_in_place(patch):
    """Who goes on from a state that others found writes over it (I2)."""
    real = StateSpec.scan

    def mutated(self, blocks, start, count):
        scan = real(self, blocks, start, count)
        return scan if scan.source < 0 else Scan(scan.source, ((scan.writes[0][0], scan.source), *scan.writes[1:]))

    patch.setattr(StateSpec, "scan", mutated)


def a_state_kept_when_another_falls_due(patch):
    """Blocks keep the numbers that they had: what is published is not what its key says."""
    patch.setattr(StateSpec, "jumps", False)


def each_kind_at_its_own_length(patch):
    """A hit of one kind that is longer than another's (I3)."""
    patch.setattr(WindowSpec, "safe", FullSpec.safe)


def leave_out_the_picture(patch):
    patch.setattr(chains, "_said", lambda span: b"%d" % span.n_tokens)


def leave_out_the_salt(patch):
    def mutated(self, request):
        return chains.chain_keys(b"", request.prompt_ids, self.block_tokens, request.media) if request.keys else []

    patch.setattr(FullSpec, "keys", mutated)


def leave_out_what_is_before(patch):
    """A block is named by its own tokens alone."""
    real = chains.chain_keys

    def mutated(before, ids, block_tokens, media=(), first=0):
        starts = range(first, len(ids) // block_tokens)
        return [k for i in starts for k in real(before[:0], ids[: (i + 1) * block_tokens], block_tokens, media, i)]

    patch.setattr(chains, "chain_keys", mutated)


def count_the_last_token(patch):
    """All of a prompt is found, and nothing is left to compute its first token from."""
    real = FullSpec.safe
    patch.setattr(FullSpec, "safe", lambda self, found, n_most: real(self, found, n_most + 1))


def keep_a_block_of_each_lease(patch):
    """A pool does not come back whole (I5)."""
    real = BlockPool.drop
    patch.setattr(BlockPool, "drop", lambda self, blocks: real(self, list(blocks)[1:]))


def count_a_shared_block_of_a_window_once(patch):
    """Who slides on finds no block to take, for others hold on to the one that it gave back (I5)."""
    patch.setattr(SlidingPool, "n_available", BlockPool.n_available)
    patch.setattr(SlidingPool, "n_shared_of", BlockPool.n_shared_of)


def write_what_is_shared(patch):
    """Eviction or a writer changes a block that a running request holds (I2, I7)."""
    patch.setattr(BlockPool, "share", lambda self, block: self._cached.pop(block, None))


def save_what_is_not_held(patch):
    """A store gets what another request has written meanwhile."""
    real = Saving.next_save

    def mutated(self):
        save = real(self)
        if save is not None:
            self._caches.release(save.lease)
            save.lease = None
        return save

    patch.setattr(Saving, "next_save", mutated)


MUTATIONS = [
    (publish_at_launch, FAILS),
    (slide_before_publish, TRAFFIC),
    (slide_by_drafted_tokens, TRAFFIC),
    (take_drafts_for_tokens, TRAFFIC),
    (sum_up_drafts, TRAFFIC),
    (share_after_take, FEW),
    (skip_adoption, FEW),
    (release_in_order, FEW),
    (keep_what_was_computed_when_preempted, TRAFFIC),
    (a_window_less_one, TRAFFIC),
    (a_window_more_one, TRAFFIC),
    (a_state_that_is_written_in_place, TRAFFIC),
    (a_state_kept_when_another_falls_due, TRAFFIC),
    (each_kind_at_its_own_length, TRAFFIC),
    (leave_out_the_picture, ROOM),
    (leave_out_the_salt, ROOM),
    (leave_out_what_is_before, ROOM),
    (count_the_last_token, FEW),
    (keep_a_block_of_each_lease, TRAFFIC),
    (count_a_shared_block_of_a_window_once, TRAFFIC),
    (write_what_is_shared, FEW),
    (save_what_is_not_held, TRAFFIC),
]


@pytest.mark.parametrize(("mutate", "found_by"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_each_is_caught(mutate, found_by, monkeypatch):
    quick = settings(
        max_examples=400,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    mutate(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - whatever breaks first
        quick(given(**found_by.hypothesis._given_kwargs)(found_by.hypothesis.inner_test))()
