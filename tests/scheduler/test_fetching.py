"""A sequence that is copied back from a tier may be cancelled, or its copy may fail: others notice nothing."""

import pytest

from hydrainfer.cache import CacheSet
from hydrainfer.core import Lane, LiveSequence, Role, Stage
from hydrainfer.scheduler import Budgets, Scheduler
from hydrainfer.scheduler.finding import Finder
from tests.scheduler.fakes import EMBED, KV, DictTier, FakeDevice, expected_tokens, make_request

pytestmark = pytest.mark.unit


class Rig:
    """A scheduler with room for two pictures, whose tier has what it has evicted. `copies` wait to be made."""

    def __init__(self):
        self.device = FakeDevice()
        self.tier = DictTier(self.device)
        self.caches = CacheSet({KV: 40, EMBED: 4})
        self.s = Scheduler(Role.parse("EPD"), self.caches, Budgets(tokens=64), tiers=[self.tier])
        self.copies, self.said = [], {}

    def turn(self):
        """One batch per lane."""
        self.copies += self.s.shifts()
        for lane in Lane:
            batch = self.s.next(0.0, lane).batch
            for outcome in self.s.apply(self.device.run(batch), 0.0) if batch is not None else ():
                self.said.setdefault(outcome.seq.id, []).extend(outcome.tokens)
        self.s.check()

    def copy(self, ok=True):
        """End the copies that were begun."""
        copies, self.copies = self.copies, []
        for shift in copies:
            for name, blocks in shift.pulls.blocks.items() if ok else ():
                for source, target in zip(*blocks, strict=True):
                    self.device.copy(name, shift.pulls.tier, self.device, shift.source, source, target)
            self.s.shifted(shift, 0.1 if ok else None, 0.0)

    def serve(self, *requests):
        for request in requests:
            self.s.add(request, 0.0)
        for _ in range(200):
            self.turn()
            self.copy()
        for request in requests:
            assert self.said[request.id] == expected_tokens(request)

    def check_idle(self):
        self.caches.check(idle=True)
        self.tier.check_idle()
        assert not self.s.fetching.live


def fetching(pictures=(1, 2)):
    """A rig in which picture 1 is in the tier, and a request for `pictures` is being fetched."""
    rig = Rig()
    for i in (1, 3, 4, 5):
        rig.serve(make_request(f"before{i}", pictures=[i]))
    request = make_request("r", pictures=pictures)
    rig.s.add(request, 0.0)
    rig.turn()
    rig.copies += rig.s.shifts()
    assert list(rig.s.fetching.live) == ["r"] and rig.copies
    return rig, request


def test_a_sequence_is_encoded_and_computed_once_its_copy_is_there():
    rig, request = fetching()
    for _ in range(5):
        rig.turn()
    assert not rig.said.get("r") and rig.device.n_encoded.get(b"picture2") is None
    rig.serve()
    assert rig.said["r"] == expected_tokens(request) and rig.device.n_encoded[b"picture1"] == 1
    rig.check_idle()


def test_a_cancelled_one_gives_everything_back_and_others_may_encode_its_pictures():
    rig, _ = fetching()
    rig.s.cancel("r")
    rig.copy()
    rig.serve(make_request("next", pictures=[2]))
    rig.check_idle()


def test_one_whose_copy_fails_is_computed_again():
    rig, request = fetching()
    rig.copy(ok=False)
    rig.serve()
    assert rig.said["r"] == expected_tokens(request)
    rig.check_idle()


def test_tokens_that_two_tiers_have_count_for_the_first():
    tiers = [DictTier(FakeDevice(), name=name) for name in ("first", "second")]
    finder = Finder(CacheSet({KV: 40, EMBED: 4}), tiers)
    seq = LiveSequence(make_request("r", n_text=40, salt=b""), (0.0, 0), 0.0)
    keys = finder.keys_of(seq)["kv"]
    for tier, n_blocks in zip(tiers, (3, 7), strict=True):
        tier.blocks = {("kv", key): i for i, key in enumerate(keys[:n_blocks])}
    hit = finder.match(seq, (Stage.PREFILL, Stage.DECODE))
    assert (hit.n_here, hit.n_tokens, hit.n_away) == (0, 7 * 4, {"first": 3 * 4, "second": 4 * 4})
    assert finder.match(seq, (Stage.PREFILL, Stage.DECODE), tiers=False).n_away is None
