"""One SIGKILL of a real process at every row of the table in docs/failures.md: nothing is lost, repeated, changed or
left behind."""

import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hydrainfer.cluster import Pulse
from hydrainfer.core import Stage
from tests.cluster.faults import Fault
from tests.cluster.fleet import Fleet, leased, undisturbed

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]

SLOW = {"copy_s": 0.4}
LATE = {"copy_s": 1.6, "targets_are_mute": True}  # longer than the lease
FAILING = {"copies_fail": True}

# Of each row: who dies where. E0 -> P0 moves pictures, P0 -> D* moves keys and values.
ROWS = {
    "hello": [Fault("P0", "sent Hello")],
    "encoding": [Fault("E", "launch encode")],
    "prefilling": [Fault("P", "launch prefill", nth=3)],
    "decoding": [Fault("D", "launch decode", nth=8)],
    "held": [Fault("E", "send Offer"), Fault("P", "send Offer")],
    "offered": [Fault("E", "sent Offer"), Fault("P", "sent Offer"), Fault("P", "hear Offer"), Fault("D", "hear Offer")],
    "pulling": [
        Fault("E", "hear Admit", **SLOW),
        Fault("P", "hear Admit", **SLOW),
        Fault("P", "sent Admit", **SLOW),
        Fault("D", "sent Admit", **SLOW),
    ],
    "landed": [
        Fault("E", "hear Landed"),
        Fault("P", "hear Landed"),
        Fault("P", "send Landed"),
        Fault("D", "sent Landed"),
    ],
    "released": [
        Fault("E", "sent Confirm"),
        Fault("P", "send Confirm"),
        Fault("P", "sent Confirm"),
        Fault("P", "hear Confirm"),
        Fault("D", "hear Confirm"),
    ],
    "theirs": [
        Fault("E", "hear Release"),
        Fault("P", "hear Release"),
        Fault("P", "sent Release"),
        Fault("D", "sent Release"),
    ],
    "expired": [Fault("P", "sent Withdraw", **LATE), Fault("D", "hear Withdraw", **LATE)],
    "refused": [Fault("P", "hear Release", **FAILING), Fault("D", "sent Release", **FAILING)],
}
FEW = {"max_running": 3, "kv_blocks": 24, "headroom": 0}  # so that requests are parked in host memory
PARKED = {
    "parked": [Fault("D", "parked"), Fault("P", "hear Release", nth=4)],
    "entering": [Fault("D", "entering")],
    "leaving": [Fault("D", "leaving")],
}
PICTURES = itertools.count()


def cases(rows):
    return [pytest.param(row, f, id=f"{row}-{f.who}-{f.at.replace(' ', '-')}") for row, fs in rows.items() for f in fs]


class Fleets:
    """Lends one fleet after the other, each as long as it is whole and what it has is asked for."""

    def __init__(self, folder):
        self._folder, self._fleet, self._asked = folder, None, None

    def lend(self, layout, few):
        if self._asked != (layout, few):
            self.close()
            self._fleet, self._asked = Fleet(layout, self._folder("faults"), **few), (layout, few)
        return self._fleet

    def close(self):
        fleet, self._fleet, self._asked = self._fleet, None, None
        if fleet is not None:
            fleet.close()


@pytest.fixture(scope="module")
def fleets(tmp_path_factory):
    fleets = Fleets(tmp_path_factory.mktemp)
    yield fleets
    fleets.close()


@pytest.fixture
def layout():
    return "1E1P2D"


@pytest.fixture
def few():
    return {}


@pytest.fixture
def fleet(fleets, layout, few):
    fleet = fleets.lend(layout, few)
    yield fleet
    if fleet.side.lives.n_live or any(i.state != "alive" for i in fleet.infos().values()):
        fleets.close()


def ask_some(fleet, name, n=6):
    """Half of them with a picture that nobody has seen."""
    return [
        fleet.ask(f"{name}/{i}", n_text=3 + i, pictures=[next(PICTURES)] * (i % 2), max_tokens=20 + 3 * i)
        for i in range(n)
    ]


def kill(info):
    os.kill(info.pid, signal.SIGKILL)


