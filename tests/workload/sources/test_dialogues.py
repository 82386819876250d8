"""Conversations whose turns come back after seconds, at whatever rate requests come."""

from itertools import pairwise

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.workload.sources import Dialogues, Workload, in_turn, read_workload

pytestmark = pytest.mark.unit
LATER = Workload(dataset="d", n_pictures=0, dialogues=Dialogues(turns=4, apart_s="uniform:20:40"))


def places_of(chats):
    """The places in the order of the turns of each conversation."""
    places = {}
    for i, chat in enumerate(chats):
        places.setdefault(chat.talk, []).append(i)
    return places.values()


@pytest.mark.parametrize("rate", [0.5, 2.0, 8.0])
def test_turns_are_as_many_seconds_apart_at_every_rate(rate):
    chats = LATER.chats(2000, seed=1)
    order = in_turn(chats, rate)
    assert sorted(map(id, order)) == sorted(map(id, chats))
    early = [talk for talk in places_of(order) if talk[-1] < 1000]
    assert len(early) > 50
    for talk in early:
        turns = [order[i] for i in talk]
        assert [len(chat.before) for chat in turns] == list(range(len(turns)))
        for (i, j), chat in zip(pairwise(talk), turns[1:]):
            assert 20 <= chat.apart_s <= 40
            assert (j - i) / rate >= chat.apart_s
            assert (j - i) / rate <= 1.5 * chat.apart_s + 4 / rate


def test_conversations_that_are_too_few_come_back_sooner_and_in_order():
    order = in_turn(LATER.chats(60, seed=1), 100.0)
    for talk in places_of(order):
        assert [len(order[i].before) for i in talk] == list(range(len(talk)))


def test_without_seconds_the_order_is_that_of_the_workload():
    chats = read_workload("chat").chats(80, seed=2)
    assert in_turn(chats, 3.0) == chats
    alone = read_workload("textcaps").chats(20, seed=2)
    assert in_turn(alone, 3.0) == alone and not any(chat.talk for chat in alone)


def test_the_workload_that_ships_comes_back_after_minutes():
    pauses = sorted(c.apart_s for c in read_workload("chat-minutes").chats(500, seed=0) if c.apart_s)
    assert 100 < pauses[len(pauses) // 2] < 140 and pauses[0] >= 20 and pauses[-1] <= 600


def test_seconds_that_cannot_be_read_are_refused():
    with pytest.raises(ConfigError, match="cannot read 'soon'"):
        Workload(dataset="d", dialogues=Dialogues(apart_s="soon"))