@pytest.mark.parametrize("few", [FEW], ids=[""])
@pytest.mark.parametrize(("row", "fault"), cases(PARKED))
def test_a_death_of_who_has_parked_some(row, fault, fleet):
    die_at(row, fault, fleet, n=16)


@pytest.mark.parametrize(("row", "fault"), cases(ROWS))
def test_a_death_at(row, fault, fleet):
    die_at(row, fault, fleet)


def die_at(row, fault, fleet, n=6):
    fleet.wait_whole()
    before, n_recovered = fleet.infos(), fleet.side.lives.n_recovered
    fleet.faults.arm(fault)
    requests = ask_some(fleet, f"{row}-{fault.who}-{fault.at}", n)
    if row == "hello":
        kill(before["P0"])
    fleet.wait(fleet.faults.fired)
    for r in requests:
        assert fleet.answer(r) == ("length", undisturbed(r), None)
    fleet.wait_whole()
    died = [name for name, info in fleet.infos().items() if info.incarnation != before[name].incarnation]
    assert len(died) == 1 and died[0].startswith(fault.who)
    print(f"{died[0]} died, {fleet.side.lives.n_recovered - n_recovered} of {len(requests)} recovered")


def test_a_death_after_the_clients_have_gone(fleet):
    """Cancelled while it is on its way between two instances of which one is dead."""
    fleet.wait_whole()
    fleet.faults.arm(Fault("P", "sent Confirm"))
    requests = ask_some(fleet, "cancelled", n=8)
    fleet.wait(fleet.faults.fired)
    fleet.hub.cancel([r.id for r in requests])
    for r in requests:
        reason, tokens, error = fleet.answer(r)
        assert reason in ("abort", "length") and tokens == undisturbed(r)[: len(tokens)] and error is None
    fleet.wait_whole()


# Layouts with what they run; where stages die together, once.
DARK = [
    *[("1E1P2D", stage) for stage in Stage],
    *[(layout, stage) for layout in ("1EP1D", "1ED1P") for stage in (Stage.PREFILL, Stage.DECODE)],
    *[("1E1PD", stage) for stage in (Stage.ENCODE, Stage.PREFILL)],
    ("2EPD", Stage.PREFILL),
]


@pytest.mark.parametrize(("layout", "stage"), DARK)
def test_when_all_of_a_stage_die_who_comes_while_they_are_away_waits_too(layout, stage, fleet):
    fleet.wait_whole()
    roles = fleet.side.census.roles
    dying = [info for name, info in fleet.infos().items() if roles[name].runs(stage)]
    requests = ask_some(fleet, f"dark {layout} {stage}")
    for info in dying:
        kill(info)
    fleet.wait(lambda: stage in fleet.side.census.dark())
    while stage in fleet.side.census.dark() and len(requests) < 40:
        requests += ask_some(fleet, f"newcomers {layout} {stage}/{len(requests)}", n=2)
        time.sleep(0.01)
    for r in requests:
        assert fleet.answer(r) == ("length", undisturbed(r), None)
    fleet.wait_whole()
    print(f"{len(requests) - 6} newcomers")


def test_a_stage_that_does_not_come_back_is_a_503(tmp_path):
    """Of every request alike: those that decoded there, those that were on their way, those that come later."""
    fleet = Fleet("1E1P1D", tmp_path, Pulse(beat_s=0.1, patience_s=1.0))
    try:
        fleet.launcher.restarts = False
        fleet.faults.arm(Fault("D", "launch decode", nth=8))
        requests = ask_some(fleet, "dark", n=8)
        fleet.wait(fleet.faults.fired)
        killed_s = time.monotonic()
        requests.append(fleet.ask("later", pictures=[next(PICTURES)]))
        for r in requests:
            reason, tokens, error = fleet.answer(r)
            assert (reason, error.status, bool(error.retry_after_s)) == ("error", 503, True)
            assert tokens == undisturbed(r)[: len(tokens)]
        print(f"all told after {time.monotonic() - killed_s:.1f} s")
        fleet.wait(lambda: not any(i.stats and leased(i.stats) for i in fleet.infos().values()))
        assert fleet.side.census.dark() == [Stage.DECODE]
    finally:
        fleet.close()


def test_every_row_of_the_table_has_its_death():
    table = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    rows = re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)
    assert rows == [*ROWS, *PARKED]
